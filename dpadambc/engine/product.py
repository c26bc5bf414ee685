r"""Gradients that are a product of two arrays, of dense, attention or LoRA kernels.

Reverse mode computes the gradient of such a kernel as a contraction of activations a
with output gradients g,

.. math:: M_{l,i,j} = \sum_t a_{l,t,i} \, g_{l,t,j}

with the axes named by integers, as in an einsum: contracted t, shared l (heads,
experts, layers), and i and j of one factor alone. Its squared norm needs only the two
Gram matrices over t,

.. math:: \lVert M \rVert^2 =
    \sum_l \sum_{t,s} (a_{lt} \cdot a_{ls})(g_{lt} \cdot g_{ls})

(`Li et al. 2022 <https://arxiv.org/abs/2110.05679>`_). That costs less than M where M
is larger than its factors: T (I + J) < I J is the condition of both. Otherwise M itself
is materialized; it is then no larger than the arrays that the backward pass holds
anyway. So neither the form nor its norm ever takes more memory than the factors.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.engine import forms, precision, rounding
from dpadambc.engine.interface import Entrywise, Gradient, Norm, Shape, pytree, squared

Axes = tuple[int, ...]


def _split(old: Sequence[int], new: Sequence[int]) -> list[list[int]] | None:
    """Maps each size to the positions of the sizes above one that it is split into."""
    left, runs = [i for i, n in enumerate(new) if n != 1], []
    for size in old:
        run = []
        while left and math.prod(new[i] for i in run) < size:
            run.append(left.pop(0))
        if math.prod(new[i] for i in run) != size:
            return None
        runs.append(run)
    return runs


@pytree(data_fields=("a", "g"))
class Product(Gradient):
    """A contraction of two arrays, `einsum(a, a_axes, g, g_axes, out_axes)`.

    An output axis named None has size one, and is in neither factor.
    """

    a: jax.Array
    g: jax.Array
    a_axes: Axes
    g_axes: Axes
    out_axes: tuple[int | None, ...]
    shape: Shape

    @property
    def rule(self) -> str:
        return "gram" if self._contracted else "outer product"

    @property
    def _contracted(self) -> Axes:
        return tuple(
            i for i in self.a_axes if i in self.g_axes and i not in self.out_axes
        )

    @property
    def shared(self) -> Axes:
        """The names of the axes of the gradient that both factors have."""
        return tuple(i for i in self.out_axes if i in self.a_axes and i in self.g_axes)

    def _next_name(self) -> int:
        return 1 + max((-1, *self.a_axes, *self.g_axes))

    def matrix(self, x: jax.Array, axes: Axes) -> tuple[jax.Array, Axes]:
        """Reshapes a factor to axes (l, t, own); returns the names of its own."""
        shared, contracted = self.shared, self._contracted
        own = tuple(i for i in self.out_axes if i in axes and i not in shared)
        x = jnp.transpose(x, [axes.index(i) for i in (*shared, *contracted, *own)])
        sizes, rest = x.shape[: len(shared)], x.shape[x.ndim - len(own) :]
        rows = x.size // max(math.prod(sizes) * math.prod(rest), 1)
        return x.reshape(math.prod(sizes), rows, math.prod(rest)), own

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        sides = (self.a, self.a_axes), (self.g, self.g_axes)
        (a, a_own), (g, g_own) = (self.matrix(*side) for side in sides)
        names = [i for i in self.out_axes if i is not None]
        own = [i for i in names if i not in self.shared]
        # The product has the axes of its first factor first; swap to save a
        # transposition.
        if own and own[0] in g_own:
            a, a_own, g, g_own = g, g_own, a, a_own
        kernel = units.of(a, g).product(a, g)
        order = (*self.shared, *a_own, *g_own)
        sizes = dict(zip(self.out_axes, self.shape, strict=True))
        kernel = kernel.reshape([sizes[i] for i in order])
        kernel = jnp.transpose(kernel, [order.index(i) for i in names])
        return kernel.reshape(self.shape)

    @property
    def _matrices(self) -> list[jax.Array]:
        sides = (self.a, self.a_axes), (self.g, self.g_axes)
        return [self.matrix(*side)[0] for side in sides]

    def norm(self, units: rounding.Units) -> Norm:
        unit = units.of(self.a, self.g)
        if not self._contracted:  # an outer product: ||a g^T|| = ||a|| ||g||
            square = self._outer_squared_norm()
            return Norm(square, 0.0, unit.in_sum * jnp.sqrt(square))
        matrices = self._matrices
        lengths = [x.shape[2] for x in matrices]
        scaled = 0 if self._scales_a else 1
        return of_grams(unit, [unit.gram(x) for x in matrices], lengths, scaled)

    def operands(self, units: rounding.Units) -> Gradient:
        # A norm of one term needs no product, so only the dtype rounds its factors.
        grad = self if self._contracted else rounding.rounded_tree(self)
        unit = units.of(self.a, self.g)
        return dataclasses.replace(grad, a=unit.operand(grad.a), g=unit.operand(grad.g))

    def _outer_squared_norm(self) -> jax.Array:
        def squares(x, axes):
            own = tuple(at for at, i in enumerate(axes) if i not in self.shared)
            order = sorted(i for i in axes if i in self.shared)
            totals = squared(x).sum(own)
            # Squares below the least normal number underflow, so add a bound on them.
            totals += jnp.finfo(totals.dtype).tiny * x.size
            left = [i for i in axes if i in self.shared]
            return jnp.transpose(totals, [left.index(i) for i in order])

        # ||a_l g_l^T||^2 = ||a_l||^2 ||g_l||^2, summed over the shared axes l.
        return jnp.sum(squares(self.a, self.a_axes) * squares(self.g, self.g_axes))

    def cheaper_form(self) -> Gradient:
        # T (I + J) < I J: the factors are smaller than the gradient.
        if self.a.size + self.g.size < math.prod(self.shape):
            return self
        return forms.Dense(self.dense(), self.shape, "direct")

    def summed(self) -> Gradient:
        name = self._next_name()
        return dataclasses.replace(
            self, a_axes=(name, *self.a_axes), g_axes=(name, *self.g_axes)
        )

    def stacked(self) -> Gradient:
        name = self._next_name()
        return dataclasses.replace(
            self,
            a_axes=(name, *self.a_axes),
            g_axes=(name, *self.g_axes),
            out_axes=(name, *self.out_axes),
            shape=(self.a.shape[0], *self.shape),
        )

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        if self._scales_a:
            return dataclasses.replace(self, a=fun(self.a))
        return dataclasses.replace(self, g=fun(self.g))

    @property
    def _scales_a(self) -> bool:
        """Whether weights scale a, the smaller factor, instead of g."""
        return self.a.size < self.g.size

    def unscaled(self) -> list[jax.Array]:
        return [self.g if self._scales_a else self.a]

    def transpose(self, permutation: Shape) -> "Product":
        return dataclasses.replace(
            self,
            out_axes=tuple(self.out_axes[i] for i in permutation),
            shape=tuple(self.shape[i] for i in permutation),
        )

    def reshape(self, shape: Shape) -> Gradient | None:
        """Splits axes, and adds or removes axes of size one."""
        named = list(zip(self.out_axes, self.shape, strict=True))
        units = [i for i, (name, n) in enumerate(named) if n == 1 and name is not None]
        if units:
            return self.reduce_sum(tuple(units)).reshape(shape)
        sizes = {name: n for name, n in named if name is not None}
        runs = _split(list(sizes.values()), shape)
        if runs is None:
            return None
        first = self._next_name()
        pieces = {
            name: [(first + i, shape[i]) for i in run]
            for name, run in zip(sizes, runs, strict=True)
        }

        def split(x, axes):
            old = zip(axes, x.shape, strict=True)
            new = [each for i, n in old for each in pieces.get(i, [(i, n)])]
            return x.reshape([n for _, n in new]), tuple(i for i, _ in new)

        names = {i for run in pieces.values() for i, _ in run}
        out_axes = (
            first + i if first + i in names else None for i in range(len(shape))
        )
        return dataclasses.replace(
            self._on_factors(split), out_axes=tuple(out_axes), shape=tuple(shape)
        )

    def _on_factors(self, fun: Callable, *args) -> "Product":
        a, a_axes = fun(self.a, self.a_axes, *args)
        g, g_axes = fun(self.g, self.g_axes, *args)
        return dataclasses.replace(self, a=a, g=g, a_axes=a_axes, g_axes=g_axes)

    def slice(self, starts: Shape, limits: Shape) -> Gradient | None:
        boxes = zip(self.out_axes, starts, limits, strict=True)
        box = {name: (start, limit) for name, start, limit in boxes}

        def cut(x, axes):
            for at, name in enumerate(axes):
                if name in box:
                    x = jax.lax.slice_in_dim(x, *box[name], axis=at)
            return x, axes

        shape = tuple(b - a for a, b in zip(starts, limits, strict=True))
        return dataclasses.replace(self._on_factors(cut), shape=shape)

    def reduce_sum(self, axes: Shape) -> "Product":
        names = {self.out_axes[i] for i in axes} - {None}
        shared = {i for i in names if i in self.a_axes and i in self.g_axes}

        def total(x, x_axes):
            # A sum over an axis of one factor is taken there. A shared axis becomes
            # contracted, since it leaves the output.
            own = [i for i in x_axes if i in names - shared]
            x = x.sum([x_axes.index(i) for i in own])
            return x, tuple(i for i in x_axes if i not in own)

        keep = [i for i in range(len(self.shape)) if i not in axes]
        return dataclasses.replace(
            self._on_factors(total),
            out_axes=tuple(self.out_axes[i] for i in keep),
            shape=tuple(self.shape[i] for i in keep),
        )

    def times(
        self, x: jax.Array, contract: tuple[Axes, Axes], batch: tuple[Axes, Axes]
    ) -> "Product | None":
        """Multiplies one factor by an array, as `lax.dot_general` does.

        Returns None where neither factor alone has the contracted axes, or where the
        factor would get larger than the gradient is.
        """
        mine, theirs = (*contract[0], *batch[0]), (*contract[1], *batch[1])
        first, met = self._next_name(), [self.out_axes[i] for i in mine]
        known: dict[int, Any] = dict(zip(theirs, met, strict=True))
        x_axes = [known.get(j, first + j) for j in range(x.ndim)]
        summed = {self.out_axes[i] for i in contract[0]}
        sides = self, self._swapped()
        holders = [side for side in sides if summed <= {*side.g_axes}]
        if None in met or not holders or summed & {*self.shared}:
            return None
        grad = holders[0]
        kept = (i for i in grad.g_axes if i not in summed)
        g_axes = (*kept, *(i for i in x_axes if i not in grad.g_axes))
        sizes = dict(
            zip((*x_axes, *grad.g_axes), (*x.shape, *grad.g.shape), strict=True)
        )
        if math.prod(sizes[i] for i in g_axes) > math.prod(self.shape):
            return None
        left = [*batch[0], *(i for i in range(len(self.shape)) if i not in mine)]
        new = [i for i in x_axes if i not in met]
        # (sum_t a_t g_t^T) x = sum_t a_t (x^T g_t)^T: multiply the rows of one factor.
        return dataclasses.replace(
            grad,
            g=rounding.EXACT.einsum(grad.g, grad.g_axes, x, x_axes, g_axes),
            g_axes=g_axes,
            out_axes=(*(self.out_axes[i] for i in left), *new),
            shape=(*(self.shape[i] for i in left), *(sizes[i] for i in new)),
        )

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient | None:
        """Applies `fun` where the array varies along axes of one factor alone."""
        # (a_i g_j) x_j = a_i (g_j x_j): scale the factor that has the axes of x.
        varies = {i for i, n in zip(self.out_axes, x.shape, strict=True) if n != 1}
        for grad in (self, self._swapped()):
            if varies <= {*grad.g_axes}:
                at = [i for i, name in enumerate(self.out_axes) if name in varies]
                own = [name for name in grad.g_axes if name in varies]
                x = x.reshape([x.shape[i] for i in at])
                x = jnp.transpose(
                    x, [[self.out_axes[i] for i in at].index(name) for name in own]
                )
                sizes = zip(grad.g_axes, grad.g.shape, strict=True)
                x = x.reshape([n if name in varies else 1 for name, n in sizes])
                return dataclasses.replace(grad, g=fun(grad.g, x))
        return None

    def merge(self, other: Gradient) -> Gradient | None:
        if type(other) is not Product or self.shape != other.shape:
            return None
        mine = self._canonical()
        for theirs in (other, other._swapped()):
            theirs = theirs._canonical()
            if mine._spec == theirs._spec:
                # A sum of two products contracts over the concatenated terms t.
                join = lambda x, y: jnp.concatenate([x, y])
                return dataclasses.replace(
                    mine, a=join(mine.a, theirs.a), g=join(mine.g, theirs.g)
                )
        return None

    def with_alone(self, axis: int) -> "Product | None":
        """Returns the product with one contracted axis, and `axis` alone in `a`."""
        rest = tuple(1 + i for i in range(len(self.shape)) if i != axis)
        for grad in (self, self._swapped()):
            grad = grad._canonical()
            if grad._spec[:2] == ((0, 1 + axis), (0, *rest)):
                return grad
        return None

    def _swapped(self) -> "Product":
        return dataclasses.replace(
            self, a=self.g, g=self.a, a_axes=self.g_axes, g_axes=self.a_axes
        )

    @property
    def _spec(self) -> tuple:
        return self.a_axes, self.g_axes, self.out_axes

    def _canonical(self) -> "Product":
        """Merges the contracted axes to one, named 0; renames the others."""
        name = {old: new for new, old in enumerate(self.out_axes, 1) if old is not None}

        def order(x, axes):
            own = [i for i in self.out_axes if i in axes and i is not None]
            x = jnp.transpose(x, [axes.index(i) for i in (*self._contracted, *own)])
            x = x.reshape(-1, *x.shape[x.ndim - len(own) :])
            return x, (0, *(name[i] for i in own))

        out_axes = tuple(None if i is None else name[i] for i in self.out_axes)
        return dataclasses.replace(self._on_factors(order), out_axes=out_axes)


def of_grams(
    unit: rounding.Unit, grams: Sequence[jax.Array], lengths: Sequence[int], scaled: int
) -> Norm:
    r"""Computes a `Norm` from Gram matrices with axes (l, t, t), S included.

    An error in one Gram matrix counts in proportion to the entries of the other:
    :math:`\gamma_I \sum_{t,s} \lVert a_t \rVert \lVert a_s \rVert |g_t \cdot g_s| \le
    \gamma_I \sum_t \lVert a_t \rVert^2 \sum_s |g_t \cdot g_s|`, and the same with a and
    g exchanged. The weighted sum adds up T scaled terms, so its error is at most
    :math:`\gamma_{T+1} S`.

    Args:
      unit: the unit that multiplied them.
      grams: the Gram matrices of the two factors.
      lengths: the number of products in an entry of each.
      scaled: which factor is scaled by the weight.
    """
    # Sums of one shape, which XLA computes in one pass over memory.
    # ||M||^2 = sum_l sum_{t,s} (a_lt . a_ls)(g_lt . g_ls).
    total = lambda x: x.sum((1, 2))
    both = jnp.multiply(*grams)
    error = lambda length: precision.rounding_error(length, both.dtype)
    rows, is_diagonal = both.shape[1], jnp.eye(both.shape[1], dtype=bool)
    # Squares below the least normal number underflow, so add a bound on them.
    tiny = 4 * float(jnp.finfo(both.dtype).tiny / jnp.finfo(both.dtype).eps)
    # The diagonals hold ||a_t||^2 and ||g_t||^2, and the rows sum to sum_s |a_t . a_s|.
    a, g = (jnp.where(is_diagonal, x, 0).sum(2) + tiny for x in grams)
    of_a, of_g = (jnp.abs(x).sum(2) for x in grams)
    # The docstring's bound on the error of both Gram matrices.
    moved = error(lengths[0]) * a * of_g + error(lengths[1]) * g * of_a
    allowance, square = jnp.sum(moved), jnp.sum(both)
    # By Cauchy-Schwarz, S = sum_t ||a_t|| ||g_t|| <= sqrt(T sum_t ||a_t||^2 ||g_t||^2).
    added = error(rows + 1) * math.sqrt(rows) * jnp.sqrt(jnp.sum(a * g))
    if not unit.in_sum:
        return Norm(jnp.maximum(square, 0) + allowance, 0.0, added)
    # ||A A^T|| bounds the squared spectral norm; add a bound on underflowed squares.
    vanished = jnp.finfo(square.dtype).tiny * both[0].size
    largest = [jnp.sqrt(total(x * x) + vanished) for x in grams]
    # Two bounds on S of each kernel, by rows and by spectral norms (`rounding`, 1).
    # Several kernels combine by the root of the sum of squares.
    by_rows = jnp.sqrt(a * g).sum(1)
    of_each = jnp.fmin(by_rows, unit.spectral((a.sum(1), g.sum(1)), largest, scaled))
    terms = jnp.linalg.norm(of_each) + jnp.sqrt(allowance)
    # ||N|| <= sqrt(max(q, e^2)) + e with e = k S (`rounding`, 2); three passes add to
    # q.
    in_norm = unit.in_norm * terms
    square = jnp.maximum(square, in_norm * in_norm)
    allowance += unit.left_out * terms * terms
    return Norm(square + allowance, in_norm, unit.in_sum * terms + added)


def dot_general(a: jax.Array, g: jax.Array, dimension_numbers) -> Product:
    """Represents `lax.dot_general(a, g, dimension_numbers)`, not yet multiplied."""
    a, g = map(precision.at_least_16_bits, (a, g))
    (a_contract, g_contract), (a_batch, g_batch) = dimension_numbers
    a_axes = list(range(a.ndim))
    g_axes = list(range(a.ndim, a.ndim + g.ndim))
    for i, j in zip((*a_contract, *a_batch), (*g_contract, *g_batch), strict=True):
        g_axes[j] = a_axes[i]
    batch = [a_axes[i] for i in a_batch]
    used = {*batch, *(a_axes[i] for i in a_contract)}
    out_axes = [*batch, *(i for i in (*a_axes, *g_axes) if i not in used)]
    sizes = dict(zip((*a_axes, *g_axes), (*a.shape, *g.shape), strict=True))
    shape = tuple(sizes[i] for i in out_axes)
    return Product(a, g, tuple(a_axes), tuple(g_axes), tuple(out_axes), shape)
