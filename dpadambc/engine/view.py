"""Gradients that are a reshape, a transpose or a reversal of one in another form.

These maps only move entries. They commute with sums over examples and keep norms, so no
form has to know them: they are replayed on the sum. A parameter that the loss reshapes,
or takes out of one long vector, keeps the form of the kernel that it becomes.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpadambc.engine import forms, rounding
from dpadambc.engine.interface import Entrywise, Gradient, Norm, Shape, pytree

_REPLAYED: dict[str, Callable[[jax.Array, Shape], jax.Array]] = {
    "reshape": jnp.reshape,
    "transpose": jnp.transpose,
    "rev": jax.lax.rev,
}


@dataclasses.dataclass(frozen=True)
class Move:
    """A map that moves entries: the method of a `Gradient`, and its argument."""

    name: str
    argument: Shape

    def __call__(self, x: jax.Array) -> jax.Array:
        return _REPLAYED[self.name](x, self.argument)

    def of_array(self, x: jax.Array, shape: Shape) -> jax.Array:
        """Of an array of this shape, or of size one along some axes."""
        if self.name == "reshape":
            return reshaped_array(x, shape, self.argument)
        return self(x)

    def behind(self, size: int) -> "Move":
        """The same map of each entry of a leading axis of this size."""
        if self.name == "reshape":
            return Move(self.name, (size, *self.argument))
        behind = tuple(1 + i for i in self.argument)
        return Move(self.name, behind if self.name == "rev" else (0, *behind))


@pytree(data_fields=("base",))
class View(Gradient):
    """A gradient with its entries moved."""

    base: Gradient
    move: Move
    shape: Shape

    @property
    def rule(self) -> str:
        return self.base.rule

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        return self.move(self.base.dense(units))

    def norm(self, units: rounding.Units) -> Norm:
        return self.base.norm(units)

    def operands(self, units: rounding.Units) -> Gradient:
        return dataclasses.replace(self, base=self.base.operands(units))

    def settled(self) -> Gradient:
        return moved(self.base.settled(), self.move)

    def summed(self) -> Gradient:
        return dataclasses.replace(self, base=self.base.summed())

    def stacked(self) -> Gradient:
        base = self.base.stacked()
        return moved(base, self.move.behind(base.shape[0]))

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return dataclasses.replace(self, base=self.base.map_scale(fun))

    def unscaled(self) -> list[jax.Array]:
        return self.base.unscaled()

    def contracted(self, x: jax.Array, axes: Shape) -> jax.Array | None:
        ones = jnp.ones([1 if i in axes else n for i, n in enumerate(self.shape)])
        kept = self._moved_back(ones).shape
        within = tuple(i for i, n in enumerate(kept) if n == 1)
        left = math.prod(self.shape[i] for i in range(len(self.shape)) if i not in axes)
        if math.prod(kept) != left:
            return None
        total = self.base.contracted(self._moved_back(x), within)
        if total is None:
            return None
        total = self.move.of_array(total.reshape(kept), self.base.shape)
        return total.reshape([n for i, n in enumerate(self.shape) if i not in axes])

    def _moved_back(self, x: jax.Array) -> jax.Array:
        """An array of the axes of this gradient, with those of the base."""
        name, argument = self.move.name, self.move.argument
        if name == "reshape":
            return reshaped_array(x, self.shape, self.base.shape)
        if name == "transpose":
            return jnp.transpose(x, [argument.index(i) for i in range(x.ndim)])
        return jax.lax.rev(x, argument)

    def squared_norm_of_terms(self) -> jax.Array:
        return self.base.squared_norm_of_terms()

    def reshape(self, shape: Shape) -> Gradient | None:
        is_reshape = self.move.name == "reshape"
        return reshaped(self.base, shape) if is_reshape else None

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient | None:
        base = self.base.entrywise(fun, self._moved_back(x))
        return None if base is None else moved(base, self.move)

    def merge(self, other: Gradient) -> Gradient | None:
        if not isinstance(other, View) or self.move != other.move:
            return None
        if self.base.shape != other.base.shape:
            return None
        return moved(forms.add(self.base, other.base), self.move)


def reshaped_array(x: jax.Array, before: Shape, after: Shape) -> jax.Array:
    """An array of a shape, or of size one along some axes, in another shape.

    Where the axes of a group become others, those of size one stay so together.
    """
    ends = [
        {math.prod(shape[: i + 1]) for i in range(len(shape))}
        for shape in (before, after)
    ]
    ends = sorted({1, *set.intersection(*ends)})
    group = lambda shape, i: bisect.bisect_right(ends, math.prod(shape[:i]))
    varying = {group(before, i) for i, n in enumerate(x.shape) if n > 1}
    places = lambda shape: [
        n if group(shape, i) in varying else 1 for i, n in enumerate(shape)
    ]
    return jnp.broadcast_to(x, places(before)).reshape(places(after))


def moved(grad: Gradient, move: Move) -> Gradient:
    """The gradient with its entries moved: a view, unless its form can move them."""
    own = getattr(grad, move.name)(move.argument)
    if own is not None:
        return own
    shape = jax.eval_shape(move, jax.ShapeDtypeStruct(grad.shape, jnp.float32)).shape
    return View(grad, move, shape)


def reshaped(grad: Gradient, shape: Shape) -> Gradient:
    """The gradient in another shape."""
    same = tuple(shape) == grad.shape
    return grad if same else moved(grad, Move("reshape", tuple(shape)))


def transposed(grad: Gradient, permutation: Shape) -> Gradient:
    """The gradient with its axes permuted."""
    return moved(grad, Move("transpose", tuple(permutation)))


def reversed_along(grad: Gradient, axes: Shape) -> Gradient:
    """The gradient with the order of its entries reversed along some axes."""
    return moved(grad, Move("rev", tuple(axes)))
