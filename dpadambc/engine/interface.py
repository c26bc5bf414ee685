"""The interface that every form of per-example gradient implements.

A `Gradient` is one example's gradient of one parameter, in the form that reverse mode
produces, as a pytree of arrays. A transformation that adds a leading axis to the
arrays, `jax.vmap` over examples or `jax.lax.scan` over time or layers, therefore
returns one gradient for each entry of that axis. `summed` and `stacked` remove the
axis.
"""

import abc
import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from dpadambc.engine import precision, rounding

Shape = tuple[int, ...]
Entrywise = Callable[[jax.Array, jax.Array], jax.Array]
T = TypeVar("T")


@typing.dataclass_transform(frozen_default=True)
def pytree(data_fields: tuple[str, ...]) -> Callable[[type[T]], type[T]]:
    """Registers a frozen dataclass as a pytree with these data fields."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True)(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        meta = [name for name in names if name not in data_fields]
        return jax.tree_util.register_dataclass(cls, list(data_fields), meta)

    return register


def squared(x: jax.Array) -> jax.Array:
    """Squares an array, in at least float32."""
    return jnp.square(x.astype(precision.at_least_float32(x.dtype)))


class Norm(NamedTuple):
    """A norm computed by products that may round; see `rounding`."""

    squared: jax.Array  # max(q, e^2) plus an allowance, in at least float32
    in_norm: Any  # e
    in_sum: Any  # e', with the rounding of sums

    @classmethod
    def of_all(cls, several: "Sequence[Norm]") -> "Norm":
        """Combines gradients of disjoint parameters."""
        # The theorem of `rounding`: by Minkowski, sqrt(sum_p (e_p + e'_p)^2) is at most
        # the root for e plus the root for e'.
        root = lambda values: jnp.sqrt(sum(x * x for x in values))
        squared, in_norm, in_sum = zip(*several, strict=True)
        return cls(functools.reduce(jnp.add, squared), root(in_norm), root(in_sum))

    @property
    def squared_bound(self) -> jax.Array:
        """The square of a bound on a term of the sum, over its weight."""
        # (sqrt(q) + d)^2 = q + d (2 sqrt(q) + d) with d = e + e'.
        moved = self.in_norm + self.in_sum
        return self.squared + moved * (2 * jnp.sqrt(self.squared) + moved)


class Gradient(abc.ABC):
    """One example's gradient of one parameter, of shape `shape`.

    The linear maps return the mapped gradient in factored form, or None where the form
    does not allow it. The caller then makes a `View` for maps that only move entries,
    and a `Block` for zeros around; for other maps it uses `dense`.
    """

    shape: Shape

    @property
    @abc.abstractmethod
    def rule(self) -> str:
        """The method by which the norm is computed, in a word or two."""

    @abc.abstractmethod
    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        """Materializes the gradient, in at least float32."""

    @abc.abstractmethod
    def norm(self, units: rounding.Units) -> Norm:
        """Computes the norm of `operands`, by products of the same units.

        The norm is in at least float32, and never less than the true one: where parts
        of the gradient cancel, it includes an allowance for the error of rounding.
        """

    def operands(self, units: rounding.Units) -> "Gradient":
        """Returns the gradient with its arrays rounded to operands of the units.

        XLA may compute low-precision values with more digits, except in the operands of
        a product.
        """
        del units
        return jax.tree.map(precision.rounded, self)

    @abc.abstractmethod
    def summed(self) -> "Gradient":
        """Sums over a leading axis that the arrays have been given."""

    @abc.abstractmethod
    def stacked(self) -> "Gradient":
        """Turns the leading axis of the arrays into a leading axis of the gradient."""

    @abc.abstractmethod
    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> "Gradient":
        """Applies `fun` to one array in which the gradient is linear."""

    @abc.abstractmethod
    def unscaled(self) -> list[jax.Array]:
        """Returns the arrays of numbers that `map_scale` leaves unchanged."""

    def scaled(self, factor: Any) -> "Gradient":
        """Multiplies the gradient by a scalar."""
        return self.map_scale(lambda x: x * factor)

    def cheaper_form(self) -> "Gradient":
        """Returns the cheaper of this form and the dense one, decided from shapes."""
        return self

    def transpose(self, permutation: Shape) -> "Gradient | None":
        """Permutes the axes of the gradient."""
        del permutation

    def reshape(self, shape: Shape) -> "Gradient | None":
        """Reshapes the gradient."""
        del shape

    def broadcast(self, shape: Shape) -> "Gradient | None":
        """Repeats the gradient along axes of size one."""
        del shape

    def rev(self, axes: Shape) -> "Gradient | None":
        """Reverses the order of the entries along some axes."""
        del axes

    def slice(self, starts: Shape, limits: Shape) -> "Gradient | None":
        """Returns a box of the gradient."""
        del starts, limits

    def pad(self, low: Shape, high: Shape) -> "Gradient | None":
        """Pads the gradient with zeros."""
        del low, high

    def reduce_sum(self, axes: Shape) -> "Gradient | None":
        """Sums over some axes."""
        del axes

    def times(
        self, x: jax.Array, contract: tuple[Shape, Shape], batch: tuple[Shape, Shape]
    ) -> "Gradient | None":
        """Multiplies the gradient by an array, as `lax.dot_general` does."""
        del x, contract, batch

    def entrywise(self, fun: Entrywise, x: jax.Array) -> "Gradient | None":
        """Applies `fun`, linear in its first argument, to entries and an array.

        Args:
          fun: a function of two arrays of one shape.
          x: an array of the gradient's shape, or with axes of size one.
        """
        del fun, x

    def merge(self, other: "Gradient") -> "Gradient | None":
        """Adds another gradient of this form, and returns the sum in this form."""
        del other

    def knows_product_with(self, other: "Gradient") -> bool:
        """Returns whether `inner(other)` needs neither gradient materialized."""
        del other
        return False

    def inner(self, other: "Gradient") -> jax.Array:
        """Returns the inner product of two gradients, never less than the true one."""
        raise NotImplementedError
