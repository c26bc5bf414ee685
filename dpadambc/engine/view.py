"""Gradients that reshape, transpose or reverse a gradient of another form.

These maps only move entries. They commute with sums over examples and keep norms, so no
form has to implement them: the view replays them on the sum. A parameter that the loss
reshapes, or slices from one long vector, keeps the form of the kernel that it becomes.
"""

import dataclasses
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

    def behind(self, size: int) -> "Move":
        """Returns the map behind a leading axis of this size."""
        if self.name == "reshape":
            return Move(self.name, (size, *self.argument))
        behind = tuple(1 + i for i in self.argument)
        return Move(self.name, behind if self.name == "rev" else (0, *behind))

    def back(self, shape: Shape) -> "Move":
        """Returns the inverse map, whose output has this shape."""
        if self.name == "reshape":
            return Move(self.name, shape)
        inverse = tuple(self.argument.index(i) for i in range(len(shape)))
        return self if self.name == "rev" else Move(self.name, inverse)


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

    def cheaper_form(self) -> Gradient:
        return moved(self.base.cheaper_form(), self.move)

    def summed(self) -> Gradient:
        return dataclasses.replace(self, base=self.base.summed())

    def stacked(self) -> Gradient:
        base = self.base.stacked()
        return moved(base, self.move.behind(base.shape[0]))

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return dataclasses.replace(self, base=self.base.map_scale(fun))

    def unscaled(self) -> list[jax.Array]:
        return self.base.unscaled()

    def reshape(self, shape: Shape) -> Gradient | None:
        is_reshape = self.move.name == "reshape"
        return reshaped(self.base, shape) if is_reshape else None

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient | None:
        back = self.move.back(self.base.shape)
        base = self.base.entrywise(fun, back(jnp.broadcast_to(x, self.shape)))
        return None if base is None else dataclasses.replace(self, base=base)

    def merge(self, other: Gradient) -> Gradient | None:
        if not isinstance(other, View) or self.move != other.move:
            return None
        if self.base.shape != other.base.shape:
            return None
        return moved(forms.add(self.base, other.base), self.move)


def moved(grad: Gradient, move: Move) -> Gradient:
    """Moves the entries of a gradient: in its form, or by a view."""
    own = getattr(grad, move.name)(move.argument)
    if own is not None:
        return own
    shape = jax.eval_shape(move, jax.ShapeDtypeStruct(grad.shape, jnp.float32)).shape
    return View(grad, move, shape)


def reshaped(grad: Gradient, shape: Shape) -> Gradient:
    """Reshapes the gradient."""
    same = tuple(shape) == grad.shape
    return grad if same else moved(grad, Move("reshape", tuple(shape)))


def transposed(grad: Gradient, permutation: Shape) -> Gradient:
    """Permutes the axes of the gradient."""
    return moved(grad, Move("transpose", tuple(permutation)))


def reversed_along(grad: Gradient, axes: Shape) -> Gradient:
    """Reverses the order of the entries along some axes."""
    return moved(grad, Move("rev", tuple(axes)))
