"""The plain forms of a per-example gradient, and sums of forms."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpadambc._core import precision
from dpadambc.gradients._factored.interface import Shape, Term, pytree, squared


@pytree(data_fields=("value",))
class Dense(Term):
    """The gradient itself."""

    value: jax.Array
    shape: Shape
    origin: str  # the primitive that produced it, or why it was formed

    @property
    def rule(self) -> str:
        return self.origin

    def dense(self) -> jax.Array:
        return self.value.astype(precision.at_least_float32(self.value.dtype))

    def squared_norm(self) -> jax.Array:
        return squared(self.value).sum()

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Term:
        return self._with(fun(self.dense()))

    def unscaled(self) -> list[jax.Array]:
        return [self.value]

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        return jnp.tensordot(
            weights, self.dense(), 1, precision=jax.lax.Precision.HIGHEST
        )

    def summed(self) -> Term:
        return self._with(self.dense().sum(0))

    def stacked(self) -> Term:
        return Dense(self.value, self.value.shape, self.origin)

    def _with(self, value: jax.Array) -> Term:
        return Dense(value, value.shape, self.origin)

    def transpose(self, permutation: Shape) -> Term:
        return self._with(jnp.transpose(self.value, permutation))

    def reshape(self, shape: Shape) -> Term:
        return self._with(jnp.reshape(self.value, shape))

    def slice(self, starts: Shape, limits: Shape) -> Term:
        return self._with(jax.lax.slice(self.value, starts, limits))

    def reduce_sum(self, axes: Shape) -> Term:
        return self._with(self.value.sum(axes))

    def merge(self, other: Term) -> Term | None:
        if isinstance(other, Dense):
            return Dense(self.value + other.value, self.shape, self.origin)
        return None


@pytree(data_fields=("fill",))
class Full(Term):
    """One number everywhere; zero where a parameter has no gradient."""

    fill: Any  # a scalar
    shape: Shape
    is_zero: bool

    rule: ClassVar[str] = "no gradient"

    def dense(self) -> jax.Array:
        dtype = precision.at_least_float32(jnp.result_type(self.fill))
        return jnp.broadcast_to(jnp.asarray(self.fill, dtype), self.shape)

    def settled(self) -> Term:
        return self if self.is_zero else Dense(self.dense(), self.shape, "constant")

    def squared_norm(self) -> jax.Array:
        return jnp.square(dataclasses.replace(self, shape=()).dense()) * math.prod(
            self.shape
        )

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Term:
        return dataclasses.replace(self, fill=fun(self.fill))

    def unscaled(self) -> list[jax.Array]:
        return []

    def summed(self) -> Term:
        return dataclasses.replace(self, fill=jnp.sum(self.fill, 0))

    def stacked(self) -> Term | None:
        if not self.is_zero:
            return Dense(jax.vmap(Full.dense)(self), (), "constant").stacked()
        shape = (*jnp.shape(self.fill)[:1], *self.shape)
        return Full(jnp.zeros((), jnp.result_type(self.fill)), shape, True)

    def transpose(self, permutation: Shape) -> Term:
        return self.reshape(tuple(self.shape[i] for i in permutation))

    def reshape(self, shape: Shape) -> Term:
        return dataclasses.replace(self, shape=tuple(shape))

    def slice(self, starts: Shape, limits: Shape) -> Term:
        return self.reshape(tuple(b - a for a, b in zip(starts, limits, strict=True)))

    def pad(self, low: Shape, high: Shape) -> Term | None:
        if not self.is_zero:
            return None
        sizes = zip(low, self.shape, high, strict=True)
        return self.reshape(tuple(sum(size) for size in sizes))

    def reduce_sum(self, axes: Shape) -> Term | None:
        left = tuple(n for i, n in enumerate(self.shape) if i not in axes)
        return self.reshape(left) if self.is_zero else None


@pytree(data_fields=("term",))
class Block(Term):
    """A gradient that is zero outside a box: that of a slice of the parameter."""

    term: Term
    starts: Shape
    shape: Shape

    @property
    def rule(self) -> str:
        return self.term.rule

    @property
    def limits(self) -> Shape:
        return tuple(a + n for a, n in zip(self.starts, self.term.shape, strict=True))

    def dense(self) -> jax.Array:
        high = (n - b for n, b in zip(self.shape, self.limits, strict=True))
        widths = list(zip(self.starts, high, strict=True))
        return jnp.pad(self.term.dense(), widths)

    def squared_norm(self) -> jax.Array:
        return self.term.squared_norm()

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Term:
        return dataclasses.replace(self, term=self.term.map_scale(fun))

    def unscaled(self) -> list[jax.Array]:
        return self.term.unscaled()

    def summed(self) -> Term:
        return dataclasses.replace(self, term=self.term.summed())

    def stacked(self) -> Term:
        term = self.term.stacked()
        return Block(term, (0, *self.starts), (term.shape[0], *self.shape))

    def settled(self) -> Term:
        return dataclasses.replace(self, term=self.term.settled())

    def transpose(self, permutation: Shape) -> Term | None:
        term = self.term.transpose(permutation)
        if term is None:
            return None
        order = lambda values: tuple(values[i] for i in permutation)
        return Block(term, order(self.starts), order(self.shape))

    def pad(self, low: Shape, high: Shape) -> Term:
        starts = tuple(a + b for a, b in zip(self.starts, low, strict=True))
        sizes = zip(low, self.shape, high, strict=True)
        return Block(self.term, starts, tuple(sum(size) for size in sizes))

    def merge(self, other: Term) -> Term | None:
        if isinstance(other, Block) and self._box == other._box:
            return dataclasses.replace(self, term=add(self.term, other.term))
        return None

    @property
    def _box(self) -> tuple[Shape, Shape]:
        return self.starts, self.limits

    def knows_product_with(self, other: Term) -> bool:
        if not isinstance(other, Block):
            return False
        sides = zip(*self._box, *other._box, strict=True)
        return any(b <= c or d <= a for a, b, c, d in sides)

    def inner(self, other: Term) -> jax.Array:
        del other
        return jnp.zeros(())


@pytree(data_fields=("terms",))
class Sum(Term):
    """The gradient of a parameter that is used more than once, in different ways."""

    terms: tuple[Term, ...]
    shape: Shape

    @property
    def rule(self) -> str:
        return " + ".join(dict.fromkeys(term.rule for term in self.terms))

    def dense(self) -> jax.Array:
        return functools.reduce(jnp.add, [term.dense() for term in self.terms])

    def squared_norm(self) -> jax.Array:
        total = functools.reduce(jnp.add, [x.squared_norm() for x in self.terms])
        for i, x in enumerate(self.terms):
            for y in self.terms[:i]:
                total += 2 * (x.inner(y) if x.knows_product_with(y) else y.inner(x))
        return total

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Term:
        return Sum(tuple(term.map_scale(fun) for term in self.terms), self.shape)

    def unscaled(self) -> list[jax.Array]:
        return [x for term in self.terms for x in term.unscaled()]

    def summed(self) -> Term:
        return self._map(lambda term: term.summed())

    def stacked(self) -> Term:
        return self._map(lambda term: term.stacked())

    def settled(self) -> Term:
        return self._map(lambda term: term.settled())

    def _map(self, fun) -> Any:
        terms = tuple(fun(term) for term in self.terms)
        if any(term is None for term in terms):
            return None
        return functools.reduce(add, terms)

    def transpose(self, permutation: Shape) -> Term | None:
        return self._map(lambda term: term.transpose(permutation))

    def reshape(self, shape: Shape) -> Term | None:
        return self._map(lambda term: term.reshape(shape))

    def slice(self, starts: Shape, limits: Shape) -> Term | None:
        return self._map(lambda term: term.slice(starts, limits))

    def pad(self, low: Shape, high: Shape) -> Term | None:
        return self._map(lambda term: padded(term, low, high))

    def reduce_sum(self, axes: Shape) -> Term | None:
        return self._map(lambda term: term.reduce_sum(axes))


def _is_zero(term: Term) -> bool:
    return isinstance(term, Full) and term.is_zero


def _parts(term: Term) -> tuple[Term, ...]:
    return term.terms if isinstance(term, Sum) else (term,)


def _insert(terms: list[Term], new: Term) -> list[Term]:
    """The terms with one more: merged with another of its form, or appended."""
    for i, term in enumerate(terms):
        merged = term.merge(new)
        if merged is not None:
            return [*terms[:i], merged, *terms[i + 1 :]]
    return [*terms, new]


def add(x: Term, y: Term) -> Term:
    """The sum of two gradients, dense where cross terms are not known otherwise."""
    if _is_zero(x) or _is_zero(y):
        return y if _is_zero(x) else x
    terms = functools.reduce(_insert, _parts(y), list(_parts(x)))
    if len(terms) == 1:
        return terms[0]
    known = lambda a, b: a.knows_product_with(b) or b.knows_product_with(a)
    if all(known(a, b) for i, a in enumerate(terms) for b in terms[:i]):
        return Sum(tuple(terms), x.shape)
    total = functools.reduce(jnp.add, [term.dense() for term in terms])
    return Dense(total, x.shape, "materialized: terms of different forms")


def padded(term: Term, low: Shape, high: Shape) -> Term:
    """The gradient with zeros around it: a block, unless its form can have them."""
    own = term.pad(low, high)
    if own is not None:
        return own
    shape = tuple(a + n + b for a, n, b in zip(low, term.shape, high, strict=True))
    return Block(term, low, shape)
