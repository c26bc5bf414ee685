"""The clipped sum, closed until the noise is added, with the numbers that bound it.

The noise hides one example only in a sum that the example moves no further than the
mechanism says. A stage between the clip and the noise, noise on a part of the sum, or a
sum of other numbers would break that. So the arrays of a clipped sum are closed, like
those of per-example gradients, and only the noise opens them, all at once. Two
static numbers bound the change by one example: the clip norm and the normalizer. They
give the sensitivity under every neighboring relation.

JAX can index, select and move closed arrays like any others. Two changes of this kind
go undetected: rows of a parameter's sum in the place of its other rows, and a sum in
place of the sum of the same parameter from another clip of the same numbers. (Rows of
per-example gradients that are taken twice are detected: see `gradient`.)
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import optax
from jax import core

from dpadambc.core import arrays
from dpadambc.core.gradient import (
    OF_SUMS,
    Closed,
    PerExampleGradient,
    close_array,
    closed_leaves,
    open_array,
)

_STATIC = ("shape", "dtype", "l2_clip_norm", "normalize_by", "is_masked")
_STATIC += ("number", "num_together")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["closed"], meta_fields=_STATIC
)
@dataclasses.dataclass(frozen=True, repr=False)
class ClippedSum(Closed):
    """The clipped sum of one parameter's gradients, which only the noise opens.

    A pytree node with one array, of the parameter's shape: it crosses `jax.jit`,
    `jax.lax.scan`, donation and shardings. Arithmetic on it is an error, and it has no
    derivative. `clip_per_example` and `clipped_grad` return such sums; see
    `as_clipped_sum` too.

    Attributes:
      closed: the sum over the normalizer, closed. Its shape is the parameter's.
      shape: the shape of the parameter.
      dtype: the dtype of the sum.
      l2_clip_norm: C, the bound on the contribution of one example to all sums
        together, before the division; None where JAX traces it, or where each step has
        its own.
      normalize_by: B, the divisor of the sum; None where JAX traces it.
      is_masked: whether the clip saw a padding mask, even one that is all False.
      number: the index of this sum among those that were clipped together.
      num_together: the number of sums that were clipped together.
    """

    advice = "put add_dp_noise first"
    source: ClassVar[str] = "clipped_grad, clip_per_example or as_clipped_sum"

    closed: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    l2_clip_norm: float | None
    normalize_by: float | None
    is_masked: bool
    number: int
    num_together: int

    @property
    def value(self) -> jax.Array:
        """The sum as an array, to look at: *not private*."""
        return open_array(self.closed, self.dtype)

    def plus(self, other: "ClippedSum") -> "ClippedSum":
        """Adds the sum over *other examples* of the same batch.

        Args:
          other: the sum of the same parameter, clipped to the same norm and divided by
            the same number. An example that is in both counts twice, which no epsilon
            covers. The result counts as masked if both are.

        Raises:
          TypeError: if the other is no clipped sum.
          ValueError: if it is the sum of another parameter, or of other numbers.
        """
        if not isinstance(other, ClippedSum):
            raise TypeError(f"Expected other as a ClippedSum, got {type(other)}.")
        is_masked = self.is_masked and other.is_masked
        one, two = (dataclasses.replace(x, is_masked=is_masked) for x in (self, other))
        if (mine := jax.tree.structure(one)) != (its := jax.tree.structure(two)):
            raise ValueError(f"Expected other of the numbers {mine}, got {its}.")
        return one._with(self.value + other.value)

    def sum_over(self, axis_name: Any) -> "ClippedSum":
        """Sums over the devices along axes of a `jax.shard_map`.

        Args:
          axis_name: an axis of the mesh; each device along it has examples of its own.

        Raises:
          ValueError: if all devices along an axis have the same sum, which would count
            each example once for each device.
        """
        of_examples = arrays.shard_map_axes() - arrays.invariant_axes(self.value)
        if wrong := set(jax.tree.leaves(axis_name)) - of_examples:
            raise ValueError(f"Expected axis_name of other examples, got {wrong}.")
        return self._with(jax.lax.psum(self.value, axis_name))

    def _with(self, value: jax.Array) -> "ClippedSum":
        return dataclasses.replace(
            self, closed=close_array(value, OF_SUMS), dtype=value.dtype
        )


def close_sums(
    sums: optax.Updates,
    l2_clip_norm: jax.typing.ArrayLike | None,
    normalize_by: jax.typing.ArrayLike | None,
    *,
    is_masked: bool,
) -> optax.Updates:
    """Wraps a tree of arrays as clipped sums, in at least float32.

    Args:
      sums: the arrays.
      l2_clip_norm: C of `ClippedSum`; it may be traced.
      normalize_by: B of `ClippedSum`; it may be traced.
      is_masked: whether the clip saw a padding mask.
    """
    is_unknown = lambda x: x is None or isinstance(x, core.Tracer)
    known = lambda x: None if is_unknown(x) else float(x)

    leaves, structure = jax.tree.flatten(jax.tree.map(arrays.widen, sums))
    return structure.unflatten(
        ClippedSum(
            closed=close_array(x, OF_SUMS),
            shape=x.shape,
            dtype=x.dtype,
            l2_clip_norm=known(l2_clip_norm),
            normalize_by=known(normalize_by),
            is_masked=is_masked,
            number=number,
            num_together=len(leaves),
        )
        for number, x in enumerate(leaves)
    )


def materialize(gradients: optax.Updates) -> optax.Updates:
    r"""Opens per-example gradients or clipped sums, to look at: *not private*.

    Args:
      gradients: a tree with the output of `per_example_grad`, `clipped_grad` or
        `clip_per_example`.

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
        if isinstance(leaf, PerExampleGradient):
            return leaf.materialize()
        return leaf.value if isinstance(leaf, ClippedSum) else leaf

    return jax.tree.map(array, gradients, is_leaf=lambda x: isinstance(x, Closed))


