"""The clip on devices whose products round: see `engine.rounding`."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib, graphs, training
from dpadambc.engine import product as factored
from dpadambc.engine import rounding
from tests import common

C = 1.0
KEY = jax.random.key(0)


def nearest(x, bits):
    return jax.lax.reduce_precision(x, 8, bits - 1)


def truncated(x, bits):
    """Cut to so many significant bits, as the hardware may do."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = words & jnp.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(kept, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Emulated(rounding.Unit):
    """A unit whose operands are rounded by functions, then multiplied in full."""

    left: object = nearest
    right: object = nearest
    bits: int = 11

    def einsum(self, a, a_axes, b, b_axes, out_axes):
        wide = [x.astype(jnp.float32) for x in (a, b)]
        a, b = (
            rounded(x, self.bits)
            for rounded, x in zip((self.left, self.right), wide, strict=True)
        )
        return rounding.EXACT.einsum(a, a_axes, b, b_axes, out_axes)


@dataclasses.dataclass(frozen=True)
class ThreePasses(rounding.Unit):
    """High times high, high times low and low times high parts, which are cut."""

    bits: int = 8

    def einsum(self, a, a_axes, b, b_axes, out_axes):
        high_a, high_b = (truncated(x, self.bits) for x in (a, b))
        low_a, low_b = (
            truncated(x - high, self.bits) for x, high in ((a, high_a), (b, high_b))
        )
        passes = (high_a, low_b), (low_a, high_b), (high_a, high_b)
        return sum(
            rounding.EXACT.einsum(x, a_axes, y, b_axes, out_axes) for x, y in passes
        )


def emulated(unit, kind: type[rounding.Unit] = Emulated, **rounded):
    fields = {f.name: getattr(unit, f.name) for f in dataclasses.fields(unit)}
    unit = kind(**fields, **rounded)
    return rounding.Units(unit, unit)


TF32, BF16 = rounding.CUDA.wide, rounding.CUDA.narrow
UNITS = {
    "tf32 to nearest": emulated(TF32),
    "tf32 truncated": emulated(TF32, left=truncated, right=truncated),
    "tf32, one side truncated": emulated(TF32, left=truncated),
    "bf16": emulated(BF16, bits=8),
    "three of bf16": emulated(rounding._THREE_OF_BF16, ThreePasses),
    "three of tf32": emulated(rounding._THREE_OF_TF32, ThreePasses, bits=11),
}


@pytest.fixture
def use(monkeypatch):
    """Lets the clip multiply by some units, whatever the device."""

    def use(units):
        run = lambda fun, _, *operands: fun(units, *operands)
        monkeypatch.setattr(rounding, "on_device", run)

    return use


def norms(loss_fn, params, *batch, c=C):
    """The norm of what each example adds on its own, in double precision."""
    clipped = dpadambc.clipped_grad(loss_fn, l2_clip_norm=c, normalize_by=1)

    def alone(*example):
        sums = clipped(params, *jax.tree.map(lambda x: x[None], example))
        return dpadambc.materialize(sums)

    sums = jax.tree.leaves(jax.jit(jax.vmap(alone))(*batch))
    squares = (np.square(np.asarray(x, np.float64)) for x in sums)
    return np.sqrt(sum(x.reshape(len(x), -1).sum(1) for x in squares))


def product(params, a, g):
    """Its gradient is the product of two arrays of the example."""
    return jnp.einsum("ti,ij,tj->", a, params, g)


def kernel(shape):
    """Parameters so large that no gradient is formed."""
    return jnp.zeros(shape)


