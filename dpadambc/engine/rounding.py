r"""Products that round their operands, and a clip that bounds the rounded gradient.

Tensor cores, and the matrix units of a TPU, keep 11 or 8 significant bits of a number
that they multiply. So one example's clipped gradient differs from the one whose norm
was taken. This module bounds the difference, and the part of C that the clip reserves
for it.

**A product** of operands x and y rounds each entry to :math:`x (1 + \delta)`,
:math:`|\delta| \le u`, where :math:`\delta` depends on the entry and on its side of the
product; it multiplies exactly and adds up in float32. Let
:math:`N = \sum_t a_t g_t^\top` be the gradient of one example and one parameter,
:math:`S = \sum_t \lVert a_t \rVert \lVert g_t \rVert` or more (of several kernels, such
as the heads, the root of the sum of squares), and :math:`k = 2 u + u^2`. A and G have
the rows :math:`a_t` and :math:`g_t`, and :math:`\lVert G \rVert_2` is the largest
singular value.

1. *The error of rounding.* If the terms are multiplied by such a product, the result
   :math:`\hat N` has :math:`\lVert \hat N - N \rVert \le k S`. For
   :math:`\hat a \hat g^\top - a g^\top = (\hat a - a) g^\top + a (\hat g - g)^\top +
   (\hat a - a) (\hat g - g)^\top`, whose norms are at most :math:`u`, :math:`u` and
   :math:`u^2` times :math:`\lVert a \rVert \lVert g \rVert`; sum over t. For long
   sequences S may be less: the errors of the matrices A and G have norms of at most
   :math:`u \lVert A \rVert` and :math:`u \lVert G \rVert`, so :math:`\lVert \hat N - N
   \rVert \le u (\lVert A \rVert \lVert G \rVert_2 + \lVert A \rVert_2 \lVert G \rVert)
   + u^2 \lVert A \rVert \lVert G \rVert`. Where only one factor is rounded, one term is
   enough. And :math:`\lVert G \rVert_2^2 \le \lVert G G^\top \rVert`, the norm of a
   Gram matrix, which is computed in any case.

2. *The norm.* Two Gram matrices give :math:`q = \langle \hat N, \check N \rangle`, the
   inner product of two roundings of N, for the sides may round differently. With
   :math:`e = k S`, :math:`\lVert N \rVert \le \sqrt{\max(q, e^2)} + e`. For
   :math:`q = \lVert N + M \rVert^2 - \lVert D \rVert^2` with M and D half of the sum
   and of the difference of the two errors, so :math:`\lVert M \rVert^2 + \lVert D
   \rVert^2 \le e^2`. If :math:`n = \lVert N \rVert \ge 2 e`, then
   :math:`q \ge (n - m)^2 - e^2 + m^2` with :math:`m = \lVert M \rVert \le e \le n / 2`,
   which is least at m = e, so :math:`q \ge (n - e)^2`. Else :math:`n \le e + e`.

3. *The sum.* Where one operand is scaled by the weight c of the example and rounded
   again, the contribution of the example is :math:`\tilde N` with :math:`\lVert \tilde
   N - c N \rVert \le c k' S`, by 1 with c g in place of g, and k' as below.

**Theorem.** Let an example have :math:`q_p`, :math:`e_p = k_p S_p` and
:math:`e'_p = k'_p S_p` for each parameter p. If

.. math:: 0 \le c \le C \,/\, \Big(\sqrt{\textstyle\sum_p \max(q_p, e_p^2)} +
    \sqrt{\textstyle\sum_p (e_p + e'_p)^2}\Big)

then its contribution to the sum, *as rounded*, has a norm of at most C over all
parameters.
*Proof.* By 3 and 2, :math:`\lVert \tilde N_p \rVert \le c (\lVert N_p \rVert + e'_p)
\le c (\sqrt{\max(q_p, e_p^2)} + e_p + e'_p)`; the norm of this vector over p is at most
the sum of the norms of two, by Minkowski. The contribution depends on the example
alone, since c does, so one example moves the sum by no more.

**Several forms of one parameter**, such as a tied head and its table: with
:math:`N = \sum_i N_i`, :math:`E = \sum_i e_i` and :math:`W = \sum_i
(\sqrt{\max(q_i, e_i^2)} + e_i) \ge \sum_i \lVert N_i \rVert`, each of the products
:math:`\langle N_i, N_j \rangle` is wrong by at most :math:`e_i \lVert N_j \rVert + e_j
\lVert N_i \rVert + e_i e_j`, so :math:`\lVert N \rVert^2 \le q + 2 E W + E^2`. That
replaces :math:`\max(q_p, e_p^2)`, and :math:`\sum_i e'_i` replaces :math:`e_p + e'_p`.

**Constants**, each a hundredth more than here, since S is taken from the diagonals of
the Gram matrices, by rows. A unit that truncates to 11 bits (TF32) loses no more than
:math:`u = 2^{-10}`: :math:`k = k'`, .2 % each. With 8 bits (bfloat16) it could lose
:math:`2^{-7}`; so this module rounds operands to bfloat16 once, at the start of the
clip, and to nearest. That defines the gradient (a bfloat16 model has it anyway), so
:math:`k = 0`, and only the operand that c scales is rounded again: :math:`k' = 2^{-8}`,
.4 %. A gradient that is materialized for each example is exact by definition, however
its product rounded, and is weighted in float32: :math:`k = k' = 0`. The same holds for
rows that are looked up.

**Three passes** multiply a high part and a low one, :math:`\hat x = x_h + x_l` with
:math:`|x_l| \le u |x|` and :math:`|\hat x - x| \le u^2 |x|`, and leave out the product
of low parts: in all :math:`3 u^2`, and smaller terms, so :math:`k = k' = 4 u^2`. But a
Gram matrix then lacks :math:`A_l A_l^\top`, so q is the inner product of two roundings
less :math:`\langle A_l^\top \hat G, \check A_l^\top \check G \rangle`, and the same of
:math:`G_l`, each at most :math:`u^2 S^2`. So :math:`2 u^2 S^2` is added to q.

**Sums in float32** round, too. `precision.rounding_error` bounds their error in q; the
allowance is added to :math:`\max(q, e^2)`, and the error in the sum over t to e'. Not
covered are tensor cores that truncate where they add up, the sum over examples, and
entries under 1e-38, which underflow. See `clip_per_example`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dpadambc.engine import precision as dtypes

_Preset = jax.lax.DotAlgorithmPreset
T = TypeVar("T")
Precision = jax.lax.Precision | jax.lax.DotAlgorithmPreset | None


@dataclasses.dataclass(frozen=True)
class Unit:
    """The hardware unit that computes a matrix product."""

    algorithm: Any  # for `jax.lax.dot_general`
    dtype: Any = None  # of the operands; None: their own
    in_norm: float = 0.0  # k
    in_sum: float = 0.0  # k'
    left_out: float = 0.0  # error of three passes in q, over S squared

    @property
    def error(self) -> float:
        """The error of a term of the sum, over its weight and S.

        It is relative to the exact gradient: k', plus the rounding of `operand`.
        """
        u = 0.0 if self.dtype is None else float(jnp.finfo(self.dtype).eps) / 2
        return self.in_sum + _rounding(u)

    def operand(self, x: jax.Array) -> jax.Array:
        """Casts an array to an operand of the unit, rounded to nearest if at all."""
        return x if self.dtype is None else rounded_to(x, self.dtype)

    def spectral(
        self, squares: Sequence[jax.Array], grams: Sequence[jax.Array], scaled: int
    ) -> jax.Array:
        """Computes S by spectral norms.

        Args:
          squares: the squared Frobenius norms of both factors.
          grams: the Frobenius norms of both Gram matrices.
          scaled: the factor that is rounded in the weighted sum, if only one is.
        """
        a, g = squares
        # A computed Gram matrix may be too small by k times the squared norm of its
        # factor.
        largest_a, largest_g = (
            gram + self.in_norm * square
            for gram, square in zip(grams, squares, strict=True)
        )
        # ||A|| ||G||_2 and ||A||_2 ||G||, with ||G||_2^2 <= ||G G^T||.
        by_side = jnp.sqrt(a * largest_g), jnp.sqrt(largest_a * g)
        # Three passes need S by rows, which is never above ||A|| ||G||.
        if self.left_out:
            return jnp.sqrt(a * g)
        if not self.in_norm:
            return by_side[scaled]
        # At least the bound of `rounding`, 1, over k, since k >= 2 u and k^2 >= u^2.
        return (by_side[0] + by_side[1]) / 2 + self.in_norm * jnp.sqrt(a * g)

    def einsum(
        self,
        a: jax.Array,
        a_axes: Sequence[int],
        b: jax.Array,
        b_axes: Sequence[int],
        out_axes: Sequence[int],
    ) -> jax.Array:
        """Computes `jnp.einsum` of two arrays, accumulated in at least float32."""
        common = jnp.promote_types(a.dtype, b.dtype)
        return jnp.einsum(
            a.astype(common),
            list(a_axes),
            b.astype(common),
            list(b_axes),
            list(out_axes),
            precision=self.algorithm,
            preferred_element_type=dtypes.at_least_float32(common),
        )

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies axes (l, t, i) and (l, t, j) to (l, i, j)."""
        if a.shape[0] == 1:
            # Without the axis of size one, XLA multiplies in place, without a
            # transposition.
            return self.einsum(a[0], (0, 1), b[0], (0, 2), (1, 2))[None]
        return self.einsum(a, (0, 1, 2), b, (0, 1, 3), (0, 2, 3))

    def gram(self, rows: jax.Array) -> jax.Array:
        """Computes inner products of rows: axes (l, t, i) to (l, t, t)."""
        if rows.shape[0] == 1:
            return self.einsum(rows[0], (0, 2), rows[0], (1, 2), (0, 1))[None]
        return self.einsum(rows, (0, 1, 3), rows, (0, 2, 3), (0, 1, 2))


