"""Gradients times an array, entry by entry, of which sums over axes are asked for.

Reverse mode has the gradient of a column's scale as a sum over rows, of the gradient of
the scaled kernel times the kernel. The factors have it without that gradient.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from dpadambc.engine import forms, rounding
from dpadambc.engine.interface import Entrywise, Gradient, Norm, Shape, pytree


@pytree(data_fields=("base", "x"))
class Hadamard(Gradient):
    """A gradient times an array, which is formed unless it is summed over axes."""

    base: Gradient
    x: jax.Array  # with the axes of the gradient, or of size one
    shape: Shape

    rule: ClassVar[str] = "mul"

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        return self.base.dense(units) * self.x

    def settled(self) -> Gradient:
        return forms.Dense(self.dense(), self.shape, self.rule)

    def norm(self, units: rounding.Units) -> Norm:
        return self.settled().norm(units)

    def summed(self) -> Gradient:
        return forms.Dense(jax.vmap(Hadamard.dense)(self), (), self.rule).summed()

    def stacked(self) -> Gradient:
        return forms.Dense(jax.vmap(Hadamard.dense)(self), (), self.rule).stacked()

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return dataclasses.replace(self, base=self.base.map_scale(fun))

    def unscaled(self) -> list[jax.Array]:
        return [*self.base.unscaled(), self.x]

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient:
        return dataclasses.replace(self, x=fun(self.x, x))

    def reduce_sum(self, axes: Shape) -> Gradient | None:
        total = self.base.contracted(self.x, axes)
        return None if total is None else forms.as_gradient(total, "reduce_sum")
