"""The clipped sum on its way to the noise: closed, and with what bounds it.

The noise hides one example only in a sum that the example moves no further than the
mechanism says. A stage between the clip and the noise, noise on a part of the sum, or a
sum of other numbers would break that. So the arrays of a clipped sum are closed, as
those of per-example gradients are (`_seal`), and the noise alone opens them, all at
once. What one example can move is in two static numbers, the clip norm and the
normalizer: every neighboring relation has its sensitivity from these, so a sum needs
none of its own.

Closed arrays can be indexed, selected and moved between devices, since JAX has these
for all arrays. Rows that are repeated in place multiply the sensitivity, and that is
not seen; nor is one parameter's sum put in place of its sum from another clip of the
same parameters and numbers, which moves the whole by up to the root of 2.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import invariant_axes, shard_map_axes, widen
from dpadambc.core.gradient import OF_SUMS, close_array, is_per_example, open_array
from dpadambc.engine import interface


class _SaysWhatOpensIt(type):
    """JAX prints the type of a node where another tree has something else."""

    def __repr__(cls) -> str:
        return f"{cls.__name__} (add_dp_noise opens it: it gives arrays)"


@interface.pytree(data_fields=("closed",))
class ClippedSum(metaclass=_SaysWhatOpensIt):
    """The clipped sum of one parameter's gradients, which the noise alone opens.

    A pytree node with one array, of the parameter's shape: it crosses `jax.jit`,
    `jax.lax.scan`, donation and shardings. Arithmetic with `jax.tree.map` is an error,
    and it has no derivative: that of what the noise makes of it is zero.
    `clip_per_example` and `clipped_grad` return such sums; see `as_clipped_sum` too.

    Attributes:
      closed: the sum over the normalizer, closed. Its shape is the parameter's.
      shape: of the parameter.
      dtype: of the sum.
      l2_clip_norm: C, the bound on what one example adds to all sums together, before
        the division; None where it is an array, or another in each step.
      normalize_by: B, what the sum was divided by; None where it is an array.
      number: of this sum among those that were clipped together.
      num_together: how many these are.
    """

    closed: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    l2_clip_norm: float | None
    normalize_by: float | None
    number: int
    num_together: int

    @property
    def value(self) -> jax.Array:
        """The sum as an array, to look at: *not private*."""
        return open_array(self.closed, self.dtype)

    def plus(self, other: "ClippedSum") -> "ClippedSum":
        """The sum with that of *other examples* of the same batch.

        Args:
          other: the sum of the same parameter, clipped to the same norm and divided by
            the same number. An example that is in both counts twice, which no epsilon
            covers.

        Raises:
          TypeError: if the other is no clipped sum.
          ValueError: if it is of another parameter, or of other numbers.
        """
        if not is_clipped_sum(other):
            raise TypeError(f"Expected a ClippedSum to add, got {other!r}.")
        if _static(self) != _static(other):
            raise ValueError(
                "Expected the sum of one parameter, clipped and divided by the same"
                f" numbers, got {self!r} and {other!r}."
            )
        return self._with(self.value + other.value)

    def sum_over(self, axis_name: Any) -> "ClippedSum":
        """The sum over the devices along axes of a `jax.shard_map`.

        Args:
          axis_name: of the mesh; each device along it has examples of its own.

        Raises:
          ValueError: if all devices along an axis have one sum.
        """
        _refuse_one_sum_of_all(self.value, axis_name)
        return self._with(jax.lax.psum(self.value, axis_name))

    def _with(self, value: jax.Array) -> "ClippedSum":
        names = ("l2_clip_norm", "normalize_by", "number", "num_together")
        return _closed(value, *(getattr(self, name) for name in names))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"A ClippedSum has no {name}: add_dp_noise opens it, and takes no stage"
            " before. Its value looks at it, which is not private.",
            name=name,
            obj=self,
        )

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "Expected the clipped sum as it is, got arithmetic on it: what changes it"
            " before the noise may change epsilon. Put the stage behind the noise; add"
            " sums of other examples by plus, and over devices by sum_over."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse

    def __repr__(self) -> str:
        return (
            f"ClippedSum(shape={self.shape}, dtype={self.dtype},"
            f" l2_clip_norm={self.l2_clip_norm}, normalize_by={self.normalize_by})"
        )


def _static(leaf: ClippedSum) -> Any:
    return jax.tree.structure(leaf)


def _closed(
    value: jax.Array, l2_clip_norm: Any, normalize_by: Any, number: int, of: int
) -> ClippedSum:
    return ClippedSum(
        closed=close_array(value, OF_SUMS),
        shape=value.shape,
        dtype=value.dtype,
        l2_clip_norm=l2_clip_norm,
        normalize_by=normalize_by,
        number=number,
        num_together=of,
    )


def _refuse_one_sum_of_all(value: jax.Array, axis_name: Any) -> None:
    names = set(jax.tree.leaves(axis_name))
    others = names - shard_map_axes()
    same = names & invariant_axes(value)
    if others or same:
        raise ValueError(
            "Expected a sum of other examples on each device along axes of a"
            f" jax.shard_map, got {sorted(map(str, others or same))}, along which all"
            " have one sum, or may have: each example would count once for each device."
            " Sum over axes along which the examples are split, and once."
        )


def is_clipped_sum(leaf: Any) -> TypeGuard[ClippedSum]:
    """Whether a node of a tree is a `ClippedSum`."""
    return isinstance(leaf, ClippedSum)


def closed(
    sums: optax.Updates,
    l2_clip_norm: jax.typing.ArrayLike | None,
    normalize_by: jax.typing.ArrayLike | None,
) -> optax.Updates:
    """A tree of arrays, from here on closed."""
    c, b = map(_known, (l2_clip_norm, normalize_by))
    leaves, structure = jax.tree.flatten(sums)
    of = len(leaves)
    return structure.unflatten(
        _closed(widen(x), c, b, i, of) for i, x in enumerate(leaves)
    )


def _known(number: Any) -> float | None:
    """A number of Python; of an array nothing, for in `jax.jit` it is traced."""
    return None if number is None or isinstance(number, jax.Array) else float(number)


def as_clipped_sum(
    gradient: optax.Updates, *, l2_clip_norm: float, normalize_by: float
) -> optax.Updates:
    r"""Declares that arrays are a clipped sum, for `add_dp_noise`.

    Use it for a sum from elsewhere than `clipped_grad` or `clip_per_example`, such as
    one that another library has clipped.

    Guarantees:
      * None of its own: by calling this you vouch that the gradient is
        :math:`\frac{1}{B} \sum_i g_i`, where the gradient :math:`g_i` of one example,
        over all arrays together, has a norm of at most C and depends on that example
        alone. A mean that is clipped as a whole is no such sum.

    Args:
      gradient: a tree of arrays of real floating-point numbers.
      l2_clip_norm: C, positive.
      normalize_by: B, positive: a public number.

    Returns:
      The same tree, with a `ClippedSum` for each array, in at least float32.

    Raises:
      TypeError: if a leaf is no array of real floating-point numbers.
      ValueError: if a number is not positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> gradients = jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> norms = jnp.linalg.norm(gradients, axis=1, keepdims=True)
      >>> clipped = gradients / jnp.maximum(norms, 1.0)
      >>> summed = dpadambc.as_clipped_sum(
      ...     clipped.sum(0) / 2, l2_clip_norm=1.0, normalize_by=2)
      >>> print([f"{x:.2f}" for x in summed.value])
      ['0.30', '0.65']
    """
    validate.positive_or_infinite(l2_clip_norm=l2_clip_norm)
    validate.positive(normalize_by=normalize_by)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path) or "gradient"
        if is_per_example(leaf) or not hasattr(leaf, "dtype"):
            raise TypeError(f"Expected {name} to be an array, got {leaf!r}.")
        validate.real_floating(leaf.dtype, name)
    return closed(gradient, l2_clip_norm, normalize_by)


def materialize(gradients: optax.Updates) -> optax.Updates:
    r"""Per-example gradients or clipped sums as arrays, to look at: *not private*.

    Args:
      gradients: what `per_example_grad`, `clipped_grad` or `clip_per_example` returns.

    Returns:
      The same tree, with an array of shape (batch, \*parameter shape) in place of each
      `PerExampleGradient`, and one of the parameter's shape in place of each
      `ClippedSum`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> grads = dpadambc.per_example_grad(lambda w, x: w * x)(1.0, jnp.arange(3.0))
      >>> print(dpadambc.materialize(grads))
      [0. 1. 2.]
    """

    def array(leaf: Any) -> Any:
        if is_per_example(leaf):
            return leaf.materialize()
        return leaf.value if is_clipped_sum(leaf) else leaf

    return jax.tree.map(array, gradients, is_leaf=_is_closed)


def _is_closed(leaf: Any) -> bool:
    return is_clipped_sum(leaf) or is_per_example(leaf)


def opened(
    sums: optax.Updates,
    params: optax.Params | None,
    *,
    l2_clip_norm: float | None = None,
    normalize_by: float | None = None,
) -> optax.Updates:
    """The arrays of all sums that were clipped together, for the noise.

    Args:
      sums: a tree of `ClippedSum`.
      params: whose shapes they have, if given.
      l2_clip_norm: of the mechanism whose noise it is, if known.
      normalize_by: the same.

    Raises:
      TypeError: if a leaf is no `ClippedSum`.
      ValueError: if some are missing, or have other shapes or numbers.
    """
    named = jax.tree_util.tree_leaves_with_path(sums, is_leaf=_is_closed)
    for path, leaf in named:
        if not is_clipped_sum(leaf):
            _refuse_other(jax.tree_util.keystr(path) or "the gradient", leaf)
    leaves: list[ClippedSum] = [leaf for _, leaf in named]
    _refuse_a_part(leaves)
    shapes = [leaf.shape for leaf in leaves]
    expected = shapes if params is None else [*map(jnp.shape, jax.tree.leaves(params))]
    if not expected == shapes == [leaf.closed.shape for leaf in leaves]:
        raise ValueError(
            f"Expected clipped sums with the shapes of the parameters, {expected}, got"
            f" {[leaf.closed.shape for leaf in leaves]}."
        )
    of_noise = {"l2_clip_norm": l2_clip_norm, "normalize_by": normalize_by}
    _refuse_other_numbers(leaves, of_noise)
    return jax.tree.map(lambda leaf: leaf.value, sums, is_leaf=is_clipped_sum)


def _refuse_other(name: str, leaf: Any) -> NoReturn:
    if is_per_example(leaf):
        raise TypeError(
            f"Expected {name} clipped and summed over the batch, got per-example"
            " gradients: they go through dpadambc.clip_per_example first."
        )
    raise TypeError(
        f"Expected {name} as dpadambc.clipped_grad or clip_per_example returns it, got"
        f" {jnp.result_type(leaf)}{list(jnp.shape(leaf))}, of which nothing says that"
        " each example was clipped. If other code clips each one, vouch for it by"
        " dpadambc.as_clipped_sum."
    )


def _refuse_a_part(leaves: Sequence[ClippedSum]) -> None:
    numbers = sorted(leaf.number for leaf in leaves)
    together = {leaf.num_together for leaf in leaves}
    if leaves and (together != {len(leaves)} or numbers != list(range(len(leaves)))):
        raise ValueError(
            f"Expected all {max(together)} sums that were clipped together, got"
            f" {len(leaves)}: what has no noise would be released bare, inside"
            " optax.masked or optax.multi_transform, say. Add noise to all of them, and"
            " divide them behind it; a level for each is a tree of levels."
        )


def _refuse_other_numbers(
    leaves: Sequence[ClippedSum], of_noise: dict[str, float | None]
) -> None:
    for name, expected in of_noise.items():
        known = {getattr(leaf, name) for leaf in leaves} - {None}
        several = known if expected is None else {*known, expected}
        # As far apart as float32 tells numbers from each other.
        if several and not math.isclose(min(several), max(several), rel_tol=1e-6):
            listed = " and ".join(f"{x:g}" for x in sorted(several))
            raise ValueError(
                f"Expected one {name}, in the clip as in the mechanism whose noise it"
                f" is, got {listed}: epsilon would not hold. Give the mechanism's"
                " numbers to the clip, or leave both to dpadambc.privatize."
            )