def rounded_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds to the nearest number of the narrower dtype, in the other dtype.

    It uses an operation that XLA keeps: XLA may remove a plain cast, or an earlier one.
    """
    narrow = min(x.dtype, jnp.dtype(dtype), key=lambda each: jnp.finfo(each).nmant)
    wide = x.astype(jnp.promote_types(x.dtype, dtype))
    if jnp.finfo(narrow).bits < jnp.finfo(wide.dtype).bits:
        info = jnp.finfo(narrow)
        wide = jax.lax.reduce_precision(wide, info.nexp, info.nmant)
    return wide.astype(dtype)


def rounded_tree(tree: T) -> T:
    """Rounds arrays of low precision to their dtype, each array once."""
    known = {id(x): dtypes.rounded(x) for x in jax.tree.leaves(tree)}
    return jax.tree.map(lambda x: known[id(x)], tree)


def _rounding(unit_roundoff: float) -> float:
    """Computes k, plus a hundredth, since such products compute S too."""
    return 1.01 * (2 * unit_roundoff + unit_roundoff**2)


EXACT = Unit(jax.lax.Precision.HIGHEST)
_TF32 = Unit(
    _Preset.TF32_TF32_F32, jnp.float32, _rounding(2.0**-10), _rounding(2.0**-10)
)
_BF16 = Unit(_Preset.BF16_BF16_F32, jnp.bfloat16, 0.0, 1.01 * 2.0**-8)


def _three_passes(algorithm: Any, low: float) -> Unit:
    """Makes the unit of three passes, whose low part is at most `low` times x."""
    return Unit(algorithm, jnp.float32, 4 * low**2, 4 * low**2, 2.02 * low**2)


_THREE_OF_BF16 = _three_passes(_Preset.BF16_BF16_F32_X3, 2.0**-7)
_THREE_OF_TF32 = _three_passes(_Preset.TF32_TF32_F32_X3, 2.0**-10)


@dataclasses.dataclass(frozen=True)
class Units:
    """The unit for the products of each dtype on a device; float64 stays exact."""

    wide: Unit  # float32, and float16, whose range is too small for a weight
    narrow: Unit  # bfloat16

    def of(self, *arrays: jax.Array) -> Unit:
        """Returns the unit for a product of arrays."""
        dtype = jnp.result_type(*arrays)
        if dtype == jnp.bfloat16:
            return self.narrow
        return EXACT if jnp.finfo(dtype).bits > 32 else self.wide


FULL = Units(EXACT, EXACT)
# JAX's default product, for gradients that are materialized for each example.
DEFAULT = Units(Unit(None), Unit(None))
CUDA = Units(_TF32, _BF16)
TPU = Units(_BF16, _BF16)

CHOICES: dict[Any, Units] = {
    jax.lax.Precision.HIGHEST: FULL,
    _Preset.F32_F32_F32: FULL,
    **{
        unit.algorithm: Units(unit, unit)
        for unit in (_TF32, _BF16, _THREE_OF_BF16, _THREE_OF_TF32)
    },
}
# The names in `jax.default_matmul_precision`.
_NAMES = {
    "highest": FULL,
    "float32": FULL,
    **{str(choice): units for choice, units in CHOICES.items()},
}


def by_platform(precision: Precision) -> dict[str, Units]:
    """Returns the units of each platform that has some; others multiply in full."""
    chosen = CHOICES.get(precision)
    if chosen is None:
        config: Any = jax.config
        chosen = _NAMES.get(config.jax_default_matmul_precision)
    return {"cuda": chosen or CUDA, "tpu": chosen or TPU}


def on_device(fun: Callable[..., T], precision: Precision, *operands: Any) -> T:
    """Calls `fun(units, *operands)` with the units of the device it is lowered for.

    CPUs, and any other platform without a known unit, multiply in full.

    Args:
      fun: a function of the units and of arrays.
      precision: the precision of `clip_per_example`.
      operands: pytrees of arrays.
    """
    platforms = by_platform(precision)
    if all(units is FULL for units in platforms.values()):
        return fun(FULL, *operands)
    leaves, structure = jax.tree.flatten(operands)
    distinct = {id(x): x for x in leaves}

    def by(units):
        def run(*arrays):  # shared operands stay shared
            known = dict(zip(distinct, arrays, strict=True))
            return fun(units, *structure.unflatten(known[id(x)] for x in leaves))

        return run

    programs = {name: by(units) for name, units in platforms.items()}
    choose: Any = jax.lax.platform_dependent
    return choose(*distinct.values(), **programs, default=by(FULL))
