r"""Products that round what they multiply, and a clip that holds for what comes out.

Tensor cores, and the matrix units of a TPU, keep 11 or 8 significant bits of a number
that they multiply. One example's clipped gradient is then not what its norm says. Here
is by how much, and what the clip has to give away for it.

**A product** of operands x and y rounds each entry to :math:`x (1 + \delta)`,
:math:`|\delta| \le u`, where :math:`\delta` depends on the entry and on the side that
it is on; it multiplies exactly and adds up in float32. Let
:math:`N = \sum_t a_t g_t^\top` be the gradient of one example and one parameter,
:math:`S = \sum_t \lVert a_t \rVert \lVert g_t \rVert` or more (of several kernels, such
as the heads, the root of the sum of squares), and :math:`k = 2 u + u^2`. A and G have
the rows :math:`a_t` and :math:`g_t`, and :math:`\lVert G \rVert_2` is the largest
singular value.

1. *What rounding moves.* If the terms are multiplied by such a product, the result
   :math:`\hat N` has :math:`\lVert \hat N - N \rVert \le k S`. For
   :math:`\hat a \hat g^\top - a g^\top = (\hat a - a) g^\top + a (\hat g - g)^\top +
   (\hat a - a) (\hat g - g)^\top`, whose norms are at most :math:`u`, :math:`u` and
   :math:`u^2` times :math:`\lVert a \rVert \lVert g \rVert`; sum over t. For
   long sequences S may be less: what the matrices A and G are moved by has norms of at
   most :math:`u \lVert A \rVert` and :math:`u \lVert G \rVert`, so
   :math:`\lVert \hat N - N \rVert \le u (\lVert A \rVert \lVert G \rVert_2 +
   \lVert A \rVert_2 \lVert G \rVert) + u^2 \lVert A \rVert \lVert G \rVert`. Where one
   factor alone is rounded, one term is all. And :math:`\lVert G \rVert_2^2 \le
   \lVert G G^\top \rVert`, the norm of a Gram matrix, which is there in any case.

2. *The norm.* Two Gram matrices give :math:`q = \langle \hat N, \check N \rangle`, the
   inner product of two roundings of N, for the sides may round differently. With
   :math:`e = k S`, :math:`\lVert N \rVert \le \sqrt{\max(q, e^2)} + e`. For
   :math:`q = \lVert N + M \rVert^2 - \lVert D \rVert^2` with M and D half of the sum
   and of the difference of what was moved, so :math:`\lVert M \rVert^2 + \lVert D
   \rVert^2 \le e^2`. If :math:`n = \lVert N \rVert \ge 2 e`, then
   :math:`q \ge (n - m)^2 - e^2 + m^2` with :math:`m = \lVert M \rVert \le e \le n / 2`,
   which is least at m = e, so :math:`q \ge (n - e)^2`. Else :math:`n \le e + e`.

3. *The sum.* Where one operand is scaled by the weight c of the example and rounded
   again, what the example adds is :math:`\tilde N` with :math:`\lVert \tilde N - c N
   \rVert \le c k' S`, by 1 with c g in place of g, and k' as below.

**Theorem.** Let an example have :math:`q_p`, :math:`e_p = k_p S_p` and
:math:`e'_p = k'_p S_p` for each parameter p. If

.. math:: 0 \le c \le C \,/\, \Big(\sqrt{\textstyle\sum_p \max(q_p, e_p^2)} +
    \sqrt{\textstyle\sum_p (e_p + e'_p)^2}\Big)

then what it adds to the sum, *as rounded*, has a norm of at most C over all parameters.
*Proof.* By 3 and 2, :math:`\lVert \tilde N_p \rVert \le c (\lVert N_p \rVert + e'_p)
\le c (\sqrt{\max(q_p, e_p^2)} + e_p + e'_p)`; the norm of this vector over p is at most
the sum of the norms of two, by Minkowski. The contribution depends on the example
alone, since c does, so one example moves the sum by no more.

**Several forms of one parameter**, such as a tied head and its table: with
:math:`N = \sum_i N_i`, :math:`E = \sum_i e_i` and :math:`W = \sum_i
(\sqrt{\max(q_i, e_i^2)} + e_i) \ge \sum_i \lVert N_i \rVert`, each of the products
:math:`\langle N_i, N_j \rangle` is wrong by at most :math:`e_i \lVert N_j \rVert + e_j
\lVert N_i \rVert + e_i e_j`, so :math:`\lVert N \rVert^2 \le q + 2 E W + E^2`. That
takes the place of :math:`\max(q_p, e_p^2)`, and :math:`\sum_i e'_i` of
:math:`e_p + e'_p`.

**Constants**, each a hundredth more than here, since S is taken from the diagonals of
the Gram matrices, by rows. Of 11 bits (TF32) no more than :math:`u = 2^{-10}` is lost,
if the unit truncates: :math:`k = k'`, .2 % each. Of 8 bits (bfloat16) as much as
:math:`2^{-7}` would be; so operands are rounded to bfloat16 here, once, where the clip
takes them, and to nearest. That defines the gradient (it is what a bfloat16 model has
anyway), so :math:`k = 0`, and only the operand that c scales is rounded again:
:math:`k' = 2^{-8}`, .4 %. A gradient that is formed for each example is what it is,
whatever its product rounded, and is weighted in float32: :math:`k = k' = 0`. So are
rows that are looked up.

**Three passes** multiply a high part and a low one, :math:`\hat x = x_h + x_l` with
:math:`|x_l| \le u |x|` and :math:`|\hat x - x| \le u^2 |x|`, and leave out the product
of low parts: in all :math:`3 u^2`, and smaller terms, so :math:`k = k' = 4 u^2`. But a
Gram matrix then lacks :math:`A_l A_l^\top`, so q is the inner product of two roundings
less :math:`\langle A_l^\top \hat G, \check A_l^\top \check G \rangle`, and the same of
:math:`G_l`, each at most :math:`u^2 S^2`. So :math:`2 u^2 S^2` is added to q.

**Sums in float32** round, too. What that hides of q, `precision.rounding_error` bounds;
the allowance is added to :math:`\max(q, e^2)`, and what rounds in the sum over t to e'.
Not covered are tensor cores that truncate where they add up, the sum over examples, and
entries under 1e-38, which vanish. See `clip_per_example`.
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
    """What multiplies two arrays."""

    algorithm: Any  # for `jax.lax.dot_general`
    dtype: Any = None  # of the operands; None: theirs
    in_norm: float = 0.0  # k
    in_sum: float = 0.0  # k'
    left_out: float = 0.0  # of q by three passes, in units of the square of S

    @property
    def error(self) -> float:
        """Of a term of the sum, from an exact gradient's, over its weight and S.

        It is k', and what `operand` rounds.
        """
        u = 0.0 if self.dtype is None else float(jnp.finfo(self.dtype).eps) / 2
        return self.in_sum + _rounding(u)

    def operand(self, x: jax.Array) -> jax.Array:
        """An array as the unit takes it, rounded to nearest if at all."""
        return x if self.dtype is None else rounded_to(x, self.dtype)

    def spectral(
        self, squares: Sequence[jax.Array], grams: Sequence[jax.Array], scaled: int
    ) -> jax.Array:
        """S by spectral norms.

        Args:
          squares: the squared Frobenius norms of both factors.
          grams: the Frobenius norms of both Gram matrices.
          scaled: which factor is rounded in the weighted sum, if one is.
        """
        a, g = squares
        # Rounding may have taken k of a Gram matrix, too.
        largest_a, largest_g = (
            gram + self.in_norm * square
            for gram, square in zip(grams, squares, strict=True)
        )
        by_side = jnp.sqrt(a * largest_g), jnp.sqrt(largest_a * g)
        if self.left_out:
            return jnp.sqrt(a * g)
        if not self.in_norm:
            return by_side[scaled]
        return (by_side[0] + by_side[1]) / 2 + self.in_norm * jnp.sqrt(a * g)

    def einsum(
        self,
        a: jax.Array,
        a_axes: Sequence[int],
        b: jax.Array,
        b_axes: Sequence[int],
        out_axes: Sequence[int],
    ) -> jax.Array:
        """`jnp.einsum` of two arrays, accumulated in at least float32."""
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
        """Axes (l, t, i) and (l, t, j) to (l, i, j)."""
        if a.shape[0] == 1:
            # Without the axis of size one, XLA multiplies in place, not transposing.
            return self.einsum(a[0], (0, 1), b[0], (0, 2), (1, 2))[None]
        return self.einsum(a, (0, 1, 2), b, (0, 1, 3), (0, 2, 3))

    def gram(self, rows: jax.Array) -> jax.Array:
        """Inner products of rows: axes (l, t, i) to (l, t, t)."""
        if rows.shape[0] == 1:
            return self.einsum(rows[0], (0, 2), rows[0], (1, 2), (0, 1))[None]
        return self.einsum(rows, (0, 1, 3), rows, (0, 2, 3), (0, 1, 2))


def rounded_to(x: jax.Array, dtype: Any) -> jax.Array:
    """The number that the narrower dtype has, in the other, to nearest.

    By an operation that XLA keeps: it may leave out a plain cast, or one before.
    """
    narrow = min(x.dtype, jnp.dtype(dtype), key=lambda each: jnp.finfo(each).nmant)
    wide = x.astype(jnp.promote_types(x.dtype, dtype))
    if jnp.finfo(narrow).bits < jnp.finfo(wide.dtype).bits:
        info = jnp.finfo(narrow)
        wide = jax.lax.reduce_precision(wide, info.nexp, info.nmant)
    return wide.astype(dtype)


def pinned(tree: T) -> T:
    """The numbers that arrays of low precision have, each array once."""
    known = {id(x): dtypes.rounded(x) for x in jax.tree.leaves(tree)}
    return jax.tree.map(lambda x: known[id(x)], tree)


def _rounding(unit_roundoff: float) -> float:
    """k, and a hundredth of it, since S is computed by such products too."""
    return 1.01 * (2 * unit_roundoff + unit_roundoff**2)


EXACT = Unit(jax.lax.Precision.HIGHEST)
_TF32 = Unit(
    _Preset.TF32_TF32_F32, jnp.float32, _rounding(2.0**-10), _rounding(2.0**-10)
)
_BF16 = Unit(_Preset.BF16_BF16_F32, jnp.bfloat16, 0.0, 1.01 * 2.0**-8)


def _three_passes(algorithm: Any, low: float) -> Unit:
    """Of x in two parts, the lower of which is at most so many times x."""
    return Unit(algorithm, jnp.float32, 4 * low**2, 4 * low**2, 2.02 * low**2)


_THREE_OF_BF16 = _three_passes(_Preset.BF16_BF16_F32_X3, 2.0**-7)
_THREE_OF_TF32 = _three_passes(_Preset.TF32_TF32_F32_X3, 2.0**-10)


@dataclasses.dataclass(frozen=True)
class Units:
    """What multiplies numbers of each dtype on a device; float64 stays exact."""

    wide: Unit  # float32, and float16, whose exponents are too few for a weight
    narrow: Unit  # bfloat16

    def of(self, *arrays: jax.Array) -> Unit:
        """The unit for a product of arrays."""
        dtype = jnp.result_type(*arrays)
        if dtype == jnp.bfloat16:
            return self.narrow
        return EXACT if jnp.finfo(dtype).bits > 32 else self.wide


FULL = Units(EXACT, EXACT)
# As JAX multiplies by default: for gradients that are formed for each example.
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
# What `jax.default_matmul_precision` calls them.
_NAMES = {
    "highest": FULL,
    "float32": FULL,
    **{str(choice): units for choice, units in CHOICES.items()},
}


def by_platform(precision: Precision) -> dict[str, Units]:
    """The units of each platform that has some; others multiply in full."""
    chosen = CHOICES.get(precision)
    if chosen is None:
        config: Any = jax.config
        chosen = _NAMES.get(config.jax_default_matmul_precision)
    return {"cuda": chosen or CUDA, "tpu": chosen or TPU}


def on_device(fun: Callable[..., T], precision: Precision, *operands: Any) -> T:
    """`fun(units, *operands)` with the units of the device that it is lowered for.

    Processors, and whatever else has no unit that is known here, multiply in full.

    Args:
      fun: of arrays, and of the units.
      precision: as in `clip_per_example`.
      operands: pytrees of arrays.
    """
    platforms = by_platform(precision)
    if all(units is FULL for units in platforms.values()):
        return fun(FULL, *operands)
    leaves, structure = jax.tree.flatten(operands)
    distinct = {id(x): x for x in leaves}

    def by(units):
        def run(*arrays):  # what the operands share, they share still
            known = dict(zip(distinct, arrays, strict=True))
            return fun(units, *structure.unflatten(known[id(x)] for x in leaves))

        return run

    programs = {name: by(units) for name, units in platforms.items()}
    choose: Any = jax.lax.platform_dependent
    return choose(*distinct.values(), **programs, default=by(FULL))