def open_sums(
    sums: optax.Updates, params: optax.Params | None, mechanism: Any = None
) -> optax.Updates:
    """Opens the arrays of all sums that were clipped together, for the noise.

    Args:
      sums: a tree of `ClippedSum`.
      params: the parameters, whose shapes the sums must have, if given.
      mechanism: the mechanism of the noise, or None where its numbers are not known.

    Raises:
      TypeError: if a leaf is no `ClippedSum`.
      ValueError: if some are missing, have other shapes or numbers, or, for a mechanism
        that pads batches, saw no mask.
    """
    leaves = closed_leaves(sums, ClippedSum, params)
    numbers = sorted((leaf.num_together, leaf.number) for leaf in leaves)
    if numbers != [(len(leaves), i) for i in range(len(leaves))]:
        raise ValueError(
            f"Expected the gradient with all {max(numbers)[0]} sums of the clip, got"
            f" {len(leaves)}. Put optax.masked behind the noise."
        )
    if any(leaf.closed.shape != leaf.shape for leaf in leaves):
        raise ValueError(f"Expected gradient of the shapes of {leaves}, got others.")
    for name in ("l2_clip_norm", "normalize_by"):
        numbers = {getattr(leaf, name) for leaf in leaves}
        if mechanism is not None and None in numbers:
            raise ValueError(
                "Expected clip and noise with the numbers of the mechanism, got a"
                f" traced {name}. Give clip_per_example a Python float, or noise as a"
                " number or schedule that you account for yourself."
            )
        known = {getattr(mechanism, name, None), *numbers} - {None}
        # A relative difference of 1e-6 is the rounding of float32.
        if known and not math.isclose(min(known), max(known), rel_tol=1e-6):
            raise ValueError(f"Expected one {name} in clip and noise, got {known}.")
    is_masked = all(leaf.is_masked for leaf in leaves)
    if getattr(mechanism, "pads_batches", False) and not is_masked:
        raise ValueError(
            "Expected a clip with is_padding_example, as batches of"
            f" {type(mechanism).__name__} are padded, got one without. If nothing is"
            " padded, give a mask that is all False."
        )
    return materialize(sums)
