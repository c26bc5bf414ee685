r"""Gradients plus arrays that all examples share: of penalties and of scaled kernels.

The gradient of a kernel in a penalty is one array for all examples. Where a kernel is
divided by norms of its columns, reverse mode adds the kernel itself, each column times
a number of the example. Such a gradient is :math:`N + D` with a factored N and
:math:`D = \sum_k W_k \odot c_k`, where :math:`W_k` depends on no example and
:math:`c_k` repeats along some axes. The norm,

.. math:: \lVert N + D \rVert^2
    = \lVert N \rVert^2 + 2 \langle N, D \rangle + \lVert D \rVert^2

needs sums of :math:`N \odot W_k` over the axes of :math:`c_k`, which the factors of N
have without N: for a product a forward pass of :math:`W_k`. The sum over examples is
:math:`W_k` times the sum of :math:`c_k`.

Under `jax.vmap` an array that all examples share has no axis of examples, so the inner
products are computed there, by `finished`. Then it is repeated for each example, as all
arrays of a gradient are, so that rows can be selected. The compiler makes no array of
that: one row is read. Rows that belong to programs with other shared arrays, and were
put beside each other, give NaN, as told from a checksum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from dpadambc.engine import forms, precision, rounding, view
from dpadambc.engine.facts import Fact
from dpadambc.engine.hadamard import Hadamard
from dpadambc.engine.interface import Gradient, Norm, Shape, pytree

Axes = tuple[int, ...]


class Term(NamedTuple):
    """An array times another, each of size one along some axes; None is one."""

    w: jax.Array | None  # shared by all examples
    c: jax.Array | None  # of the example

    @property
    def arrays(self) -> list[jax.Array]:
        return [x for x in self if x is not None]

    def value(self) -> jax.Array:
        arrays = [x.astype(precision.at_least_float32(x.dtype)) for x in self.arrays]
        return functools.reduce(jnp.multiply, arrays)

    def map(self, fun: Callable[[jax.Array], jax.Array]) -> "Term":
        return Term(*(None if x is None else fun(x) for x in self))

    def times(self, other: "Term") -> "Term":
        return Term(*map(_product, self, other))


def _product(x: jax.Array | None, y: jax.Array | None) -> jax.Array | None:
    return y if x is None else x if y is None else x * y


class Products(NamedTuple):
    """What the clip needs of the shared arrays, for each example."""

    square: jax.Array  # 2 <N, D> + |D|^2, with an allowance for rounding
    length: jax.Array  # |D|
    checksum: jax.Array  # of the shared arrays; zero is padding


@pytree(data_fields=("base", "terms", "products"))
class Shared(Gradient):
    """A gradient in another form, and terms."""

    base: Gradient
    terms: tuple[Term, ...]
    products: Products | None  # once `finished`
    shape: Shape

    @property
    def rule(self) -> str:
        return "shared" if self.is_alone else f"{self.base.rule} + shared"

    @property
    def is_alone(self) -> bool:
        return isinstance(self.base, forms.Full)

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        values = [jnp.broadcast_to(x.value(), self.shape) for x in self.terms]
        values = values if self.is_alone else [self.base.dense(units), *values]
        return functools.reduce(jnp.add, values)

    def squared_norm(self) -> jax.Array:
        assert self.products is not None
        return jnp.maximum(self.base.squared_norm() + self.products.square, 0)

    def norm(self, units: rounding.Units) -> Norm:
        assert self.products is not None
        norm = self.base.norm(units)
        # Inner products are those of factors that were not rounded yet.
        moved = self.base.norm(units.of_operands).in_sum
        slack = norm.in_norm * (2 * jnp.sqrt(norm.squared) + 3 * norm.in_norm)
        slack += 2 * moved * self.products.length
        square = jnp.maximum(norm.squared + self.products.square + slack, 0)
        return Norm(square, 0.0, norm.in_sum)

    def operands(self, units: rounding.Units) -> Gradient:
        return dataclasses.replace(self, base=self.base.operands(units))

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        one = jnp.ones((1,) * len(self.shape), jnp.float32)
        scaled = lambda x: Term(x.w, fun(one if x.c is None else x.c))
        base = self.base if self.is_alone else self.base.map_scale(fun)
        return self._with(base, map(scaled, self.terms))

    def unscaled(self) -> list[jax.Array]:
        return self.base.unscaled()

    def summed(self) -> Gradient:
        dense = jax.vmap(lambda grad: grad.dense())(self)
        return forms.Dense(dense.sum(0), self.shape, "materialized: a shared array")

    def stacked(self) -> Gradient:
        base = self.base.stacked()
        # One number for each step, if there is nothing else.
        return Shared(base, self.terms, None, base.shape)

    def settled(self) -> Gradient:
        base, size = self.base.settled(), math.prod(self.shape)
        small = all(x.c is None or 2 * x.c.size <= size for x in self.terms)
        if isinstance(base, forms.Dense) or not small:
            origin = base.rule if isinstance(base, forms.Dense) else "materialized"
            return forms.Dense(self.dense(), self.shape, origin)
        return dataclasses.replace(self, base=base)

    def plus(self, other: Gradient) -> Gradient:
        if isinstance(other, Shared):
            base = forms.add(self.base, other.base)
            terms = functools.reduce(_insert, other.terms, self.terms)
        else:
            base, terms = forms.add(self.base, other), self.terms
        total = self._with(base, terms)
        if isinstance(base, forms.Dense):
            return forms.Dense(total.dense(), self.shape, base.origin)
        return total

    def times_term(self, term: Term) -> "Shared | None":
        """Times the value of a term, entry by entry."""
        base = (
            self.base
            if self.is_alone
            else self.base.entrywise(jnp.multiply, term.value())
        )
        if base is None:
            return None
        return self._with(base, [x.times(term) for x in self.terms])

    def times(
        self, x: Any, contract: tuple[Axes, Axes], batch: tuple[Axes, Axes]
    ) -> Gradient | None:
        is_shared = isinstance(x, Shared)
        x = x.dense() if is_shared else x
        total: Gradient | None = self.base
        if not self.is_alone:
            total = self.base.times(x, contract, batch)
            total = None if total is None else total.settled()
        if total is None:
            return None
        for term in self.terms:
            new, shape = _contracted_with(term, self.shape, x, contract, batch)
            if is_shared and new.w is not None:
                total = forms.add(total, of_term(new, shape))
            else:  # no larger than a factor of the kernel
                more = jnp.broadcast_to(new.value(), shape)
                more += 0 if total is self.base else total.dense()
                total = forms.Dense(more, shape, "direct")
        return total

    def transpose(self, permutation: Shape) -> Gradient:
        moved = lambda x: jnp.transpose(x, permutation)
        base = view.transposed(self.base, permutation)
        return self._with(base, [x.map(moved) for x in self.terms])

    def reshape(self, shape: Shape) -> Gradient:
        moved = lambda x: view.reshaped_array(x, self.shape, shape)
        base = view.reshaped(self.base, shape)
        return self._with(base, [x.map(moved) for x in self.terms])

    def rev(self, axes: Shape) -> Gradient:
        moved = lambda x: jax.lax.rev(x, axes)
        base = view.reversed_along(self.base, axes)
        return self._with(base, [x.map(moved) for x in self.terms])

    def slice(self, starts: Shape, limits: Shape) -> Gradient | None:
        base = self.base.slice(starts, limits)
        if base is None:
            return None
        cut = lambda x: x[forms.box_of(x, starts, limits)]
        return self._with(base, [x.map(cut) for x in self.terms])

    def pad(self, low: Shape, high: Shape) -> Gradient:
        widths = list(zip(low, high, strict=True))
        base = forms.padded(self.base, low, high)

        def padded(x):
            sides = zip(self.shape, x.shape, widths, strict=True)
            sizes = [n if any(w) else m for n, m, w in sides]
            return jnp.pad(jnp.broadcast_to(x, sizes), widths)

        def outside(x):  # one number for all places keeps its place
            own = [w if n > 1 else (0, 0) for n, w in zip(x.shape, widths, strict=True)]
            return jnp.pad(x, own)

        inside = lambda x: Term(
            None if x.w is None else padded(x.w),
            x.c if x.c is None else (padded if x.w is None else outside)(x.c),
        )
        return self._with(base, map(inside, self.terms))

    def reduce_sum(self, axes: Shape) -> Gradient | None:
        left = tuple(n for i, n in enumerate(self.shape) if i not in axes)
        base = forms.summed_over(self.base, axes)
        if base is None:
            return None
        terms = [_summed_over(x, self.shape, axes) for x in self.terms]
        return dataclasses.replace(self._with(base, terms), shape=left)

    def _with(self, base: Gradient, terms: Any) -> "Shared":
        return Shared(base, tuple(terms), None, base.shape)


def _insert(terms: tuple[Term, ...], new: Term) -> tuple[Term, ...]:
    """The terms with one more, which is added to another of the same w or c."""
    for i, term in enumerate(terms):
        total = _joined(term, new)
        if total is not None:
            return (*terms[:i], total, *terms[i + 1 :])
    return (*terms, new)


def _joined(x: Term, y: Term) -> Term | None:
    """The sum of two terms of the same w or c as one, or None."""
    if x.c is None and y.c is None and x.w is not None and y.w is not None:
        return Term(x.w + y.w, None)
    if x.c is None or y.c is None or x.w is not y.w or x.c.shape != y.c.shape:
        return None
    return Term(x.w, x.c + y.c)


def _names(x: jax.Array) -> Axes:
    return tuple(i for i, n in enumerate(x.shape) if n > 1)


def _squeezed(x: jax.Array) -> jax.Array:
    return x.reshape([n for n in x.shape if n > 1])


def _sum_of_product(term: Term, shape: Shape, axes: Axes, keep: Axes) -> jax.Array:
    """The sum over axes of a term as an array with the axes to keep."""
    wide = precision.at_least_float32
    repeated = math.prod(
        shape[i] for i in axes if all(x.shape[i] == 1 for x in term.arrays)
    )
    arrays = [(_squeezed(x).astype(wide(x.dtype)), _names(x)) for x in term.arrays]
    out = [i for i in keep if any(i in names for _, names in arrays)]
    if len(arrays) == 1:
        ((x, names),) = arrays
        total = x.sum([names.index(i) for i in names if i not in out])
    else:
        (x, x_names), (y, y_names) = arrays
        total = rounding.EXACT.einsum(x, x_names, y, y_names, out)
    sizes = [shape[i] if i in out else 1 for i in keep]
    return total.reshape(sizes) * repeated


def _summed_over(term: Term, shape: Shape, axes: Axes) -> Term:
    keep = tuple(i for i in range(len(shape)) if i not in axes)
    total = _sum_of_product(term, shape, axes, keep)
    return Term(total, None) if term.c is None else Term(None, total)


def _contracted_with(
    term: Term,
    shape: Shape,
    x: jax.Array,
    contract: tuple[Axes, Axes],
    batch: tuple[Axes, Axes],
) -> tuple[Term, Shape]:
    """`lax.dot_general` of a term and an array, and the shape.

    Of c, the axes that are contracted multiply the array first, and others the result.
    """
    mine, theirs = (*contract[0], *batch[0]), (*contract[1], *batch[1])
    rank = len(shape)
    named = dict(zip(theirs, mine, strict=True))
    x_axes = [named.get(j, rank + j) for j in range(x.ndim)]
    left = (*batch[0], *(i for i in range(rank) if i not in mine))
    new = [i for i in x_axes if i >= rank]
    sizes = dict(zip((*x_axes, *range(rank)), (*x.shape, *shape), strict=True))
    w = jnp.ones((1,) * rank) if term.w is None else term.w
    c = jnp.ones((1,) * rank) if term.c is None else term.c
    inside = {*_names(c)} & {*contract[0]}
    if inside == {*_names(c)}:
        order = [i for i in x_axes if i < rank]
        rest = [i for i in range(rank) if i not in order]
        beside = [c.shape[i] if i < rank else 1 for i in x_axes]
        x = x * jnp.transpose(c, (*order, *rest)).reshape(beside)
    elif inside:
        w = w * c
    total = rounding.EXACT.einsum(
        jnp.broadcast_to(w, shape), range(rank), x, x_axes, (*left, *new)
    )
    shape = tuple(sizes[i] for i in (*left, *new))
    if term.c is None:
        return Term(total, None), shape
    if inside:
        return Term(None, total), shape
    beside = [c.shape[i] for i in left] + [1] * len(new)
    rest = [i for i in range(rank) if i not in left]
    return Term(total, jnp.transpose(c, (*left, *rest)).reshape(beside)), shape


def is_array(grad: Any) -> TypeGuard[Shared]:
    """Whether it is one term, of an array that the program computes."""
    return isinstance(grad, Shared) and grad.is_alone and len(grad.terms) == 1


def of_term(term: Term, shape: Shape) -> Shared:
    """A gradient of one term."""
    zero = forms.Full(jnp.zeros((), jnp.float32), tuple(shape), True)
    return Shared(zero, (term,), None, tuple(shape))


def known(value: Any, shape: Shape, fact: Fact) -> Any:
    """An array as a gradient, if all examples share it or it repeats numbers.

    Args:
      value: with axes of the gradient, or of size one.
      shape: of the gradient.
      fact: of the value.
    """
    if isinstance(value, forms.Full) and not value.is_zero:
        fill = jnp.reshape(value.fill, (1,) * len(shape))
        term = Term(fill, None) if fact.shared else Term(None, fill)
        return of_term(term, shape)
    array = value.value if isinstance(value, forms.Dense) else value
    if isinstance(array, Gradient) or not jnp.ndim(array):
        return value
    for i in fact.constant:
        if array.shape[i] > 1:
            array = jax.lax.slice_in_dim(array, 0, 1, axis=i)
    if fact.shared:
        return of_term(Term(array, None), shape)
    return of_term(Term(None, array), shape) if array.size < math.prod(shape) else value


def as_gradient(value: Any, fact: Fact, origin: str = "direct") -> Gradient:
    """The gradient that a value is, or an array is."""
    if isinstance(value, Gradient) or not fact.shared or not jnp.ndim(value):
        return forms.as_gradient(value, origin)
    return of_term(Term(jnp.asarray(value), None), jnp.shape(value))


def product(x: Any, y: Any) -> Gradient | None:
    """Of a gradient and the only term of another, entry by entry."""
    if not is_array(y):
        x, y = y, x
    if not is_array(y) or not isinstance(x, Gradient) or isinstance(x, forms.Dense):
        return None
    (term,) = y.terms
    by_term = isinstance(x, Shared)
    grad = x.times_term(term) if by_term else x.entrywise(jnp.multiply, term.value())
    return Hadamard(x, term.value(), x.shape) if grad is None else grad


def reciprocal(grad: Any) -> Any:
    """One over the only term, entry by entry."""
    if not is_array(grad):
        return grad
    return of_term(grad.terms[0].map(lambda x: 1 / x), grad.shape)


def finished(grad: Gradient) -> Gradient:
    """With the inner products, where all examples share the arrays still."""
    if not isinstance(grad, Shared):
        return grad
    base, shared = rounding.pinned((grad.base, grad.terms))
    wide = lambda x: x.astype(precision.at_least_float32(x.dtype))
    terms, rank = [term.map(wide) for term in shared], len(grad.shape)
    inner = jnp.zeros((), jnp.float32)
    for term in terms if not grad.is_alone else ():
        c = jnp.ones((1,) * rank) if term.c is None else term.c
        axes = tuple(i for i in range(rank) if c.shape[i] == 1)
        w = jnp.ones((1,) * rank) if term.w is None else term.w
        sums = base.contracted(w, axes)
        if sums is None:
            return forms.Dense(
                grad.dense(), grad.shape, "materialized: a sum of different forms"
            )
        inner += jnp.sum(sums * _squeezed(c).reshape(sums.shape))
    every = tuple(range(rank))
    square = functools.reduce(
        jnp.add,
        (
            _sum_of_product(x.times(y), grad.shape, every, ())
            for x in terms
            for y in terms
        ),
    )
    squares = base.squared_norm_of_terms(), square
    allowance = precision.cancellation_allowance(squares, math.prod(grad.shape))
    products = Products(
        square + 2 * inner + allowance, jnp.sqrt(square), _checksum(shared)
    )
    return Shared(base, shared, products, grad.shape)


def _checksum(terms: tuple[Term, ...]) -> jax.Array:
    """A number of all bits of the shared arrays; not zero."""
    total = jnp.uint32(0)
    for i, term in enumerate(terms):
        if term.w is not None:
            x = term.w.astype(jnp.float32).ravel()
            bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
            places = jnp.arange(x.size, dtype=jnp.uint32) * jnp.uint32(2654435761) + i
            total += jnp.sum((bits ^ (bits >> 15)) * (places | 1), dtype=jnp.uint32)
    return total | 1


def apart(
    gradients: Sequence[Gradient],
) -> tuple[list[Gradient], list[Shared | None]]:
    """The gradients without terms, and those that have some."""
    bases = [x.base if isinstance(x, Shared) else x for x in gradients]
    return bases, [x if isinstance(x, Shared) else None for x in gradients]


def weighted_terms(grad: Shared, weights: jax.Array) -> jax.Array:
    """The weighted sum of the terms of all examples.

    Args:
      grad: whose arrays have the examples along axis 0.
      weights: shape (batch,).
    """
    assert grad.products is not None
    marks = grad.products.checksum
    total = jnp.zeros(grad.shape, weights.dtype)
    if not len(marks):
        return total
    rows = lambda x, ndim: x.reshape((-1,) + (1,) * (ndim - 1))
    is_kept = (weights != 0) & (marks != 0)
    first = jnp.argmax(is_kept)[None]
    # A row as a gather, for which no device sends the rows of all examples to others.
    row = lambda x: jnp.take(x, first, axis=0, mode="clip")[0]
    for w, c in grad.terms:
        c = (
            jnp.ones((len(marks), *[1] * len(grad.shape)), weights.dtype)
            if c is None
            else c
        )
        scaled = jnp.where(rows(is_kept, c.ndim), c * rows(weights, c.ndim), 0).sum(0)
        total += scaled if w is None else row(w) * scaled
    agree = jnp.all(~is_kept | (marks == row(marks)))
    total = jnp.where(agree, total, jnp.nan)
    return jnp.where(is_kept.any(), total, 0)
