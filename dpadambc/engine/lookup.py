"""Gradients of embedding tables: rows of output gradients, added where ids point."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.engine import forms, precision, product, rounding, view
from dpadambc.engine.interface import (
    Gradient,
    Shape,
    pytree,
    squared,
    times_along,
)


@pytree(data_fields=("ids", "g"))
class Lookup(Gradient):
    r"""The gradient of an embedding: rows of g added where the ids point.

    .. math:: M_v = \sum_{t: v_t = v} g_t, \qquad
        \lVert M \rVert^2 = \sum_{t, s} [v_t = v_s] \, g_t \cdot g_s

    It is the product of one-hot rows with g; the leading axes of both are stacked or
    looked up: `num_stacked` of them lead the output too.
    """

    ids: jax.Array  # shape=(*stacked, *looked up), within [0, size of the axis)
    g: jax.Array  # shape=(*stacked, *looked up, *row)
    axis: int  # of the table, along which rows are looked up
    num_stacked: int
    shape: Shape

    @property
    def rule(self) -> str:
        return "lookup"

    @property
    def _row_shape(self) -> Shape:
        rest = self.shape[self.num_stacked :]
        at = self.axis - self.num_stacked
        return rest[:at] + rest[at + 1 :]

    def _rows(self) -> tuple[jax.Array, jax.Array]:
        """Ids with axes (l, t), and rows of g with axes (l, t, j)."""
        stacked = math.prod(self.shape[: self.num_stacked])
        width = math.prod(self._row_shape)
        count = math.prod(self.ids.shape) // max(stacked, 1)
        rows = self.g.astype(precision.at_least_float32(self.g.dtype))
        return (
            self.ids.reshape(stacked, count),
            rows.reshape(stacked, count, width),
        )

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        del units
        ids, rows = self._rows()
        size = self.shape[self.axis]
        scatter = lambda i, x: jnp.zeros((size, x.shape[1]), x.dtype).at[i].add(x)
        table = jax.vmap(scatter)(ids, rows)
        stacked = self.shape[: self.num_stacked]
        table = table.reshape(*stacked, size, *self._row_shape)
        return jnp.moveaxis(table, self.num_stacked, self.axis)

    def squared_norm(self) -> jax.Array:
        ids, rows = self._rows()
        _, count, width = rows.shape
        if count > width:
            return jnp.sum(jax.vmap(_squared_norm_by_segments)(ids, rows))
        equal = ids[:, :, None] == ids[:, None, :]
        squares = squared(rows).sum(2)
        sizes = equal.sum(2, dtype=rows.dtype)
        allowance = precision.rounding_allowance((sizes, squares), (0, width))
        return jnp.sum(jnp.where(equal, rounding.EXACT.gram(rows), 0)) + jnp.sum(
            allowance
        )

    def settled(self) -> Gradient:
        if self.ids.size + self.g.size < math.prod(self.shape):
            return self
        return forms.Dense(self.dense(), self.shape, "direct")

    def summed(self) -> Gradient:
        """The new axis is looked up; it moves behind those that are stacked."""
        behind = lambda x: jnp.moveaxis(x, 0, self.num_stacked)
        return dataclasses.replace(self, ids=behind(self.ids), g=behind(self.g))

    def stacked(self) -> Gradient:
        return dataclasses.replace(
            self,
            axis=self.axis + 1,
            num_stacked=self.num_stacked + 1,
            shape=(self.ids.shape[0], *self.shape),
        )

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        # In float32, in which it is added up too.
        wide = self.g.astype(precision.at_least_float32(self.g.dtype))
        return dataclasses.replace(self, g=fun(wide))

    def unscaled(self) -> list[jax.Array]:
        return []

    def scaled_along(self, vectors: Sequence[jax.Array]) -> Gradient:
        """What is for the rows of the table is looked up as they are."""
        dtype = jnp.promote_types(self.g.dtype, vectors[self.axis].dtype)
        of_ids = vectors[self.axis].astype(dtype)[self.ids]
        g = self.g.astype(dtype)
        g = g * of_ids.reshape(*of_ids.shape, *[1] * (g.ndim - of_ids.ndim))
        own = [v for i, v in enumerate(vectors) if i != self.axis]
        stacked, row = own[: self.num_stacked], own[self.num_stacked :]
        at = [*range(self.num_stacked), *range(self.ids.ndim, g.ndim)]
        for axis, vector in zip(at, (*stacked, *row), strict=True):
            g = times_along(g, vector, axis)
        return dataclasses.replace(self, g=g)

    def scaled_by(self, x: jax.Array) -> "Lookup":
        """Times the rows of an array, looked up."""
        ids, rows = self._rows()
        stacked, size = self.shape[: self.num_stacked], self.shape[self.axis]
        table = jnp.moveaxis(x, self.axis, self.num_stacked)
        table = jnp.broadcast_to(table, (*stacked, size, *self._row_shape))
        table = table.reshape(len(ids), size, rows.shape[2])
        looked_up = jax.vmap(lambda x, at: jnp.take(x, at, axis=0))(table, ids)
        return dataclasses.replace(self, g=(rows * looked_up).reshape(self.g.shape))

    def contracted(self, x: jax.Array, axes: Shape) -> jax.Array:
        grad = self.scaled_by(x)._flat()
        others = [i for i in range(len(self.shape)) if i != self.axis]
        places = [i for i in range(grad.g.ndim) if i != self.num_stacked]
        summed = [at for at, i in zip(places, others, strict=True) if i in axes]
        if self.axis in axes:
            return grad.g.sum((*summed, self.num_stacked))
        rows = [at for at in summed if at > self.num_stacked]  # before they are added
        within = [i in axes and i >= self.num_stacked for i in range(len(self.shape))]
        shape = tuple(1 if x else n for x, n in zip(within, self.shape, strict=True))
        narrow = dataclasses.replace(
            grad, g=grad.g.sum(rows, keepdims=True), shape=shape
        )
        return narrow.dense().sum(axes)

    def squared_norm_of_terms(self) -> jax.Array:
        ids, rows = self._rows()

        def repeats(ids):
            place = functools.partial(jnp.searchsorted, jnp.sort(ids), ids)
            return place(side="right") - place(side="left")

        return jnp.sum(jax.vmap(repeats)(ids) * squared(rows).sum(2))

    def transpose(self, permutation: Shape) -> Gradient | None:
        """The axis of the table may move, the others keep their order."""
        rest = [i for i in permutation if i != self.axis]
        moved = permutation.index(self.axis)
        if rest != sorted(rest) or moved < self.num_stacked:
            return None
        shape = tuple(self.shape[i] for i in permutation)
        return dataclasses.replace(self, axis=moved, shape=shape)

    def merge(self, other: Gradient) -> Gradient | None:
        if not isinstance(other, Lookup) or self.shape != other.shape:
            return None
        if (self.axis, self.num_stacked) != (other.axis, other.num_stacked):
            return None
        flat = [grad._flat() for grad in (self, other)]
        join = functools.partial(jnp.concatenate, axis=self.num_stacked)
        return dataclasses.replace(
            self, ids=join([x.ids for x in flat]), g=join([x.g for x in flat])
        )

    def _flat(self) -> "Lookup":
        """The same with one looked-up axis."""
        stacked, row = self.shape[: self.num_stacked], self._row_shape
        ids = self.ids.reshape(*stacked, -1)
        return dataclasses.replace(self, ids=ids, g=self.g.reshape(*ids.shape, *row))

    def knows_product_with(self, other: Gradient) -> bool:
        return self._as_head(other) is not None

    def _as_head(self, other: Gradient) -> product.Product | None:
        """A product of the same table, such as the gradient of a tied output head.

        Its factor a has the axis of the ids, and g all the others.
        """
        if not isinstance(other, product.Product) or self.num_stacked:
            return None
        return other.with_alone(self.axis)

    def inner(self, other: Gradient) -> jax.Array:
        r""":math:`\sum_{t,s} (g_t \cdot g'_s) a_{s, v_t}`."""
        head = self._as_head(other)
        assert head is not None
        (ids,), (rows,) = self._rows()
        others = head.g.reshape(head.g.shape[0], rows.shape[1])
        products = rounding.EXACT.einsum(others, (0, 2), rows, (1, 2), (0, 1))
        return jnp.sum(products * jnp.take(head.a, ids, axis=1))


def _squared_norm_by_segments(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of equal ids summed next to each other, for sequences longer than wide."""
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    starts = jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]])
    segments, count = jnp.cumsum(starts), ids.shape[0]
    add = lambda x: jax.ops.segment_sum(x, segments, num_segments=count)
    totals, sizes = add(rows), add(jnp.ones(count, rows.dtype))
    squares = add(squared(rows).sum(1))
    allowance = precision.rounding_allowance(
        (sizes, squares), (0, sizes * rows.shape[1])
    )
    return jnp.sum(totals * totals) + jnp.sum(allowance)


