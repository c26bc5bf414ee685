"""No example adds more than C to the clipped sum, whatever the form of its gradient.

A search, form by form, for factors whose contribution is longer. Many examples are
tried at once, each alone in its sum, and the longest are changed a little and tried
again. It looks at the contribution as the library rounds it, and at the gradient of the
same factors times the same weight in double precision.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc import clipping
from dpadambc.core import clip
from dpadambc.engine import forms, precision, rounding, weighted
from dpadambc.engine.convolution import Convolution, Window
from dpadambc.engine.forms import Block, Dense
from dpadambc.engine.lookup import Lookup
from dpadambc.engine.product import Product
from tests.engine.rounding_test import UNITS, Emulated

TRUNCATES = "tf32, one side truncated"
BOUND = 1 + 1e-6  # of C = 1: a weight, and a term times it, are rounded


class AsLongAsAllowed(clipping.ClipRule):
    """Weights that the clip limits to C over the norm."""

    def weight(self, norm, l2_clip_norm):
        return jnp.full_like(norm, jnp.inf)


def kernel(a, g):
    """Rows of activations and of output gradients."""
    shape = (a.shape[-1], g.shape[-1])
    return [Product(a, g, (0, 1), (0, 2), (1, 2), shape)]


def of_steps(a, g):
    """The same kernel at every step of a scan."""
    split = lambda x: x.reshape(4, -1, x.shape[-1])
    (each,) = kernel(*map(split, (a, g)))
    return [dataclasses.replace(each, shape=(a.shape[-1], g.shape[-1])).summed()]


def outer(a, g):
    """A kernel that one row meets, which is the sum of all."""
    return [Product(a[0], g[0], (0,), (1,), (0, 1), (a.shape[1], g.shape[1]))]


def heads(a, g):
    """Two kernels, stacked: the columns of each are its own."""
    a, g = (x.reshape(x.shape[0], 2, -1) for x in (a, g))
    shape = (2, a.shape[-1], g.shape[-1])
    return [Product(a, g, (0, 1, 2), (0, 1, 3), (1, 2, 3), shape)]


def boxes(a, g):
    """Two slices of one kernel, each used with half of the rows."""
    half, width = len(a) // 2, g.shape[1]
    shape = (a.shape[1], 2 * width)
    (left,), (right,) = kernel(a[:half], g[:half]), kernel(a[half:], g[half:])
    return [forms.add(Block(left, (0, 0), shape), Block(right, (0, width), shape))]


def several(a, g):
    """Parameters of all kinds."""
    return [*kernel(a, g), *outer(a, g), *formed(a, g), *lookup(a, g)]


def formed(a, g):
    """Two parameters, whose gradients are the numbers themselves."""
    return [Dense(x, x.shape, "direct") for x in (a, g)]


def ids_of(a):
    """Of eight rows of a table, some of them repeated, from the signs of a."""
    return jnp.sum(jnp.where(a[:, :3] > 0, jnp.array([[1, 2, 4]]), 0), axis=1)


def lookup(a, g):
    return [Lookup(ids_of(a), g, 0, 0, (8, g.shape[1]))]


def tied(a, g):
    """A table whose first rows are looked up, and which is an output head."""
    half = len(a) // 2
    (table,) = lookup(a[:half], g[:half])
    (head,) = kernel(a[half:, :8], g[half:])
    return [forms.add(table, head)]


def convolved(a, g, size, groups=1):
    """Rows as positions of an image, which goes on around its edges: 3 x 3 taps."""
    window = Window((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), groups)
    around = [(0, 0), (1, 1), (1, 1), (0, 0)]
    shape = (3, 3, a.shape[1] // groups, g.shape[1])
    image = lambda x: x.reshape(-1, size, size, x.shape[-1])
    x = jnp.pad(image(a), around, mode="wrap")
    return [Convolution(x, image(g), window, 0, (0, 1, 2, 3), shape)]


# What has the gradients of one example, from factors of these numbers of rows and of
# columns, and the dtype of the factors.
FORMS: dict[str, tuple[Callable, tuple[int, int, int], type]] = {
    "kernel": (kernel, (16, 48, 56), np.float32),
    "kernel, wide": (kernel, (2, 512, 64), np.float32),
    "kernel, long": (kernel, (512, 12, 16), np.float32),
    "kernel, bfloat16": (kernel, (16, 48, 56), jnp.bfloat16),
    "kernel, float16": (kernel, (16, 48, 56), np.float16),
    "steps": (of_steps, (16, 48, 56), np.float32),
    "outer": (outer, (1, 96, 64), np.float32),
    "heads": (heads, (8, 64, 64), np.float32),
    "boxes": (boxes, (16, 64, 32), np.float32),
    "formed": (formed, (16, 48, 56), np.float32),
    "lookup": (lookup, (16, 3, 64), np.float32),
    "lookup, longer than wide": (lookup, (256, 3, 16), np.float32),
    "tied": (tied, (32, 8, 128), np.float32),
    "convolution of patches": (
        functools.partial(convolved, size=2),
        (4, 32, 48),
        np.float32,
    ),
    "convolution of positions": (
        functools.partial(convolved, size=4),
        (16, 32, 48),
        np.float32,
    ),
    "convolution of groups": (
        functools.partial(convolved, size=3, groups=2),
        (9, 32, 48),
        np.float32,
    ),
    "several": (several, (8, 64, 32), np.float32),
}


def rows(rng, count, size, width):
    """Rows that are alike but for so much, with entries alike or at random."""
    draw = lambda *probs: rng.choice(len(probs), (count, 1, 1), p=probs)
    constant = np.ones(width) * rng.uniform(1, 2, (count, 1, 1))
    one = np.where(draw(0.3, 0.7), constant, rng.normal(size=(count, 1, width)))
    few_bits = np.ldexp(np.trunc(256 * np.frexp(one)[0]), np.frexp(one)[1] - 8)
    one = np.where(draw(0.8, 0.2), few_bits, one)
    of_all = rng.normal(size=(count, size, width))
    of_row = rng.normal(size=(count, size, 1)) * (rng.random((count, size, 1)) < 0.5)
    differ = np.choose(draw(0.4, 0.4, 0.2), [0 * of_row, of_row, of_all])
    near = 10.0 ** -rng.uniform(2, 7, size=(count, 1, 1))
    alike = one * (1 + np.where(rng.random(near.shape) < 0.5, 1e-3, near) * differ)
    return np.where(draw(0.85, 0.15), of_all, alike)


def factors(rng, count, shape, dtype):
    """Factors that cancel, are alike, alternate in sign or are dominated by one row."""
    size, inputs, outputs = shape
    a, g = rows(rng, count, size, inputs), rows(rng, count, size, outputs)
    at = np.arange(size)
    signs = [at < size, at % 2, at < size // 2]
    g *= np.where(np.stack(signs), 1, -1)[rng.integers(3, size=count)][..., None]
    lower = rng.choice([0, 1, 3, 5], size=(count, 1, 1), p=[0.85, 0.05, 0.05, 0.05])
    a[:, 1:] *= 10.0**-lower
    used = np.minimum(size, 2 ** rng.integers(10, size=(count, 1, 1)))
    a *= at[:, None] < np.where(rng.random(used.shape) < 0.5, size, used)
    digits = 3 if dtype == np.float16 else 8
    scale = lambda: 10.0 ** rng.integers(-digits, digits + 1, size=(count, 1, 1))
    return a * scale(), g * scale()


def changed(rng, x):
    """Some rows or entries times a little more or less than one."""
    count, size, width = x.shape
    shape = (count, size, rng.choice([1, width]))
    some = rng.random(shape) < rng.choice([0.1, 0.5])
    step = 2.0 ** -rng.integers(2, 24, size=(count, 1, 1))
    return x * (1 + some * step * rng.normal(size=shape))


class Search:
    """Contributions of examples whose gradients have one form.

    Args:
      form: the gradients of one example, from its factors.
      shape: the numbers of rows and of columns of both factors.
      dtype: of the factors.
      units: that multiply.
    """

    def __init__(self, form, shape, dtype, units=rounding.FULL):
        self.form, self.shape, self.dtype, self.units = form, shape, dtype, units
        self.contributions = jax.jit(jax.vmap(self._contribution))
        self.true_norms = jax.jit(jax.vmap(self._true_norm))

    def _contribution(self, a, g):
        grads = jax.tree.map(lambda x: x[None], self.form(a, g))
        squares = weighted.squared_norms(self.units, grads)
        none, size = (
            jnp.zeros(1, bool),
            sum(math.prod(x.shape) for x in self.form(a, g)),
        )
        weights = clip._clip_weights(squares, 1.0, none, AsLongAsAllowed(), size)
        return weights, weighted.sums(self.units, grads, weights, jnp.array(True))

    def _true_norm(self, a, g):
        dense = [grad.dense(rounding.FULL) for grad in self.form(a, g)]
        return jnp.sqrt(sum(jnp.sum(x * x) for x in dense))

    def lengths(self, a, g):
        """The longer of a contribution as rounded and in double precision."""
        info = jnp.finfo(self.dtype)
        a, g = (np.clip(x, -0.9 * info.max, 0.9 * info.max) for x in (a, g))
        # Numbers below the least normal one are zero to XLA.
        a, g = (np.where(abs(x) < info.tiny, 0, x).astype(self.dtype) for x in (a, g))
        weights, sums = self.contributions(a, g)
        sums = [np.asarray(x, np.float64).reshape(len(a), -1) for x in sums]
        rounded = np.linalg.norm(np.concatenate(sums, axis=1), axis=1)
        if self.units is not rounding.FULL:
            return rounded
        with jax.enable_x64(True):
            true = self.true_norms(a.astype(np.float64), g.astype(np.float64))
        return np.fmax(
            rounded, np.asarray(weights, np.float64)[:, 0] * np.asarray(true)
        )

    def longest(self, rounds, seed=0, numbers=2**21):
        """The longest that was found by climbing from each of a number of draws."""
        size, inputs, outputs = self.shape
        count = np.clip(numbers // (size * size + inputs * outputs), 16, 512)
        rng = np.random.default_rng(seed)
        batch = factors(rng, count, self.shape, self.dtype)
        found = self.lengths(*batch)
        for _ in range(rounds):
            children = [changed(rng, x) for x in batch]
            of_children = self.lengths(*children)
            better = of_children > found
            for x, y in zip(batch, children, strict=True):
                x[better] = y[better]
            found = np.fmax(found, of_children)
        return found.max()


@pytest.mark.parametrize("name", FORMS)
def test_a_search_finds_no_contribution_above_the_clip_norm(name):
    assert 0.99 < Search(*FORMS[name]).longest(rounds=4) <= BOUND


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMS)
def test_a_long_search_finds_none_either(name, seed):
    assert Search(*FORMS[name]).longest(100, seed + 1, numbers=2**23) <= BOUND


def of_two_products(length, dtype):
    """As if every sum had two terms, whatever its length."""
    del length
    return float(jnp.finfo(dtype).eps)


ERRORS = {"none": lambda *_: 0.0, "two terms": of_two_products}


@pytest.mark.parametrize(
    ("name", "allowance"),
    [
        ("kernel, wide", "two terms"),
        ("kernel, wide", "none"),
        ("lookup", "none"),
        ("tied", "none"),
        ("convolution of positions", "none"),
    ],
)
def test_the_search_catches_a_norm_without_its_allowance(name, allowance, monkeypatch):
    monkeypatch.setattr(precision, "rounding_error", ERRORS[allowance])
    assert Search(*FORMS[name]).longest(rounds=4) > 1.01


ROUNDED = ("heads", "boxes", "tied", "steps", "convolution of patches", "several")


@pytest.mark.parametrize(
    ("name", "units"),
    [("kernel", units) for units in UNITS] + [(name, TRUNCATES) for name in ROUNDED],
)
def test_no_contribution_is_longer_where_products_round(name, units):
    assert 0.9 < Search(*FORMS[name], UNITS[units]).longest(rounds=4) <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", FORMS)
def test_none_is_longer_of_any_form_and_any_unit(name, units):
    assert Search(*FORMS[name], UNITS[units]).longest(rounds=40) <= 1


@pytest.mark.parametrize(
    "name", ["kernel", "heads", "boxes", "tied", "steps", "convolution of patches"]
)
def test_every_form_is_caught_if_it_trusts_its_products(name):
    """And those of few digits, so that a few draws are enough."""
    coarse = Emulated(None, jnp.float32, bits=4)
    found = Search(*FORMS[name], rounding.Units(coarse, coarse)).longest(rounds=1)
    assert found > 1.001


@pytest.mark.parametrize("units", ["tf32 to nearest", TRUNCATES, "bf16"])
def test_a_clip_that_takes_products_for_exact_is_caught(units):
    unit = dataclasses.replace(UNITS[units].wide, in_norm=0.0, in_sum=0.0)
    search = Search(*FORMS["kernel"], rounding.Units(unit, unit))
    assert search.longest(rounds=4) > 1 + 1e-4
