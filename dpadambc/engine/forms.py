"""The materialized forms of a per-example gradient, blocks, and sums of forms."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.engine import precision, rounding
from dpadambc.engine.interface import Entrywise, Gradient, Norm, Shape, pytree, squared


@pytree(data_fields=("value",))
class Dense(Gradient):
    """The gradient as one array."""

    value: jax.Array
    shape: Shape
    origin: str  # the primitive that produced it, or the reason

    @property
    def rule(self) -> str:
        return self.origin

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        del units
        return self.value.astype(precision.at_least_float32(self.value.dtype))

    def norm(self, units: rounding.Units) -> Norm:
        del units
        return Norm(squared(self.value).sum(), 0.0, 0.0)

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return self._with(fun(self.dense()))

    def unscaled(self) -> list[jax.Array]:
        return [self.value]

    def summed(self) -> Gradient:
        return self._with(self.dense().sum(0))

    def stacked(self) -> Gradient:
        return Dense(self.value, self.value.shape, self.origin)

    def _with(self, value: jax.Array) -> Gradient:
        return Dense(value, value.shape, self.origin)

    def transpose(self, permutation: Shape) -> Gradient:
        return self._with(jnp.transpose(self.value, permutation))

    def reshape(self, shape: Shape) -> Gradient:
        return self._with(jnp.reshape(self.value, shape))

    def rev(self, axes: Shape) -> Gradient:
        return self._with(jax.lax.rev(self.value, axes))

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient:
        return self._with(fun(self.value, jnp.broadcast_to(x, self.shape)))

    def slice(self, starts: Shape, limits: Shape) -> Gradient:
        return self._with(jax.lax.slice(self.value, starts, limits))

    def reduce_sum(self, axes: Shape) -> Gradient:
        return self._with(self.value.sum(axes))

    def merge(self, other: Gradient) -> Gradient | None:
        if isinstance(other, Dense):
            return Dense(self.value + other.value, self.shape, self.origin)
        return None


@pytree(data_fields=("fill",))
class Full(Gradient):
    """A gradient with one number everywhere; zero where a parameter has no gradient."""

    fill: Any  # a scalar
    shape: Shape
    is_zero: bool

    rule: ClassVar[str] = "no gradient"

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        del units
        dtype = precision.at_least_float32(jnp.result_type(self.fill))
        return jnp.broadcast_to(jnp.asarray(self.fill, dtype), self.shape)

    def cheaper_form(self) -> Gradient:
        return self if self.is_zero else Dense(self.dense(), self.shape, "constant")

    def norm(self, units: rounding.Units) -> Norm:
        del units
        one = dataclasses.replace(self, shape=()).dense()
        # n entries of size c have the squared norm n c^2.
        return Norm(one * one * math.prod(self.shape), 0.0, 0.0)

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return dataclasses.replace(self, fill=fun(self.fill))

    def unscaled(self) -> list[jax.Array]:
        return []

    def summed(self) -> Gradient:
        return dataclasses.replace(self, fill=jnp.sum(self.fill, 0))

    def stacked(self) -> Gradient | None:
        if not self.is_zero:
            return Dense(jax.vmap(Full.dense)(self), (), "constant").stacked()
        shape = (*jnp.shape(self.fill)[:1], *self.shape)
        return Full(jnp.zeros((), jnp.result_type(self.fill)), shape, True)

    def transpose(self, permutation: Shape) -> Gradient:
        return self.reshape(tuple(self.shape[i] for i in permutation))

    def reshape(self, shape: Shape) -> Gradient:
        return dataclasses.replace(self, shape=tuple(shape))

    def rev(self, axes: Shape) -> Gradient:
        del axes
        return self

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient | None:
        del fun, x
        return self if self.is_zero else None

    def slice(self, starts: Shape, limits: Shape) -> Gradient:
        return self.reshape(tuple(b - a for a, b in zip(starts, limits, strict=True)))

    def pad(self, low: Shape, high: Shape) -> Gradient | None:
        if not self.is_zero:
            return None
        sizes = zip(low, self.shape, high, strict=True)
        return self.reshape(tuple(sum(size) for size in sizes))

    def reduce_sum(self, axes: Shape) -> Gradient | None:
        left = tuple(n for i, n in enumerate(self.shape) if i not in axes)
        return self.reshape(left) if self.is_zero else None


@pytree(data_fields=("block",))
class Block(Gradient):
    """The gradient of a slice of the parameter: zero outside a box."""

    block: Gradient
    starts: Shape
    shape: Shape

    @property
    def rule(self) -> str:
        return self.block.rule

    @property
    def limits(self) -> Shape:
        return tuple(a + n for a, n in zip(self.starts, self.block.shape, strict=True))

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        high = (n - b for n, b in zip(self.shape, self.limits, strict=True))
        widths = list(zip(self.starts, high, strict=True))
        return jnp.pad(self.block.dense(units), widths)

    def norm(self, units: rounding.Units) -> Norm:
        return self.block.norm(units)

    def operands(self, units: rounding.Units) -> Gradient:
        return dataclasses.replace(self, block=self.block.operands(units))

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return dataclasses.replace(self, block=self.block.map_scale(fun))

    def unscaled(self) -> list[jax.Array]:
        return self.block.unscaled()

    def summed(self) -> Gradient:
        return dataclasses.replace(self, block=self.block.summed())

    def stacked(self) -> Gradient:
        grad = self.block.stacked()
        return Block(grad, (0, *self.starts), (grad.shape[0], *self.shape))

    def cheaper_form(self) -> Gradient:
        return dataclasses.replace(self, block=self.block.cheaper_form())

    def transpose(self, permutation: Shape) -> Gradient | None:
        grad = self.block.transpose(permutation)
        if grad is None:
            return None
        order = lambda values: tuple(values[i] for i in permutation)
        return Block(grad, order(self.starts), order(self.shape))

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient | None:
        of_axes = zip(x.shape, *self._box, strict=True)
        box = [(a, b) if n != 1 else (0, 1) for n, a, b in of_axes]
        block = self.block.entrywise(fun, jax.lax.slice(x, *zip(*box, strict=True)))
        return None if block is None else dataclasses.replace(self, block=block)

    def pad(self, low: Shape, high: Shape) -> Gradient:
        starts = tuple(a + b for a, b in zip(self.starts, low, strict=True))
        sizes = zip(low, self.shape, high, strict=True)
        return Block(self.block, starts, tuple(sum(size) for size in sizes))

    def merge(self, other: Gradient) -> Gradient | None:
        if isinstance(other, Block) and self._box == other._box:
            return dataclasses.replace(self, block=add(self.block, other.block))
        return None

    @property
    def _box(self) -> tuple[Shape, Shape]:
        return self.starts, self.limits

    def knows_product_with(self, other: Gradient) -> bool:
        if not isinstance(other, Block):
            return False
        sides = zip(*self._box, *other._box, strict=True)
        # Boxes that are disjoint along some axis have the inner product zero.
        return any(b <= c or d <= a for a, b, c, d in sides)

    def inner(self, other: Gradient) -> jax.Array:
        del other
        return jnp.zeros(())


@pytree(data_fields=("parts",))
class Sum(Gradient):
    """The gradient of a parameter that is used more than once, in different ways."""

    parts: tuple[Gradient, ...]
    shape: Shape

    @property
    def rule(self) -> str:
        return " + ".join(dict.fromkeys(grad.rule for grad in self.parts))

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        return functools.reduce(jnp.add, [grad.dense(units) for grad in self.parts])

    def norm(self, units: rounding.Units) -> Norm:
        parts = [grad.norm(units) for grad in self.parts]
        if isinstance(self.parts[0], Block):  # disjoint, so squared norms add
            return Norm.of_all(parts)
        # ||sum_i N_i||^2 = sum_i ||N_i||^2 + 2 sum_{i>j} <N_i, N_j>.
        total = functools.reduce(jnp.add, [norm.squared for norm in parts])
        for i, x in enumerate(self.parts):
            for y in self.parts[:i]:
                total += 2 * (x.inner(y) if x.knows_product_with(y) else y.inner(x))
        # With W the sum of the bounds on ||N_i|| and E = sum_i e_i, rounding hides at
        # most 2 E W + E^2; see `rounding`, "Several forms".
        in_norm = sum(norm.in_norm for norm in parts)
        lengths: Any = sum(jnp.sqrt(norm.squared) + norm.in_norm for norm in parts)
        allowance = precision.rounding_error(0, total.dtype) * lengths * lengths
        allowance += in_norm * (2 * lengths + in_norm)
        squared = jnp.maximum(total, 0) + allowance
        return Norm(squared, 0.0, sum(norm.in_sum for norm in parts))

    def operands(self, units: rounding.Units) -> Gradient:
        parts = tuple(grad.operands(units) for grad in self.parts)
        return dataclasses.replace(self, parts=parts)

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return Sum(tuple(grad.map_scale(fun) for grad in self.parts), self.shape)

    def unscaled(self) -> list[jax.Array]:
        return [x for grad in self.parts for x in grad.unscaled()]

    def summed(self) -> Gradient:
        return self._map(lambda grad: grad.summed())

    def stacked(self) -> Gradient:
        return self._map(lambda grad: grad.stacked())

    def cheaper_form(self) -> Gradient:
        """Returns a dense sum where a term is dense: it takes no more memory."""
        parts = [grad.cheaper_form() for grad in self.parts]
        if any(isinstance(grad, Dense) for grad in parts):
            return Dense(self.dense(), self.shape, "direct")
        return functools.reduce(add, parts)

    def _map(self, fun) -> Any:
        grads = tuple(fun(grad) for grad in self.parts)
        if any(grad is None for grad in grads):
            return None
        return functools.reduce(add, grads)

    def transpose(self, permutation: Shape) -> Gradient | None:
        return self._map(lambda grad: grad.transpose(permutation))

    def reshape(self, shape: Shape) -> Gradient | None:
        return self._map(lambda grad: grad.reshape(shape))

    def slice(self, starts: Shape, limits: Shape) -> Gradient | None:
        return self._map(lambda grad: grad.slice(starts, limits))

    def pad(self, low: Shape, high: Shape) -> Gradient | None:
        return self._map(lambda grad: padded(grad, low, high))

    def reduce_sum(self, axes: Shape) -> Gradient | None:
        return self._map(lambda grad: grad.reduce_sum(axes))

    def times(
        self, x: jax.Array, contract: tuple[Shape, Shape], batch: tuple[Shape, Shape]
    ) -> Gradient | None:
        return self._map(lambda grad: grad.times(x, contract, batch))

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient | None:
        return self._map(lambda grad: grad.entrywise(fun, x))


# Below this size, launching a kernel takes longer than computing the numbers.
_SMALL = 2**14


def split_dense(gradients: Sequence[Gradient]) -> tuple[list[Dense], list[Gradient]]:
    """Splits the gradients into materialized and factored ones."""
    dense = [grad for grad in gradients if isinstance(grad, Dense)]
    return dense, [grad for grad in gradients if not isinstance(grad, Dense)]


def side_by_side(
    gradients: Sequence[Dense],
) -> tuple[list[Dense], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Concatenates the small gradients; returns a function that splits their sum again.

    Args:
      gradients: the gradients; their values have the examples along axis 0.
    """
    sizes = [math.prod(grad.shape) for grad in gradients]
    # In low precision XLA would recompute them for each entry of the concatenation.
    small = [
        i
        for i, grad in enumerate(gradients)
        if sizes[i] <= _SMALL and jnp.finfo(grad.value.dtype).bits >= 32
    ]
    large = [i for i in range(len(gradients)) if i not in small]
    if not small:
        return list(gradients), list
    count = gradients[0].value.shape[0]
    rows = lambda i: gradients[i].dense().reshape(count, sizes[i])
    value = jnp.concatenate([rows(i) for i in small], axis=1)
    together = Dense(value, value.shape[1:], "array")

    def parts(sums):
        ends = np.cumsum([sizes[i] for i in small])[:-1]
        found = dict(zip(small, jnp.split(sums[-1], ends), strict=True))
        found |= dict(zip(large, sums, strict=False))
        return [found[i].reshape(grad.shape) for i, grad in enumerate(gradients)]

    return [*(gradients[i] for i in large), together], parts


