"""Gradients of embedding tables: rows of output gradients, added at the ids."""

import dataclasses
import functools
import math
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.engine import forms, precision, product, rounding, view
from dpadambc.engine.interface import Entrywise, Gradient, Norm, Shape, pytree, squared


@pytree(data_fields=("ids", "g"))
class Lookup(Gradient):
    r"""The gradient of an embedding: rows of g, added at the ids.

    .. math:: M_v = \sum_{t: v_t = v} g_t, \qquad
        \lVert M \rVert^2 = \sum_{t, s} [v_t = v_s] \, g_t \cdot g_s

    It is the product of one-hot rows with g. The leading axes of both are stacked or
    looked up: `num_stacked` of them lead the output too.
    """

    ids: jax.Array  # shape=(*stacked, *looked up), within [0, size of the axis)
    g: jax.Array  # shape=(*stacked, *looked up, *row)
    axis: int  # the axis of the table along which rows are looked up
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
        """Returns ids with axes (l, t), and rows of g with axes (l, t, j)."""
        stacked = math.prod(self.shape[: self.num_stacked])
        width = math.prod(self._row_shape)
        count = math.prod(self.ids.shape) // max(stacked, 1)
        rows = self.g.astype(precision.at_least_float32(self.g.dtype))
        return (self.ids.reshape(stacked, count), rows.reshape(stacked, count, width))

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        del units
        ids, rows = self._rows()
        size = self.shape[self.axis]
        scatter = lambda i, x: jnp.zeros((size, x.shape[1]), x.dtype).at[i].add(x)
        table = jax.vmap(scatter)(ids, rows)
        stacked = self.shape[: self.num_stacked]
        table = table.reshape(*stacked, size, *self._row_shape)
        return jnp.moveaxis(table, self.num_stacked, self.axis)

    def norm(self, units: rounding.Units) -> Norm:
        """Bounds the norm; rows with one id add up over t: see `product.of_grams`.

        The segments are sums too, so their error is that of a sum, and not of a square.
        """
        del units
        ids, rows = self._rows()
        _, count, width = rows.shape
        error = lambda length: precision.rounding_error(length, rows.dtype)
        # For T > J the Gram matrix, T by T, is larger than the rows, T by J.
        if count > width:
            squares, terms = jax.vmap(_of_segments)(ids, rows)
            added = error(2 * count) * jnp.sqrt(terms.sum())
            return Norm(squares.sum(), 0.0, added)
        # ||M||^2 = sum_{t,s} [v_t = v_s] <g_t, g_s>, from the Gram matrix of the rows.
        equal = ids[:, :, None] == ids[:, None, :]
        # By Cauchy-Schwarz, the errors sum to at most gamma sum_t n_t ||g_t||^2, with
        # n_t the number of rows that have the id of t.
        terms = jnp.sum(equal.sum(2, dtype=rows.dtype) * squared(rows).sum(2))
        square = jnp.sum(jnp.where(equal, rounding.EXACT.gram(rows), 0))
        square = jnp.maximum(square, 0) + error(width) * terms
        return Norm(square, 0.0, error(count) * jnp.sqrt(terms))

    def cheaper_form(self) -> Gradient:
        if self.ids.size + self.g.size < math.prod(self.shape):
            return self
        return forms.Dense(self.dense(), self.shape, "direct")

    def summed(self) -> Gradient:
        """Moves the new axis, which is looked up, behind the stacked axes."""
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
        # The sums are in float32, so scale in float32 too.
        wide = self.g.astype(precision.at_least_float32(self.g.dtype))
        return dataclasses.replace(self, g=fun(wide))

    def unscaled(self) -> list[jax.Array]:
        return []

    def transpose(self, permutation: Shape) -> Gradient | None:
        """Moves the axis of the table; the others must keep their order."""
        rest = [i for i in permutation if i != self.axis]
        moved = permutation.index(self.axis)
        if rest != sorted(rest) or moved < self.num_stacked:
            return None
        shape = tuple(self.shape[i] for i in permutation)
        return dataclasses.replace(self, axis=moved, shape=shape)

    def reshape(self, shape: Shape) -> Gradient | None:
        """Adds or removes axes of size one."""
        wide = lambda shape: [n for n in shape if n != 1]
        is_one = self.shape[self.axis] == 1
        if self.num_stacked or is_one or wide(shape) != wide(self.shape):
            return None
        before = len(wide(self.shape[: self.axis]))
        axis = [i for i, n in enumerate(shape) if n != 1][before]
        row = shape[:axis] + shape[axis + 1 :]
        g = self.g.reshape(*self.ids.shape, *row)
        return dataclasses.replace(self, g=g, axis=axis, shape=tuple(shape))

    def broadcast(self, shape: Shape) -> Gradient | None:
        if self.num_stacked or shape[self.axis] != self.shape[self.axis]:
            return None
        row = shape[: self.axis] + shape[self.axis + 1 :]
        g = jnp.broadcast_to(self.g, (*self.ids.shape, *row))
        return dataclasses.replace(self, g=g, shape=shape)

    def rows_from(self, start: Any, size: int) -> "Lookup":
        """Returns the gradient of successive rows; other ids get rows of zeros."""
        inside = (self.ids >= start) & (self.ids < start + size)
        inside = inside.reshape(*inside.shape, *[1] * (self.g.ndim - inside.ndim))
        shape = self.shape[: self.axis] + (size,) + self.shape[self.axis + 1 :]
        return dataclasses.replace(
            self,
            ids=jnp.clip(self.ids - start, 0, size - 1),
            g=jnp.where(inside, self.g, jnp.zeros((), self.g.dtype)),
            shape=shape,
        )

    def slice(self, starts: Shape, limits: Shape) -> Gradient | None:
        first, end = starts[self.axis], limits[self.axis]
        if first == end:
            return None
        cut = self.rows_from(first, end - first)
        ids, g = cut.ids, cut.g
        for axis, (start, limit) in enumerate(zip(starts, limits, strict=True)):
            if axis < self.num_stacked:
                ids = jax.lax.slice_in_dim(ids, start, limit, axis=axis)
            if axis != self.axis:
                g = jax.lax.slice_in_dim(g, start, limit, axis=self._of_rows(axis))
        shape = tuple(b - a for a, b in zip(starts, limits, strict=True))
        return dataclasses.replace(self, ids=ids, g=g, shape=shape)

    def reduce_sum(self, axes: Shape) -> Gradient | None:
        """Sums over axes of the rows, or over the table, without the ids."""
        if any(axis < self.num_stacked for axis in axes):
            return None
        rows = [self._of_rows(axis) for axis in axes if axis != self.axis]
        left = [i for i in range(len(self.shape)) if i not in axes]
        shape = tuple(self.shape[i] for i in left)
        wide = self.g.astype(precision.at_least_float32(self.g.dtype))
        if self.axis in axes:
            # sum_v M_v = sum_t g_t, since each row of g is added at one id.
            looked_up = range(self.num_stacked, self.ids.ndim)
            return forms.Dense(wide.sum((*looked_up, *rows)), shape, "direct")
        axis = left.index(self.axis)
        return dataclasses.replace(self, g=wide.sum(rows), axis=axis, shape=shape)

    def _of_rows(self, axis: int) -> int:
        """Returns the axis of g for an axis of the gradient other than the table's."""
        if axis < self.num_stacked:
            return axis
        return self.ids.ndim + axis - self.num_stacked - (axis > self.axis)

    def entrywise(self, fun: Entrywise, x: jax.Array) -> Gradient:
        return dataclasses.replace(self, g=fun(self.g, self._at_ids(x)))

    def _at_ids(self, x: jax.Array) -> jax.Array:
        """Returns the rows of an array at the ids, with the axes of g."""
        x, stacked = jnp.moveaxis(x, self.axis, self.num_stacked), self.num_stacked
        if x.shape[stacked] == 1:
            ones = [1] * (self.ids.ndim - stacked)
            return x.reshape(*x.shape[:stacked], *ones, *x.shape[stacked + 1 :])
        take = functools.partial(jnp.take, axis=0, mode="clip")
        for _ in range(stacked):
            take = jax.vmap(take)
        return take(
            jnp.broadcast_to(x, (*self.shape[:stacked], *x.shape[stacked:])), self.ids
        )

    def times(
        self, x: jax.Array, contract: tuple[Shape, Shape], batch: tuple[Shape, Shape]
    ) -> Gradient | None:
        r"""Multiplies the rows by an array, as `lax.dot_general` does.

        If the axis of the table is contracted, the rows of the array at the ids are one
        factor of a product, :math:`\sum_t g_t \otimes x_{v_t}`. Returns None if there
        are as many ids as rows of the table.
        """
        if self.num_stacked or batch[0] or self.ids.size >= self.shape[self.axis]:
            return None
        mine, theirs = map(list, contract)
        if self.axis in mine:
            at = theirs.pop(mine.index(self.axis))
            mine.remove(self.axis)
            x, count = jnp.take(x, self.ids, axis=at, mode="clip"), self.ids.ndim
            theirs = [i if i < at else i + count - 1 for i in theirs]
            of_g = [*range(count), *map(self._of_rows, mine)]
            of_x = [*range(at, at + count), *theirs]
            dtype = jnp.promote_types(x.dtype, self.g.dtype)
            factors = self.g.astype(dtype), x.astype(dtype)
            return product.dot_general(*factors, ((of_g, of_x), ((), ())))
        g_axes = list(range(self.g.ndim))
        met = dict(zip(theirs, map(self._of_rows, mine), strict=True))
        x_axes = [met.get(i, self.g.ndim + i) for i in range(x.ndim)]
        out_axes = [i for i in (*g_axes, *x_axes) if i not in met.values()]
        g = rounding.EXACT.einsum(self.g, g_axes, x, x_axes, out_axes)
        left = [i for i in range(len(self.shape)) if i not in mine]
        own = (n for i, n in enumerate(x.shape) if i not in theirs)
        return dataclasses.replace(
            self,
            g=g,
            axis=left.index(self.axis),
            shape=(*(self.shape[i] for i in left), *own),
        )

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
        """Flattens the looked-up axes to one."""
        stacked, row = self.shape[: self.num_stacked], self._row_shape
        ids = self.ids.reshape(*stacked, -1)
        return dataclasses.replace(self, ids=ids, g=self.g.reshape(*ids.shape, *row))

    def knows_product_with(self, other: Gradient) -> bool:
        return self._as_head(other) is not None

    def _as_head(self, other: Gradient) -> product.Product | None:
        """Returns a product of the same table, such as that of a tied output head.

        Its factor a has the axis of the ids, and its factor g all the others.
        """
        if not isinstance(other, product.Product) or self.num_stacked:
            return None
        return other.with_alone(self.axis)

    def inner(self, other: Gradient) -> jax.Array:
        r"""Computes :math:`\sum_{t,s} (g_t \cdot g'_s) a_{s, v_t}` and an allowance."""
        head = self._as_head(other)
        assert head is not None
        # <M, M'> = sum_t <g_t, M'_{v_t}>, and row v of M' is sum_s a_{s,v} g'_s.
        (ids,), (rows,) = self._rows()
        others = head.g.reshape(head.g.shape[0], rows.shape[1])
        products = rounding.EXACT.einsum(others, (0, 2), rows, (1, 2), (0, 1))
        looked_up = jnp.take(head.a, ids, axis=1)
        # The error of <g_t, g'_s> is at most gamma ||g_t|| ||g'_s||; by Cauchy-Schwarz,
        # weighted by a it sums to at most gamma times the three Frobenius norms.
        norms = map(jnp.linalg.norm, (others, rows, looked_up))
        error = precision.rounding_error(rows.shape[1], products.dtype)
        allowance = functools.reduce(jnp.multiply, norms, error)
        return jnp.sum(products * looked_up) + allowance

    def gather(self, indices: jax.Array, params) -> Gradient | None:
        """Gathers whole rows, as `lax.gather` does: those that the loss replaces.

        Successive rows stay a lookup. Others are materialized, unless they and the
        comparison of ids are larger than the table.
        """
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        size, rest = sizes[self.axis], sizes[: self.axis] + sizes[self.axis + 1 :]
        is_filled = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        if (
            self.num_stacked
            or rest != self._row_shape
            or numbers.start_index_map != (self.axis,)
            or (is_filled and params["fill_value"] != 0)
        ):
            return None
        collapsed, last = numbers.collapsed_slice_dims, self.shape[self.axis] - size
        starts = _wide(indices)[..., 0]
        clipped = jnp.clip(starts, 0, last)
        if starts.ndim == 0:
            rows = self.rows_from(clipped, size)
            if is_filled:
                inside = starts == clipped
                rows = rows.map_scale(lambda g: jnp.where(inside, g, 0))
            left = (n for i, n in enumerate(sizes) if i not in collapsed)
            return view.reshaped(rows, tuple(left))
        (ids,), (rows,) = self._rows()
        is_larger = starts.size * (ids.size + rows.shape[1]) > math.prod(self.shape)
        if collapsed != (self.axis,) or is_larger:
            return None
        at = starts if is_filled else clipped
        equal = at.reshape(-1, 1) == ids[None]
        found = jnp.where(equal[..., None], rows[None], 0).sum(1)
        found = found.reshape(*at.shape, *rest)
        leading = [i for i in range(found.ndim) if i not in numbers.offset_dims]
        order = (*leading, *numbers.offset_dims)
        found = jnp.moveaxis(found, range(found.ndim), order)
        return forms.Dense(found, found.shape, "direct")


