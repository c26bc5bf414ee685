"""The parts of a per-example gradient, whatever its form.

A `Gradient` is one example's gradient of one parameter, in whatever form reverse mode
has it, as a pytree of arrays. A transformation that adds a leading axis to the arrays,
`jax.vmap` over examples or `jax.lax.scan` over time or layers, therefore gives one for
each entry of that axis, and `summed` and `stacked` say what becomes of the axis.
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
    """Registers a frozen dataclass as a pytree of the fields named."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True)(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        meta = [name for name in names if name not in data_fields]
        return jax.tree_util.register_dataclass(cls, list(data_fields), meta)

    return register


def squared(x: jax.Array) -> jax.Array:
    """Squares, in at least float32."""
    return jnp.square(x.astype(precision.at_least_float32(x.dtype)))


class Norm(NamedTuple):
    """A norm as products of some units have it; see `rounding`."""

    squared: jax.Array  # max(q, e^2) and an allowance, in at least float32
    in_norm: Any  # e
    in_sum: Any  # e', with the rounding of sums

    @classmethod
    def of_all(cls, several: "Sequence[Norm]") -> "Norm":
        """Of what is apart: the gradients of several parameters, say."""
        root = lambda values: jnp.sqrt(sum(x * x for x in values))
        squared, in_norm, in_sum = zip(*several, strict=True)
        return cls(functools.reduce(jnp.add, squared), root(in_norm), root(in_sum))

    @property
    def squared_bound(self) -> jax.Array:
        """The square of a bound on a term of the sum, over its weight."""
        moved = self.in_norm + self.in_sum
        return self.squared + moved * (2 * jnp.sqrt(self.squared) + moved)


class Gradient(abc.ABC):
    """One example's gradient of one parameter, of shape `shape`.

    The linear maps return the same gradient in factored form, or None where the form
    does not allow it. The caller then has a `View` of those that only move entries, and
    a `Block` for zeros around; for the others it goes through `dense`.
    """

    shape: Shape

    @property
    @abc.abstractmethod
    def rule(self) -> str:
        """How the norm is computed, in a word or two."""

    @abc.abstractmethod
    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        """The gradient itself, in at least float32."""

    @abc.abstractmethod
    def norm(self, units: rounding.Units) -> Norm:
        """Its norm by products that may round, of `operands` of the same units.

        It is in at least float32, and never less than the true one: where parts of the
        gradient cancel, it carries an allowance for what rounding could hide.
        """

    def operands(self, units: rounding.Units) -> "Gradient":
        """The gradient with its arrays as the units take them.

        In low precision XLA may be working with more digits, but for what a product
        multiplies.
        """
        del units
        return jax.tree.map(precision.rounded, self)

    @abc.abstractmethod
    def summed(self) -> "Gradient":
        """The sum over a leading axis that the arrays have been given."""

    @abc.abstractmethod
    def stacked(self) -> "Gradient":
        """The leading axis of the arrays as a leading axis of the gradient."""

    @abc.abstractmethod
    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> "Gradient":
        """With `fun` applied to one array that the gradient is linear in."""

    @abc.abstractmethod
    def unscaled(self) -> list[jax.Array]:
        """The other arrays of numbers."""

    def scaled(self, factor: Any) -> "Gradient":
        """The gradient times a scalar."""
        return self.map_scale(lambda x: x * factor)

    def settled(self) -> "Gradient":
        """The cheaper of this form and the dense one, decided from shapes."""
        return self

    def transpose(self, permutation: Shape) -> "Gradient | None":
        """The gradient with its axes permuted."""
        del permutation

    def reshape(self, shape: Shape) -> "Gradient | None":
        """The gradient in another shape."""
        del shape

    def broadcast(self, shape: Shape) -> "Gradient | None":
        """The gradient repeated along axes of size one."""
        del shape

    def rev(self, axes: Shape) -> "Gradient | None":
        """The gradient with the order of its entries reversed along some axes."""
        del axes

    def slice(self, starts: Shape, limits: Shape) -> "Gradient | None":
        """A box of the gradient."""
        del starts, limits

    def pad(self, low: Shape, high: Shape) -> "Gradient | None":
        """The gradient with zeros around it."""
        del low, high

    def reduce_sum(self, axes: Shape) -> "Gradient | None":
        """The sum over some axes."""
        del axes

    def times(
        self, x: jax.Array, contract: tuple[Shape, Shape], batch: tuple[Shape, Shape]
    ) -> "Gradient | None":
        """`lax.dot_general` with an array."""
        del x, contract, batch

    def entrywise(self, fun: Entrywise, x: jax.Array) -> "Gradient | None":
        """`fun` of each entry, in which it is linear, and of that of an array.

        Args:
          fun: of two arrays of one shape.
          x: of the shape of the gradient, or with axes of size one.
        """
        del fun, x

    def merge(self, other: "Gradient") -> "Gradient | None":
        """The sum with another of this form, in this form."""
        del other

    def knows_product_with(self, other: "Gradient") -> bool:
        """Whether `inner(other)` is known without forming either gradient."""
        del other
        return False

    def inner(self, other: "Gradient") -> jax.Array:
        """The inner product of two gradients, never less than the true one."""
        raise NotImplementedError
