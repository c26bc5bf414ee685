r"""Gradients of convolution kernels, tap by tap.

A tap s of the kernel sees the input at every output position k, shifted by s. With
:math:`X_s` that slice of the input, positions by input channels, and G the output
gradient, positions by output channels, the gradient of the tap is a product,

.. math:: M_s = X_s^\top G, \qquad
    \lVert M \rVert^2 = \sum_s \lVert X_s^\top G \rVert^2
    = \sum_{k, k'} \Big(\sum_s X_s X_s^\top\Big)_{k k'} (G G^\top)_{k k'}

The slices are views of the input, one at a time: the patches, which are as many times
larger as the kernel has taps, are never formed.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.engine import forms, precision, product, rounding
from dpadambc.engine.interface import (
    Gradient,
    Norm,
    Shape,
    Side,
    pytree,
    squared,
)

# Loops over more taps than this are left to the fallback, which compiles faster.
_MAX_TAPS = 128


class Window(NamedTuple):
    """How taps select slices of the input; one number for each spatial axis."""

    taps: Shape
    strides: Shape  # of taps
    padding: tuple[tuple[int, int], ...]
    input_dilation: Shape
    dilation: Shape  # of output positions
    groups: int

    def padded(self, x: jax.Array) -> jax.Array:
        """An input (*leading, *positions, channels) with its padding and dilation."""
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
    num_stacked: int  # leading axes that lead the kernel too; the others are summed
    permutation: Shape
    shape: Shape

    @property
    def rule(self) -> str:
        return "convolution: " + ("gram" if self._gram_is_cheaper else "taps")

    @property
    def _spatial(self) -> int:
        return len(self.window.taps)

    @property
    def _positions(self) -> int:
        """How many products are summed for each number of the kernel's gradient."""
        return math.prod(self.g.shape[self.num_stacked : -1])

    @property
    def _gram_is_cheaper(self) -> bool:
        count, taps = self._positions, math.prod(self.window.taps)
        inputs, outputs = self.x.shape[-1], self.g.shape[-1]
        gram = count * count * (taps * inputs + outputs)
        return gram < count * taps * inputs * outputs // self.window.groups

    def _grouped(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Axes (stacked * groups, positions, channels of a group)."""
        x = x.astype(dtype or precision.at_least_float32(x.dtype))
        stacked = math.prod(x.shape[: self.num_stacked])
        positions = math.prod(x.shape[self.num_stacked : -1])
        groups = self.window.groups
        channels = x.shape[-1] // groups
        x = x.reshape(stacked, positions, groups, channels)
        x = jnp.swapaxes(x, 1, 2)
        return x.reshape(stacked * groups, positions, channels)

    def _slices(self, dtype: Any = None) -> Iterator[jax.Array]:
        """The input as each tap sees it, grouped."""
        window, leading = self.window, self.x.ndim - self._spatial - 1
        x = window.padded(self.x)
        for starts, limits in self._taps():
            lead, channels = x.shape[:leading], x.shape[-1]
            yield self._grouped(
                jax.lax.slice(
                    x,
                    (*[0] * leading, *starts, 0),
                    (*lead, *limits, channels),
                    (*[1] * leading, *window.dilation, 1),
                ),
                dtype,
            )

    def _taps(self) -> Iterator[tuple[list[int], list[int]]]:
        """Where in the padded input the slice of each tap starts and ends."""
        window = self.window
        counts = self.g.shape[self.g.ndim - self._spatial - 1 : -1]
        for tap in itertools.product(*map(range, window.taps)):
            starts = [i * s for i, s in zip(tap, window.strides, strict=True)]
            ends = zip(starts, counts, window.dilation, strict=True)
            yield starts, [start + (n - 1) * d + 1 for start, n, d in ends]

    def _tap_gradients(self, units: rounding.Units) -> Iterator[jax.Array]:
        """Axes (stacked * groups, input, output channels of a group)."""
        unit = units.of(self.x, self.g)
        g = self._grouped(self.g, unit.dtype)
        for x in self._slices(unit.dtype):
            yield unit.einsum(x, (0, 1, 2), g, (0, 1, 3), (0, 2, 3))

    def sides(self) -> tuple[Side, Side] | None:
        """Patches, which are formed here, and the output gradient."""
        if self.window.groups > 1:
            return None
        at = {axis: i for i, axis in enumerate(self.permutation)}
        first = self.num_stacked
        shared = tuple(at[i] for i in range(first))
        own = tuple(at[i] for i in range(first, len(self.shape) - 1))
        patches = jnp.concatenate(list(self._slices()), axis=-1)
        return (
            Side(patches, shared, own),
            Side(self._grouped(self.g), shared, (at[len(self.shape) - 1],)),
        )

    def dense(self, units: rounding.Units = rounding.DEFAULT) -> jax.Array:
        return self._arranged(jnp.stack(list(self._tap_gradients(units))))

    def _arranged(self, kernel: jax.Array) -> jax.Array:
        """The kernel of axes (tap, stacked * groups, input, output of a group)."""
        stacked = self.x.shape[: self.num_stacked]
        groups, taps = self.window.groups, self.window.taps
        size, inputs, outputs = len(kernel), *kernel.shape[-2:]
        kernel = kernel.reshape(size, math.prod(stacked), groups, inputs, outputs)
        # To (stacked, taps, input, groups, output): groups are a part of the output.
        kernel = kernel.transpose(1, 0, 3, 2, 4)
        kernel = kernel.reshape(*stacked, *taps, inputs, groups * outputs)
        return kernel.transpose(self.permutation)

    def squared_norm(self) -> jax.Array:
        # A tap sees no more than the whole input.
        squares = [math.prod(self.window.taps) * self._squares(self.x)]
        squares.append(self._squares(self.g))
        counts = math.prod(self.window.taps) * self.x.size, self.g.size
        allowance = jnp.sum(precision.rounding_allowance(squares, counts))
        if not self._gram_is_cheaper:
            of_taps = [jnp.sum(x * x) for x in self._tap_gradients(rounding.FULL)]
            return jnp.stack(of_taps).sum() + allowance
        gram = sum(rounding.EXACT.gram(x) for x in self._slices())
        of_g = rounding.EXACT.gram(self._grouped(self.g))
        return jnp.sum(gram * of_g) + allowance

    def _gram_of_patches(self, unit: rounding.Unit) -> jax.Array:
        """Inner products of patches, which are sums of those of input positions.

        The products of all positions are computed once, where they are no more than
        those of all taps.
        """
        window, leading = self.window, self.x.ndim - self._spatial - 1
        x = window.padded(self.x)
        positions, counts = x.shape[leading:-1], self.g.shape[leading:-1]
        taps = math.prod(window.taps)
        if math.prod(positions) ** 2 > taps * math.prod(counts) ** 2:
            return functools.reduce(jnp.add, map(unit.gram, self._slices(unit.dtype)))
        gram = unit.gram(self._grouped(x, unit.dtype))
        summed = gram.shape[1] // max(math.prod(positions), 1)
        gram = gram.reshape(-1, summed, *positions, summed, *positions)
        total = jnp.zeros((), gram.dtype)
        for starts, limits in self._taps():
            total += jax.lax.slice(
                gram,
                (0, 0, *starts, 0, *starts),
                (len(gram), summed, *limits, summed, *limits),
                (1, 1, *window.dilation, 1, *window.dilation),
            )
        return total.reshape(-1, self._positions, self._positions)

    def norm(self, units: rounding.Units) -> Norm:
        unit, taps = units.of(self.x, self.g), math.prod(self.window.taps)
        dtype = unit.dtype
        if self._gram_is_cheaper:
            grams = self._gram_of_patches(unit), unit.gram(self._grouped(self.g, dtype))
            return product.of_grams(unit, grams, (taps * self.x.size, self.g.size), 1)
        # A tap sees no more than the whole input.
        squares = [taps * self._squares(self.x), self._squares(self.g)]
        counts = taps * self.x.size, self.g.size
        allowance = jnp.sum(precision.rounding_allowance(squares, counts))
        of_taps = [jnp.sum(x * x) for x in self._tap_gradients(units)]
        square = jnp.stack(of_taps).sum() + allowance
        return Norm.of_terms(
            square, jnp.linalg.norm(jnp.sqrt(jnp.multiply(*squares))), unit
        )

    def operands(self, units: rounding.Units) -> Gradient:
        unit = units.of(self.x, self.g)
        return dataclasses.replace(self, x=unit.operand(self.x), g=unit.operand(self.g))

    def _squares(self, x: jax.Array) -> jax.Array:
        """The squared norm of what each stacked kernel and group is made of."""
        stacked = math.prod(x.shape[: self.num_stacked])
        groups = self.window.groups
        rows = x.size // max(stacked * x.shape[-1], 1)
        x = squared(x).reshape(stacked, rows, groups, x.shape[-1] // groups)
        return x.sum((1, 3))

    def settled(self) -> Gradient:
        if self.x.size + self.g.size < math.prod(self.shape):
            return self
        formed = jax.lax.platform_dependent(
            self, cpu=Convolution.dense, default=Convolution._dense_at_once
        )
        return forms.Dense(formed, self.shape, "direct")

    def _dense_at_once(self) -> jax.Array:
        """In one product of patches, which are formed.

        For each tap an accelerator would read all of the output gradient, which takes
        longer than to multiply it.
        """
        if math.prod(self.window.taps) * self.x.size > self.x.size + self.g.size:
            return self.dense()
        slices = [jnp.swapaxes(x, 1, 2) for x in self._slices(self.x.dtype)]
        patches = jnp.concatenate(slices, axis=1)  # (stacked * groups, row, position)
        g, unit = self._grouped(self.g, self.g.dtype), rounding.DEFAULT.wide
        kernel = unit.einsum(patches, (0, 1, 2), g, (0, 2, 3), (0, 1, 3))
        return self._arranged(jnp.stack(jnp.split(kernel, len(slices), axis=1)))

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
        shapes = lambda grad: (grad.x.shape[-self._spatial - 1 :], grad.g.shape[-1])
        spec = lambda grad: (grad.window, grad.num_stacked, grad.permutation)
        if spec(one) != spec(two) or shapes(one) != shapes(two):
            return None
        join = lambda x, y: jnp.concatenate([x, y], axis=self.num_stacked)
        return dataclasses.replace(one, x=join(one.x, two.x), g=join(one.g, two.g))

    def _flat(self) -> "Convolution":
        """The same with one summed leading axis."""

        def flat(x):
            trailing = x.shape[-self._spatial - 1 :]
            return x.reshape(*x.shape[: self.num_stacked], -1, *trailing)

        return dataclasses.replace(self, x=flat(self.x), g=flat(self.g))

    def scaled_by(self, x: jax.Array) -> Gradient | None:
        """Where the array varies along the input or along the output axis alone."""
        x, first = self._canonical(x), self.num_stacked
        channels = x.shape[-2:]
        if math.prod(x.shape[first:-2]) > 1 or 1 not in channels:
            return None
        between = [1] * (self.x.ndim - first - 1)
        if channels[0] == 1:
            factor = x.reshape(*x.shape[:first], *between, channels[1])
            return dataclasses.replace(self, g=self.g * factor)
        repeated = jnp.tile(x[..., 0], self.window.groups)
        factor = repeated.reshape(*x.shape[:first], *between, repeated.shape[-1])
        return dataclasses.replace(self, x=self.x * factor)

    def contracted(self, x: jax.Array, axes: Shape) -> jax.Array | None:
        """By a forward pass of x, or the backward pass that gives that of the input."""
        end, stacked = len(self.shape), self.num_stacked
        keep = [at for i, at in enumerate(self.permutation) if i not in axes]
        channels = {at for at in keep if at >= stacked}
        if channels not in (set(), {end - 1}, {end - 2}):
            return None
        kernel, groups = self._canonical(x), self.window.groups
        inputs, outputs = self._flat().x, self._flat().g
        if kernel.shape[-2] == 1:
            inputs = inputs.reshape(*inputs.shape[:-1], groups, -1).sum(-1)
            if channels == {end - 2}:
                return None
        sizes = [*inputs.shape[:stacked], *self.window.taps]
        sizes += [inputs.shape[-1] // groups, outputs.shape[-1]]
        kernel = jnp.broadcast_to(kernel, sizes)
        totals = functools.partial(self._channel_sums, of_inputs=channels == {end - 2})
        for _ in range(stacked):
            totals = jax.vmap(totals)
        total = totals(inputs, outputs, kernel)  # (*stacked, channels)
        at = [i for i in range(stacked) if i not in keep]
        total = total.sum((*at, *([] if channels else [stacked])))
        order = sorted(keep)
        return jnp.transpose(total, [order.index(i) for i in keep])

    def _canonical(self, x: jax.Array) -> jax.Array:
        """An array of the gradient's axes with axes (stacked, *taps, input, output)."""
        places = [self.permutation.index(i) for i in range(len(self.shape))]
        x = x.astype(precision.at_least_float32(x.dtype))
        return jnp.transpose(x, places)

    def _channel_sums(
        self, x: jax.Array, g: jax.Array, kernel: jax.Array, of_inputs: bool
    ) -> jax.Array:
        """Sums over positions and examples of g times a convolution, or of x."""
        window, wide = self.window, precision.at_least_float32(self.g.dtype)
        axes = "".join(chr(ord("a") + i) for i in range(self._spatial))
        x, g = x.astype(wide), g.astype(wide)

        def forward(x):
            y = jax.lax.conv_general_dilated(
                x,
                kernel.astype(wide),
                window_strides=window.dilation,
                padding=window.padding,
                lhs_dilation=window.input_dilation,
                rhs_dilation=window.strides,
                dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
                feature_group_count=window.groups,
                precision=jax.lax.Precision.HIGHEST,
            )
            return y[tuple(slice(n) for n in g.shape)]

        summed = tuple(range(x.ndim - 1))
        if not of_inputs:
            return (forward(x) * g).sum(summed)
        (back,) = jax.vjp(forward, x)[1](g)
        total = (back * x).sum(summed)
        return total.reshape(window.groups, -1).sum(0)

    def squared_norm_of_terms(self) -> jax.Array:
        squares = self._squares(self.x) * self._squares(self.g)
        return math.prod(self.window.taps) * jnp.sum(squares)


def conv_general_dilated(lhs: jax.Array, rhs: jax.Array, params) -> Gradient | None:
    """`lax.conv_general_dilated` that gives the gradient of a kernel.

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
        taps=_taps(x.shape[1:-1], g.shape[1:-1], params),
        strides=tuple(params["window_strides"]),
        padding=tuple(params["padding"]),
        input_dilation=tuple(params["lhs_dilation"]),
        dilation=tuple(params["rhs_dilation"]),
        groups=groups,
    )
    overlap = any(a > b for a, b in zip(window.taps, window.dilation, strict=True))
    if groups == 1 and not overlap and set(window.strides) == {1}:
        return _patches(x, g, window).transpose(_kernel_axes(out_spec))
    if math.prod(window.taps) > _MAX_TAPS:
        return None
    canonical = (*window.taps, x.shape[-1] // groups, g.shape[-1])
    permutation = _kernel_axes(out_spec)
    shape = tuple(canonical[i] for i in permutation)
    return Convolution(x, g, window, 0, permutation, shape)


def _kernel_axes(out_spec: Shape) -> Shape:
    """The axes of the output, in terms of (*taps, input, output)."""
    inputs, outputs, *taps = out_spec
    order = (*taps, inputs, outputs)
    return tuple(order.index(i) for i in range(len(order)))


def _patches(x: jax.Array, g: jax.Array, window: Window) -> product.Product:
    """The gradient with axes (*taps, input, output), where no two patches overlap.

    The patches are then no more than the input: of kernels of one tap, or those that
    embed the patches of an image.
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


def _taps(inputs: Shape, outputs: Shape, params) -> Shape:
    sizes = []
    for n, k, stride, (low, high), spread, dilation in zip(
        inputs,
        outputs,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    ):
        padded = (n - 1) * spread + 1 + low + high
        sizes.append((padded - (k - 1) * dilation - 1) // stride + 1)
    return tuple(sizes)