def _of_segments(ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums rows of equal ids in segments, for sequences longer than rows are wide.

    Returns:
      The squared norm, and the sum over ids of n times the squared norms of its n rows,
      which bounds the square of the sum of their norms.
    """
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    starts = jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]])
    segments, count = jnp.cumsum(starts), ids.shape[0]
    add = lambda x: jax.ops.segment_sum(x, segments, num_segments=count)
    totals, sizes = add(rows), add(jnp.ones(count, rows.dtype))
    squares = add(squared(rows).sum(1))
    return jnp.sum(totals * totals), jnp.sum(sizes * squares)


def _wide(ids: jax.Array) -> jax.Array:
    """Casts ids to integers that can number any row."""
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


def _at_ids(
    ids: dict[int, jax.Array], rows: jax.Array, shape: Shape
) -> Gradient | None:
    """Adds rows into zeros, at in-range ids along each of some axes.

    Returns None where there are more rows than an integer can number.
    """
    if math.prod(shape[i] for i in ids) > np.iinfo(np.int32).max:
        return None
    axes = (*ids, *(i for i in range(len(shape)) if i not in ids))
    sizes = tuple(shape[i] for i in axes)
    flat = jnp.zeros((), jnp.int32)
    # Row-major numbers of the ids along several axes: one table of many rows.
    for axis, along in ids.items():
        flat = flat * shape[axis] + along
    count = math.prod(sizes[: len(ids)])
    table = Lookup(flat, rows, 0, 0, (count, *sizes[len(ids) :]))
    back = tuple(axes.index(i) for i in range(len(shape)))
    return view.transposed(view.reshaped(table, sizes), back)


def scatter_add(
    shape: Shape, indices: jax.Array, g: jax.Array, params
) -> Gradient | None:
    """Matches `lax.scatter_add` into zeros, of windows that span the other axes."""
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
    """Matches `lax.dynamic_update_slice` into zeros, of one row or successive ones."""
    chosen = [i for i, n in enumerate(shape) if update.shape[i] != n]
    whole = [i for i in range(len(shape)) if i not in chosen]
    if len(chosen) != 1 or len(whole) > 1:
        return None
    (axis,) = chosen
    size = update.shape[axis]
    start = jnp.clip(_wide(jnp.asarray(starts[axis])), 0, shape[axis] - size)
    rows = jnp.transpose(update, (axis, *whole))
    return _at_ids({axis: start + jnp.arange(size, dtype=start.dtype)}, rows, shape)


def sparse_dot_general(
    data: jax.Array, indices: jax.Array, g: jax.Array, params
) -> Gradient | None:
    """Returns the gradient by `jax.experimental.sparse.BCOO`, a row for each entry.

    Returns None where no sparse axis is left to look rows up along.
    """
    (of_sparse, of_g), (batch, _) = params["dimension_numbers"]
    size = params["lhs_spinfo"].shape
    entries = indices.shape[:-1]
    if batch or data.ndim != len(entries) or len(of_sparse) == len(size):
        return None
    indices = _wide(indices)
    leading = [
        jax.lax.broadcasted_iota(indices.dtype, entries, i)
        for i in range(len(entries) - 1)
    ]
    at = [x.reshape(-1) for x in (*leading, *jnp.moveaxis(indices, -1, 0))]
    g = jnp.moveaxis(g, of_g, range(len(of_g)))
    at_g = tuple(at[i] for i in of_sparse)
    rows = g.at[at_g].get(mode="fill", fill_value=0) if at_g else g[None]
    data = jnp.broadcast_to(data, entries).reshape(-1, *[1] * (g.ndim - len(of_g)))
    rows, ids = data * rows, {}
    for axis, i in enumerate(i for i in range(len(size)) if i not in of_sparse):
        place = jnp.where(at[i] < 0, at[i] + size[i], at[i])
        ids[axis] = jnp.clip(place, 0, max(size[i] - 1, 0))
        inside = (place == ids[axis]).reshape(data.shape)  # or padding
        rows = jnp.where(inside, rows, jnp.zeros((), rows.dtype))
    shape = *(size[i] for i in range(len(size)) if i not in of_sparse), *rows.shape[1:]
    return _at_ids(ids, rows, shape)


def kept_by_scatter(
    shape: Shape, indices: jax.Array, updates: Shape, params
) -> jax.Array:
    """Returns which entries `lax.scatter` leaves unchanged; axes may have size one."""
    numbers = params["dimension_numbers"]
    outside = *numbers.inserted_window_dims, *numbers.operand_batching_dims
    windowed = [i for i in range(len(shape)) if i not in outside]
    dims = dict(zip(windowed, numbers.update_window_dims, strict=True))
    whole = {i: at for i, at in dims.items() if updates[at] == shape[i]}
    return jax.lax.scatter(
        jnp.ones(_with_ones(shape, whole), bool),
        indices,
        jnp.zeros(_with_ones(updates, whole.values()), bool),
        numbers,
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


def _with_ones(shape: Shape, axes: Container[int]) -> Shape:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))