def as_gradient(value: Any, origin: str) -> Gradient:
    """Returns the gradient that a value is, or wraps an array as a dense one."""
    if isinstance(value, Gradient):
        return value
    value = value if isinstance(value, jax.Array) else jnp.asarray(value)
    return Dense(value, value.shape, origin)


def is_no_gradient(grad: Any) -> bool:
    """Returns whether a gradient is zero, whatever the data."""
    return isinstance(grad, Full) and grad.is_zero


def _parts(grad: Gradient) -> tuple[Gradient, ...]:
    return grad.parts if isinstance(grad, Sum) else (grad,)


def _insert(grads: list[Gradient], new: Gradient) -> list[Gradient]:
    """Adds a gradient to a list: merges it with one of its form, or appends it."""
    for i, grad in enumerate(grads):
        merged = grad.merge(new)
        if merged is not None:
            return [*grads[:i], merged, *grads[i + 1 :]]
    return [*grads, new]


def add(x: Gradient, y: Gradient) -> Gradient:
    """Adds two gradients; the sum is dense where their inner product is not known."""
    if is_no_gradient(x) or is_no_gradient(y):
        return y if is_no_gradient(x) else x
    grads = functools.reduce(_insert, _parts(y), list(_parts(x)))
    if len(grads) == 1:
        return grads[0]
    known = lambda a, b: a.knows_product_with(b) or b.knows_product_with(a)
    if all(known(a, b) for i, a in enumerate(grads) for b in grads[:i]):
        return Sum(tuple(grads), x.shape)
    total = functools.reduce(jnp.add, [grad.dense() for grad in grads])
    return Dense(total, x.shape, "materialized: a sum of different forms")


def padded(grad: Gradient, low: Shape, high: Shape) -> Gradient:
    """Pads the gradient with zeros: a block, unless its form can pad itself."""
    own = grad.pad(low, high)
    if own is not None:
        return own
    shape = tuple(a + n + b for a, n, b in zip(low, grad.shape, high, strict=True))
    return Block(grad, low, shape)