def _wide(ids: jax.Array) -> jax.Array:
    """Integers that hold the number of any row."""
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


def _at_ids(
    ids: dict[int, jax.Array], rows: jax.Array, shape: Shape
) -> Gradient | None:
    """Rows added into zeros, at ids along each of some axes that are inside of them.

    None where there are more rows than an integer can number.
    """
    if math.prod(shape[i] for i in ids) > np.iinfo(np.int32).max:
        return None
    axes = (*ids, *(i for i in range(len(shape)) if i not in ids))
    sizes = tuple(shape[i] for i in axes)
    flat = jnp.zeros((), jnp.int32)
    for axis, along in ids.items():
        flat = flat * shape[axis] + along
    count = math.prod(sizes[: len(ids)])
    table = Lookup(flat, rows, 0, 0, (count, *sizes[len(ids) :]))
    back = tuple(axes.index(i) for i in range(len(shape)))
    return view.transposed(view.reshaped(table, sizes), back)


def scatter_add(
    shape: Shape, indices: jax.Array, g: jax.Array, params
) -> Gradient | None:
    """`lax.scatter_add` into zeros of windows that are whole along the other axes."""
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims:
        return None
    windowed = [i for i in range(len(shape)) if i not in numbers.inserted_window_dims]
    dims = dict(zip(windowed, numbers.update_window_dims, strict=True))
    sizes = [g.shape[dims[i]] if i in dims else 1 for i in range(len(shape))]
    chosen = [i for i, n in enumerate(shape) if i not in dims or sizes[i] != n]
    if not chosen or any(sizes[i] != 1 for i in chosen):
        return None
    units = [dims[i] for i in chosen if i in dims]
    whole = [dims[i] for i in windowed if i not in chosen]
    leading = [at for at in range(g.ndim) if at not in dims.values()]
    rows = jnp.transpose(g, (*units, *leading, *whole))
    rows = rows.reshape(rows.shape[len(units) :])
    indices = _wide(indices)
    starts = {
        i: indices[..., k] for k, i in enumerate(numbers.scatter_dims_to_operand_dims)
    }
    mode = jax.lax.GatherScatterMode.from_any(params["mode"])
    if mode != jax.lax.GatherScatterMode.CLIP:
        inside = jnp.ones(indices.shape[:-1], bool)
        for i, start in starts.items():
            inside &= (start >= 0) & (start <= shape[i] - sizes[i])
        inside = inside.reshape(*inside.shape, *(1 for _ in whole))
        rows = jnp.where(inside, rows, jnp.zeros((), rows.dtype))
    first = jnp.zeros(indices.shape[:-1], indices.dtype)
    clip = lambda i: jnp.clip(starts.get(i, first), 0, max(shape[i] - 1, 0))
    return _at_ids({i: clip(i) for i in chosen}, rows, shape)


def dynamic_update_slice(
    shape: Shape, update: jax.Array, starts: tuple[jax.Array, ...]
) -> Gradient | None:
    """`lax.dynamic_update_slice` into zeros of one row, or of several in succession."""
    chosen = [i for i, n in enumerate(shape) if update.shape[i] != n]
    whole = [i for i in range(len(shape)) if i not in chosen]
    if len(chosen) != 1 or len(whole) > 1:
        return None
    (axis,) = chosen
    size = update.shape[axis]
    start = jnp.clip(_wide(jnp.asarray(starts[axis])), 0, shape[axis] - size)
    rows = jnp.transpose(update, (axis, *whole))
    return _at_ids({axis: start + jnp.arange(size, dtype=start.dtype)}, rows, shape)
