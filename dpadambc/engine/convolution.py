r"""Gradients of convolution kernels, tap by tap.

A tap s of the kernel reads the input at every output position k, shifted by s. With
:math:`X_s` that slice of the input, positions by input channels, and G the output
gradient, positions by output channels, the gradient of the tap is a product,

.. math:: M_s = X_s^\top G, \qquad
    \lVert M \rVert^2 = \sum_{k, k'} \Big(\sum_s X_s X_s^\top\Big)_{k k'}
    (G G^\top)_{k k'}

Where positions are few, as in the deep layers of a network, a norm by these two Gram
matrices takes a small part of the multiplications of M, and the gradient stays in its
factors. The first matrix has the inner products of patches, each a sum of inner
products of input positions. Where positions are many, M is no larger than a few times
its factors, and is materialized, one row of taps after the other. The patches of a row
take no more memory than the factors; the patches of all taps would take as many times
the input as there are taps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.engine import forms, precision, product, rounding, view
from dpadambc.engine.interface import Gradient, Norm, Shape, pytree


class Window(NamedTuple):
    """The selection of input slices by taps: one number for each spatial axis."""

    taps: Shape
    strides: Shape  # between taps
    padding: tuple[tuple[int, int], ...]
    input_dilation: Shape
    dilation: Shape  # between output positions
    groups: int

    def padded_sizes(self, sizes: Shape) -> Shape:
        """Returns the number of input positions along each axis, padded and dilated."""
        axes = zip(sizes, self.padding, self.input_dilation, strict=True)
        return tuple((n - 1) * d + 1 + low + high for n, (low, high), d in axes)

    def padded(self, x: jax.Array) -> jax.Array:
        """Pads and dilates an input (*leading, *positions, channels)."""
        spatial = [
            (*padding, dilation - 1)
            for padding, dilation in zip(self.padding, self.input_dilation, strict=True)
        ]
        leading = [(0, 0, 0)] * (x.ndim - len(spatial) - 1)
        config = [*leading, *spatial, (0, 0, 0)]
        return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


@pytree(data_fields=("x", "g"))
class Convolution(Gradient):
    """The gradient of a kernel with axes (stacked, *taps, input, output), permuted."""

    x: jax.Array  # (*leading, *input positions, groups * input channels)
    g: jax.Array  # (*leading, *output positions, groups * output channels)
    window: Window
    num_stacked: int  # leading axes of the kernel too; others are summed
    permutation: Shape
    shape: Shape

    @property
    def rule(self) -> str:
        return "convolution: gram"

    @property
    def _axes(self) -> int:
        """The number of spatial axes."""
        return len(self.window.taps)

    @property
    def _taps(self) -> int:
        return math.prod(self.window.taps)

    def _sizes(self, x: jax.Array) -> Shape:
        """Returns the number of positions along each spatial axis."""
        return x.shape[x.ndim - self._axes - 1 : -1]

    @property
    def _positions(self) -> int:
        """The number of products that are summed for each number of the gradient."""
        return math.prod(self.g.shape[self.num_stacked : -1])

    @property
    def _gram_by_positions(self) -> tuple[int, bool]:
        """The multiplications of the Gram matrix, and whether it is by positions."""
        summed = self.x.shape[self.num_stacked : self.x.ndim - self._axes - 1]
        padded = *summed, *self.window.padded_sizes(self._sizes(self.x))
        # By positions: inner products of all pairs of padded input positions, then one
        # addition per tap and pair of outputs. By patches: one product per tap, pair
        # and channel.
        inputs, pairs = self.x.shape[-1], self._taps * self._positions**2
        by_positions = math.prod(padded) ** 2 * inputs + pairs
        return min(by_positions, pairs * inputs), by_positions < pairs * inputs

    def cheaper_form(self) -> Gradient:
        """Keeps the factors if a norm takes under half of the dense one's work."""
        inputs, outputs = self.x.shape[-1], self.g.shape[-1]
        # Multiplications of both Gram matrices, and of the dense gradient.
        norm = self._gram_by_positions[0] + self._positions**2 * outputs
        formed = self._positions * self._taps * inputs * outputs // self.window.groups
        if 2 * norm < formed:
            return self
        return forms.Dense(self.dense(), self.shape, "direct")

    def grouped(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Reshapes to axes (stacked * groups, positions, channels of a group)."""
        x = x.astype(dtype or precision.at_least_float32(x.dtype))
        stacked = math.prod(x.shape[: self.num_stacked])
        positions = math.prod(x.shape[self.num_stacked : -1])
        groups = self.window.groups
        channels = x.shape[-1] // groups
        x = x.reshape(stacked, positions, groups, channels)
        x = jnp.swapaxes(x, 1, 2)
        return x.reshape(stacked * groups, positions, channels)

    def _starts(self, axes: int) -> jax.Array:
        """Returns the starts of the taps along the first axes in the padded input."""
        window = self.window
        at = [
            [i * stride for i in range(taps if axis < axes else 1)]
            for axis, (taps, stride) in enumerate(
                zip(window.taps, window.strides, strict=True)
            )
        ]
        return jnp.array([*itertools.product(*at)])

    def _extents(self) -> list[int]:
        """Returns the extent of the positions that one tap reads, along each axis."""
        sizes = zip(self._sizes(self.g), self.window.dilation, strict=True)
        return [(n - 1) * dilation + 1 for n, dilation in sizes]

    def patches(
        self, x: jax.Array, start: Any, taps: Shape, dtype: Any = None
    ) -> jax.Array:
        """Concatenates the slices of the padded input that some taps read, grouped."""
        window, lead = self.window, x.shape[: x.ndim - self._axes - 1]
        extents, first = self._extents(), (0,) * len(lead)
        sizes = [
            (n - 1) * stride + extent
            for n, stride, extent in zip(taps, window.strides, extents, strict=True)
        ]
        channels = x.shape[-1]
        box = jax.lax.dynamic_slice(x, (*first, *start, 0), (*lead, *sizes, channels))
        slices = []
        for tap in itertools.product(*map(range, taps)):
            low = [i * stride for i, stride in zip(tap, window.strides, strict=True)]
            high = [a + extent for a, extent in zip(low, extents, strict=True)]
            steps = *(1 for _ in lead), *window.dilation, 1
            box_of_tap = (*first, *low, 0), (*lead, *high, channels), steps
            slices.append(self.grouped(jax.lax.slice(box, *box_of_tap), dtype))
        return jnp.concatenate(slices, axis=-1)

    @property
    def _looped_axes(self) -> int:
        """The number of leading tap axes over which `dense` loops.

        The taps of the other axes are multiplied at once, as long as their patches take
        no more memory than the factors.
        """
        one = self.g.size // max(self.g.shape[-1], 1) * self.x.shape[-1]
        at_once = (self.x.size + self.g.size) // max(2 * one, 1)
        fits = (math.prod(self.window.taps[i:]) <= at_once for i in range(self._axes))
        return next((i for i, fit in enumerate(fits) if fit), self._axes)

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        unit, looped = units.of(self.x, self.g), self._looped_axes
        g = self.grouped(self.g, unit.dtype)
        row = (*(1 for _ in range(looped)), *self.window.taps[looped:])

        # An axis of size one would make XLA copy the array that the loop reads.
        flat = g.reshape(-1, g.shape[-1])

        def of_row(start):
            # Padded inside the loop; otherwise XLA holds padded copies of all layers.
            x, start = jax.lax.optimization_barrier((self.x, start))
            patches = self.patches(self.window.padded(x), start, row, unit.dtype)
            # M_s = X_s^T G for the taps s of one row, with the groups as a batch axis.
            return unit.product(patches, flat.reshape(g.shape))

        kernel = jax.lax.map(of_row, self._starts(looped))
        stacked, groups = self.x.shape[: self.num_stacked], self.window.groups
        rows, inputs, outputs = len(kernel), self.x.shape[-1] // groups, g.shape[-1]
        kernel = kernel.reshape(rows, -1, groups, math.prod(row), inputs, outputs)
        # To (stacked, taps, input, groups, output): groups are part of the output.
        kernel = kernel.transpose(1, 0, 3, 4, 2, 5)
        shape = *stacked, *self.window.taps, inputs, groups * outputs
        return kernel.reshape(shape).transpose(self.permutation)

    def _gram_of_patches(self, unit: rounding.Unit) -> jax.Array:
        """Computes inner products of patches: sums over taps of those of slices."""
        x, one = self.window.padded(self.x), (1,) * self._axes

        def seen(start):
            return unit.gram(self.patches(x, start, one, unit.dtype))

        # X_s X_s^T is a box of the Gram matrix of all input positions: compute that
        # once, and slice it for each tap.
        if self._gram_by_positions[1]:
            sizes, extents = self._sizes(x), self._extents()
            gram = unit.gram(self.grouped(x, unit.dtype))
            summed = gram.shape[1] // max(math.prod(sizes), 1)
            gram = gram.reshape(-1, summed, *sizes, summed, *sizes)
            steps = (1, *self.window.dilation) * 2

            def seen(start):
                box = jax.lax.dynamic_slice(
                    gram,
                    (0, 0, *start, 0, *start),
                    (len(gram), summed, *extents, summed, *extents),
                )
                return box[(slice(None), *(slice(None, None, n) for n in steps))]

        # sum_s X_s X_s^T, the first factor of the norm.
        first, *_ = starts = self._starts(self._axes)
        add = lambda total, start: (total + seen(start), None)
        total, _ = jax.lax.scan(add, seen(first), starts[1:])
        return total.reshape(-1, self._positions, self._positions)

    def _grams(self, unit: rounding.Unit) -> tuple[jax.Array, jax.Array]:
        return self._gram_of_patches(unit), unit.gram(self.grouped(self.g, unit.dtype))

    def norm(self, units: rounding.Units) -> Norm:
        unit = units.of(self.x, self.g)
        channels = [x.shape[-1] // self.window.groups for x in (self.x, self.g)]
        lengths = self._taps * channels[0], channels[1]
        return product.of_grams(unit, self._grams(unit), lengths, 1)

    def operands(self, units: rounding.Units) -> Gradient:
        unit = units.of(self.x, self.g)
        return dataclasses.replace(self, x=unit.operand(self.x), g=unit.operand(self.g))

    def summed(self) -> Gradient:
        behind = lambda x: jnp.moveaxis(x, 0, self.num_stacked)
        return dataclasses.replace(self, x=behind(self.x), g=behind(self.g))

    def stacked(self) -> Gradient:
        return dataclasses.replace(
            self,
            num_stacked=self.num_stacked + 1,
            permutation=(0, *(1 + i for i in self.permutation)),
            shape=(self.x.shape[0], *self.shape),
        )

    def map_scale(self, fun: Callable[[jax.Array], jax.Array]) -> Gradient:
        return dataclasses.replace(self, g=fun(self.g))

    def unscaled(self) -> list[jax.Array]:
        return [self.x]

    def transpose(self, permutation: Shape) -> Gradient:
        order = lambda values: tuple(values[i] for i in permutation)
        return dataclasses.replace(
            self, permutation=order(self.permutation), shape=order(self.shape)
        )

    def merge(self, other: Gradient) -> Gradient | None:
        if not isinstance(other, Convolution):
            return None
        one, two = self._flat(), other._flat()
        shapes = lambda grad: (grad.x.shape[-self._axes - 1 :], grad.g.shape[-1])
        spec = lambda grad: (grad.window, grad.num_stacked, grad.permutation)
        if spec(one) != spec(two) or shapes(one) != shapes(two):
            return None
        join = lambda x, y: jnp.concatenate([x, y], axis=self.num_stacked)
        return dataclasses.replace(one, x=join(one.x, two.x), g=join(one.g, two.g))

    def _flat(self) -> "Convolution":
        """Flattens the summed leading axes to one."""

        def flat(x):
            trailing = x.shape[-self._axes - 1 :]
            return x.reshape(*x.shape[: self.num_stacked], -1, *trailing)

        return dataclasses.replace(self, x=flat(self.x), g=flat(self.g))


def conv_general_dilated(lhs: jax.Array, rhs: jax.Array, params) -> Gradient | None:
    """Matches the `lax.conv_general_dilated` that gives the gradient of a kernel.

    Its batch is the kernel's input channels, its features are the examples that are
    convolved together, and its output positions are the kernel's taps.
    """
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    if params["feature_group_count"] != 1:
        return None
    batch, feature, *positions = lhs_spec
    output, input_, *kernel = rhs_spec
    # To (summed, *positions, channels).
    x = jnp.transpose(lhs, (feature, *positions, batch))
    g = jnp.transpose(rhs, (input_, *kernel, output))
    groups = params["batch_group_count"]
    window = Window(
        taps=(),
        strides=tuple(params["window_strides"]),
        padding=tuple(params["padding"]),
        input_dilation=tuple(params["lhs_dilation"]),
        dilation=tuple(params["rhs_dilation"]),
        groups=groups,
    )
    # Tap t and output k meet at position t s + k d, so n >= (taps - 1) s + (k - 1) d +
    # 1.
    sizes = window.padded_sizes(x.shape[1:-1]), g.shape[1:-1]
    axes = zip(*sizes, window.dilation, window.strides, strict=True)
    taps = tuple((n - (k - 1) * d - 1) // s + 1 for n, k, d, s in axes)
    window = window._replace(taps=taps)
    is_transposed = set(window.dilation) == {1} != set(window.input_dilation)
    of_kernel = _transposed if groups == 1 and is_transposed else _gradient
    inputs, outputs, *of_taps = out_spec
    order = *of_taps, inputs, outputs  # the axes in the order of `of_kernel`
    permutation = tuple(order.index(i) for i in range(len(order)))
    return view.transposed(of_kernel(x, g, window), permutation)


def _gradient(x: jax.Array, g: jax.Array, window: Window) -> Gradient:
    """Returns the gradient with axes (*taps, input, output)."""
    overlap = any(a > b for a, b in zip(window.taps, window.dilation, strict=True))
    if window.groups == 1 and not overlap and set(window.strides) == {1}:
        return _patches(x, g, window)
    shape = (*window.taps, x.shape[-1] // window.groups, g.shape[-1])
    return Convolution(x, g, window, 0, tuple(range(len(shape))), shape)


def _transposed(x: jax.Array, g: jax.Array, window: Window) -> Gradient:
    """Returns the gradient of a transposed convolution, without zeros between inputs.

    Input i is at position low + i d and meets output k at tap t if that is t s + k. So
    the output gradient takes the role of the padded input, in reverse, and the input
    moves over it.
    """
    padding = []
    sizes = x.shape[1:-1], window.input_dilation, window.padding, g.shape[1:-1]
    axes = zip(window.taps, window.strides, *sizes, strict=True)
    for taps, stride, n, dilation, (low, _), positions in axes:
        span, extent = (taps - 1) * stride, (n - 1) * dilation + 1
        padding.append((span - low, extent - positions + low))
    reverse = window._replace(
        padding=tuple(padding),
        input_dilation=window.dilation,
        dilation=window.input_dilation,
    )
    axes = tuple(range(len(window.taps)))
    swapped = (*axes, len(axes) + 1, len(axes))
    swapped = view.transposed(_gradient(g, x, reverse), swapped)
    return view.reversed_along(swapped, axes)


def _patches(x: jax.Array, g: jax.Array, window: Window) -> product.Product:
    """Returns the gradient with axes (*taps, input, output), for disjoint patches.

    All patches together are then no larger than the input. This covers kernels of one
    tap, and kernels that embed the patches of an image.
    """
    x = window.padded(x)
    spatial = len(window.taps)
    for i in range(spatial):
        taps, positions = window.taps[i], g.shape[1 + i]
        where = np.arange(positions)[:, None] * window.dilation[i] + np.arange(taps)
        x = jnp.take(x, where, axis=1 + 2 * i)
    # Now (summed, position, tap, position, tap, ..., input).
    positions = tuple(range(1, 1 + spatial))
    taps = tuple(range(1 + spatial, 1 + 2 * spatial))
    inputs, outputs = 1 + 2 * spatial, 2 + 2 * spatial
    alternating = [i for pair in zip(positions, taps, strict=True) for i in pair]
    return product.Product(
        x,
        g,
        (0, *alternating, inputs),
        (0, *positions, outputs),
        (*taps, inputs, outputs),
        (*window.taps, x.shape[-1], g.shape[-1]),
    )