@functools.cache
def products(count, rows, inputs, outputs, seed, family):
    """Pairs of factors whose terms cancel, are dominated by one, or are all alike."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(count, rows, inputs))
    g = rng.normal(size=(count, rows, outputs))
    if family == "cancel" and rows > 1:
        half = rows // 2
        a[:, half : 2 * half] = a[:, :half] * (
            1 + rng.normal(size=a[:, :half].shape) * 2e-3
        )
        g[:, half : 2 * half] = -g[:, :half]
    elif family == "low parts" and rows > 1:  # all else cancels
        half = rows // 2
        a, g = (truncated(jnp.asarray(x, jnp.float32), 8) for x in (a, g))
        low = rng.uniform(size=(count, half, inputs)) * 2.0 ** -rng.integers(
            7, 14, size=(count, 1, 1)
        )
        a = np.array(a, np.float64)
        a[:, half : 2 * half] = a[:, :half] * (1 + low)
        g = np.array(g, np.float64)
        g[:, half : 2 * half] = -g[:, :half]
    elif family == "dominant":
        a[:, 0] *= 1e3
    elif family == "alike":  # every entry is rounded the same way
        a = np.sign(a) * (1 + rng.uniform(size=(count, 1, 1)) * 2.0**-9)
        g = np.sign(g) * (1 + rng.uniform(size=(count, 1, 1)) * 2.0**-9)
    elif family == "one way":
        a, g = (np.ones_like(x) * rng.uniform(1, 2, (count, 1, 1)) for x in (a, g))
    scale = 2.0 ** rng.integers(-30, 30, size=(count, 1, 1))
    return jnp.asarray(a * scale, jnp.float32), jnp.asarray(g, jnp.float32)


FAMILIES = ("any", "cancel", "low parts", "dominant", "alike", "one way")


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("unit", [TF32, BF16])
def test_no_rounding_moves_a_product_further_than_it_says(unit, rows):
    """Signs that add up along the largest singular vectors, and at random."""
    rng = np.random.default_rng(rows)
    units = rounding.Units(*[dataclasses.replace(unit, algorithm=None)] * 2)
    u = 2.0**-10 if unit is TF32 else 2.0**-8
    ratios = []
    for family in FAMILIES:
        a, g = (x[0] for x in products(4, rows, 48, 56, rows, family))
        a, g = (unit.operand(x) for x in (a, g))
        grad = factored.Product(a, g, (0, 1), (0, 2), (1, 2), (48, 56))
        says = float(grad.norm(units).in_sum)
        a, g = (np.asarray(x, np.float64) for x in (a, g))
        (left_a, _, right_a), (left_g, _, right_g) = map(np.linalg.svd, (a, g))
        top_a = np.sign(np.outer(left_g[:, 0], right_a[0]))
        top_g = np.sign(np.outer(left_a[:, 0], right_g[0]))
        random = [np.sign(rng.normal(size=x.shape)) for x in (a, g)]
        for sign_a, sign_g in ((top_a, top_g), random, (np.sign(a), np.sign(g))):
            # The smaller factor alone is scaled, and rounded, in bfloat16.
            of_g = 0 if unit is BF16 else u
            moved_a, moved_g = np.abs(a) * u * sign_a, np.abs(g) * of_g * sign_g
            moved = (a + moved_a).T @ (g + moved_g) - a.T @ g
            assert np.linalg.norm(moved) <= says
            ratios.append(np.linalg.norm(moved) / says)
    assert max(ratios) > 0.3


def convolved(params, x, g):
    out = jax.lax.conv_general_dilated(
        x[None], params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(out[0] * g)


def tied(params, ids, g, a):
    """A table that is looked up and multiplied."""
    return jnp.sum(params[ids] * g) + jnp.einsum("ti,vi,tv->", g, params, a)


def parts_of_one(params, a, g):
    """Two boxes of one kernel."""
    left, right = jnp.split(params, 2, axis=1)
    half = g.shape[1] // 2
    return product(left, a, g[:, :half]) + product(right, a[::-1], g[:, half:])


def heads(params, a, g):
    return jnp.einsum("hti,hij,htj->", a, params, g)


def scanned(params, a, g):
    step = lambda total, each: (total + product(*each), None)
    return jax.lax.scan(step, 0.0, (params, a, g))[0]


def recurrent(params, a, g):
    """One kernel at every step."""
    step = lambda total, each: (total + each[0] @ params @ each[1], None)
    return jax.lax.scan(step, 0.0, (a, g))[0]


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


IDS = jnp.asarray(np.random.default_rng(0).integers(40, size=(64, 6)))
IMAGES = {n: (normal(64, n, n, 32), normal(64, n, n, 48)) for n in (2, 4)}
FORMS = {
    "convolution of patches": (convolved, (3, 3, 32, 48), *IMAGES[2]),
    "convolution of positions": (convolved, (3, 3, 32, 48), *IMAGES[4]),
    "tied head": (tied, (40, 24), IDS, normal(64, 6, 24), normal(64, 6, 40)),
    "boxes": (parts_of_one, (48, 56), normal(64, 6, 48), normal(64, 6, 56)),
    "heads": (heads, (3, 48, 56), normal(64, 3, 6, 48), normal(64, 3, 6, 56)),
    "scan": (scanned, (3, 48, 56), normal(64, 3, 6, 48), normal(64, 3, 6, 56)),
    "recurrent": (recurrent, (48, 56), normal(64, 6, 48), normal(64, 6, 56)),
    "formed": (product, (4, 4), normal(64, 6, 4), normal(64, 6, 4)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_the_sum_is_the_clipped_one_but_for_what_is_rounded(form, units, monkeypatch):
    loss_fn, shape, *batch = form
    params = jnp.zeros(shape)
    clipped = dpadambc.clipped_grad(loss_fn, l2_clip_norm=C, normalize_by=1)
    of_all = lambda: np.asarray(dpadambc.materialize(clipped(params, *batch)))
    exact = of_all()
    run = lambda fun, _, *operands: fun(units, *operands)
    monkeypatch.setattr(rounding, "on_device", run)
    k = units.wide.in_norm + units.wide.in_sum
    assert np.linalg.norm(of_all() - exact) <= 10 * k * np.linalg.norm(exact) + 1e-5
    assert 1 - 12 * k - 1e-5 <= norms(loss_fn, params, *batch).min()
    assert norms(loss_fn, params, *batch).max() <= C


def with_biases(params, x):
    for kernel, bias in params:
        x = jnp.tanh(x @ kernel + bias[None])
    return jnp.sum(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_formed_is_summed_side_by_side(dtype, monkeypatch):
    sizes = (64, 256, 200, 3)
    params = [
        (normal(n, m).astype(dtype) / 8, jnp.zeros(m, dtype))
        for n, m in itertools.pairwise(sizes)
    ]
    x = normal(64, 64)[:, None].repeat(130, 1).astype(dtype)
    x = x.at[3].set(jnp.nan)
    clipped = dpadambc.clipped_grad(with_biases, l2_clip_norm=C, normalize_by=1)
    of_all = lambda: jax.jit(lambda x: dpadambc.materialize(clipped(params, x)))(x)
    exact = of_all()
    run = lambda fun, _, *operands: fun(emulated(BF16, bits=8), *operands)
    monkeypatch.setattr(rounding, "on_device", run)
    found = of_all()
    assert optax.tree.norm(found) > 1
    distance = optax.tree.norm(optax.tree.sub(found, exact))
    assert distance < 0.02 * optax.tree.norm(exact)


@pytest.mark.parametrize("unit", [TF32, BF16])
def test_padding_and_what_is_not_finite_leave_no_trace(unit, use):
    use(emulated(unit, bits=8))
    loss_fn, shape, *batch = FORMS["tied head"]
    params = jnp.zeros(shape)
    grad_fn = dpadambc.clipped_grad(loss_fn, l2_clip_norm=C, normalize_by=1)

    @jax.jit
    def clipped(*batch, padding=None):
        sums = grad_fn(params, *batch, is_padding_example=padding)
        return dpadambc.materialize(sums)

    first = jnp.arange(64) < 3
    expected = clipped(*jax.tree.map(lambda x: x[3:], batch))
    np.testing.assert_allclose(clipped(*batch, padding=first), expected, atol=1e-6)
    for broken in (jnp.nan, jnp.inf, 1e30):
        ids, g, a = batch
        for broken_batch in (
            (ids, g.at[:3].set(broken), a),
            (ids, g, a.at[0].set(broken).at[1:3, 0, 0].set(broken)),
        ):
            for padding in (first, jnp.zeros(64, bool)):
                found = clipped(*broken_batch, padding=padding)
                np.testing.assert_allclose(found, expected, atol=1e-6)
    everything = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), batch[1:])
    assert not clipped(batch[0], *everything, padding=first).any()
    assert not clipped(*batch, padding=jnp.ones(64, bool)).any()


def products_of(fun, *args, platform):
    """How each product of a program is asked for, lowered for a device."""
    lowered = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,))
    found = []
    for line in lowered.as_text().splitlines():
        if "stablehlo.dot_general" in line:
            algorithm = re.search(
                r"lhs_precision_type = (\w+).*?component_count = (\d)", line
            )
            precision = re.search(r"precision = \[(\w+), (\w+)\]", line)
            asked = precision.groups() if precision else ("DEFAULT",)
            found.append(algorithm.groups() if algorithm else asked[0])
    return found


def network(params, x, label):
    """Two kernels that stay factored and one that is formed."""
    hidden = jnp.tanh(x @ params["in"])
    hidden = jnp.tanh(hidden @ params["middle"])
    return jnp.sum((hidden @ params["out"] - label) ** 2)


def network_arguments(dtype):
    params = {
        "in": jnp.zeros((64, 48), dtype),
        "middle": jnp.zeros((48, 48), dtype),
        "out": jnp.zeros((48, 1), dtype),
    }
    return params, jnp.zeros((5, 8, 64), dtype), jnp.zeros((5, 8, 1), dtype)


ASKED = {
    ("cuda", jnp.float32): ("tf32", "1"),
    ("cuda", jnp.bfloat16): ("bf16", "1"),
    ("tpu", jnp.float32): ("bf16", "1"),
    ("tpu", jnp.bfloat16): ("bf16", "1"),
}


@pytest.mark.parametrize(("platform", "dtype"), ASKED)
def test_a_program_asks_for_the_units_in_the_clip_and_nowhere_else(platform, dtype):
    args = network_arguments(dtype)
    clipped = dpadambc.clipped_grad(network, l2_clip_norm=C, normalize_by=1)
    found = products_of(
        lambda *args: dpadambc.materialize(clipped(*args)), *args, platform=platform
    )
    ordinary = products_of(
        jax.grad(lambda *args: network(*args)), *args, platform=platform
    )
    # Two Gram matrices for each kernel, and its sum, which is computed again where some
    # norm is not finite; what is formed is weighted in full.
    assert found.count(ASKED[platform, dtype]) == 2 * (2 + 2)
    assert found.count("HIGHEST") == 1
    # Of the ordinary gradient all but those of two kernels.
    assert found.count("DEFAULT") == len(ordinary) - 2
    assert len(found) == 2 * (2 + 2) + 1 + len(ordinary) - 2


def test_a_processor_multiplies_in_full():
    args = network_arguments(jnp.float32)
    clipped = dpadambc.clipped_grad(network, l2_clip_norm=C, normalize_by=1)
    fun = lambda *args: dpadambc.materialize(clipped(*args))
    found = products_of(fun, *args, platform="cpu")
    assert set(found) == {"HIGHEST", "DEFAULT"}


@pytest.mark.parametrize("choice", rounding.CHOICES)
def test_one_argument_chooses_the_precision(choice):
    args = network_arguments(jnp.float32)
    clipped = dpadambc.clipped_grad(
        network, l2_clip_norm=C, normalize_by=1, precision=choice
    )
    fun = lambda *args: dpadambc.materialize(clipped(*args))
    found = products_of(fun, *args, platform="cuda")
    with jax.default_matmul_precision("highest"):
        clipped = dpadambc.clipped_grad(network, l2_clip_norm=C, normalize_by=1)
        assert set(products_of(fun, *args, platform="cuda")) == {"HIGHEST"}
    if rounding.CHOICES[choice] is rounding.FULL:
        assert set(found) == {"HIGHEST", "DEFAULT"}
    else:
        kind = choice.name.lower().split("_")[0]
        assert any(x[0] == kind for x in found if isinstance(x, tuple))


def test_a_precision_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="precision"):
        dpadambc.clip_per_example(
            1.0, normalize_by=1, precision=jax.lax.DotAlgorithmPreset.F16_F16_F16
        )


POISSON = common.poisson_gaussian(iterations=1, normalize_by=50)
BOUNDED = {"mechanism": POISSON, "learning_rate": 0.1}
MECHANISMS = [
    POISSON,
    contrib.QuantileClipping(**BOUNDED, target_quantile=0.5, fraction_stddev=0.9),
    common.correlated_gaussian(),
    graphs.NodePoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        max_terms=2,
        sampling_prob=0.5,
        iterations=1,
        normalize_by=2,
    ),
]
CHOSEN = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda x: type(x).__name__)
def test_the_argument_reaches_every_product_of_every_mechanism(mechanism, monkeypatch):
    asked, right = [], rounding.on_device

    def on_device(fun, precision, *operands):
        asked.append(precision)
        return right(fun, precision, *operands)

    monkeypatch.setattr(rounding, "on_device", on_device)
    params, x = kernel((12, 12)), jnp.ones((4, 3, 12))
    padding = jnp.zeros(4, bool)
    tx = dpadambc.privatize(mechanism, key=KEY, precision=CHOSEN)
    grads = dpadambc.per_example_grad(product)(params, x, x)
    tx.update(grads, tx.init(params), params, is_padding_example=padding)
    options = dict(microbatch_size=2, precision=CHOSEN)
    step = training.Step(product, mechanism, optax.sgd(0.1), **options)
    step(step.init(params, key=KEY), (x, x), padding)
    assert len(asked) >= 4 and set(asked) == {CHOSEN}


def trained(precision):
    x = jnp.ones((8, 3, 12))
    return training.fit(
        product,
        kernel((12, 12)),
        (x, x),
        POISSON,
        optax.sgd(0.1),
        key=KEY,
        target_delta=1e-3,
        precision=precision,
    )


def test_a_run_that_gives_a_precision_is_another_run():
    """Its clip may be another, so its batches must be, too."""
    keys = [
        jax.random.key_data(trained(precision).state.sampling_key).tolist()
        for precision in (None, CHOSEN, jax.lax.Precision.HIGHEST, None)
    ]
    assert keys[0] == keys[3] and len(set(map(tuple, keys))) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: dpadambc.privatize(POISSON, key=KEY, **options),
        lambda **options: training.Step(product, POISSON, optax.sgd(1.0), **options),
        lambda precision: trained(precision),
    ],
    ids=["privatize", "Step", "fit"],
)
def test_all_that_clips_refuses_a_precision_without_a_bound(call):
    with pytest.raises(ValueError, match="precision"):
        call(precision=jax.lax.DotAlgorithmPreset.F16_F16_F16)
