"""A run draws batches of its own: what tells it from others is in their key."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import training
from dpadambc.core import identity
from dpadambc.core import step as core_step
from dpadambc.core.mesh import Layout
from tests import common

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
DATA = X, X @ np.array([1.0, -2.0, 0.5], np.float32)
MECHANISM = common.poisson_gaussian(iterations=6)
OTHER = common.poisson_gaussian(iterations=6, l2_clip_norm=0.5)


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def with_frozen(w, frozen, x, y):
    return loss_fn(w * frozen, x, y)


def init(mechanism):
    step = training.Step(loss_fn, mechanism, optax.sgd(0.1))
    return step.init(jnp.zeros(3), key=KEY)


class Rows:
    """A source."""

    def __init__(self, first=X[0]):
        self.first = first

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return (X[index] if index else self.first), DATA[1][index]


def run(*, key=KEY, mechanism=MECHANISM, rate=0.1, **options):
    """A result, and who took part in each of its steps."""
    drawn, params = [], [options.pop("params", jnp.zeros(3))]

    def callback(progress):
        after = progress.state
        before = dataclasses.replace(after, step=after.step - 1, params=params[-1])
        batch = training.draw_batch(mechanism, before, num_examples=200)
        drawn.append(np.asarray(batch.indices))
        params.append(after.params)

    result = training.fit(
        options.pop("loss_fn", loss_fn),
        params[0],
        options.pop("data", DATA),
        mechanism,
        options.pop("optimizer", None) or dpadambc.adam_bc(rate, mechanism),
        key=key,
        target_delta=1e-5,
        callbacks=callback,
        **options,
    )
    return result, np.stack(drawn)


@functools.cache
def batches():
    return run()[1]


FROZEN = {"loss_fn": with_frozen, "frozen": jnp.ones(3)}
APART = {
    "data": ({}, {"data": (X, DATA[1] + 1)}),
    "one number": ({}, {"data": (X, np.r_[DATA[1][:-1], np.float32(7)])}),
    "start": ({}, {"params": jnp.ones(3)}),
    "rate": ({}, {"rate": 0.2}),
    "mechanism": ({}, {"mechanism": OTHER}),
    "loss": ({}, {"loss_fn": lambda w, x, y: jnp.abs(w @ x - y)}),
    "earlier runs": ({}, {"spent": [MECHANISM]}),
    "key": ({}, {"key": jax.random.key(1)}),
    "frozen": (FROZEN, FROZEN | {"frozen": 2 * jnp.ones(3)}),
    "first moment": (
        {"optimizer": optax.adagrad(0.1, 0.1)},
        {"optimizer": optax.adagrad(0.1, 0.2)},
    ),
    "source": ({"data": Rows()}, {"data": Rows(X[1])}),
    "microbatches": ({}, {"microbatch_size": 7}),
}


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("one", "other"),
    [
        row if name in ("data", "microbatches", "mechanism") else common.slow(*row)
        for name, row in APART.items()
    ],
    ids=APART,
)
def test_runs_that_differ_draw_batches_of_their_own(one, other):
    """Eight runs on the same batches have 10.3, and not the 4.8 of a composition."""
    first = run(**one)[1] if one else batches()
    second = run(**other)[1]
    assert all((first[i] != second[i]).any() for i in range(6))
    # A quarter of 200 are in each, and a sixteenth in both by chance.
    pairs = zip(first, second, strict=True)
    both = [len(np.intersect1d(a[a >= 0], b[b >= 0])) for a, b in pairs]
    assert sum(both) < 6 * 25  # 12.5 in each of six steps


def test_the_same_run_draws_the_same_again():
    again = {"data": tuple(map(jnp.asarray, DATA)), "params": np.zeros(3, np.float32)}
    same = common.poisson_gaussian(iterations=6)
    first, second = run(), run(mechanism=same, **again)
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(first[0].state.params, second[0].state.params)


def test_earlier_runs_are_known_by_their_numbers_and_not_by_their_names():
    first, same = run()[0], run()[0]
    assert first.spent != same.spent
    drawn = [run(spent=spent)[1] for spent in (first, same, [MECHANISM])]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


def test_a_longer_run_begins_with_the_same_batches():
    longer = common.poisson_gaussian(iterations=9)
    np.testing.assert_array_equal(run(mechanism=longer)[1][:6], batches())


@pytest.mark.guarantee
def test_these_are_the_batches_that_are_summed():
    """Where the gradient is who took part."""
    silent = common.poisson_gaussian(noise_multiplier=0.0, iterations=1)
    result, drawn = run(
        loss_fn=lambda w, x: w @ x,
        params=jnp.zeros(200),
        data=(jnp.eye(200),),
        mechanism=silent,
    )
    (moved,) = np.nonzero(np.asarray(result.state.params))
    np.testing.assert_array_equal(moved, np.sort(drawn[drawn >= 0]))


@pytest.mark.guarantee
def test_runs_of_one_key_draw_other_batches_from_where_they_differ_on():
    """As after another rounding, where the noise is another too."""
    start = init(MECHANISM)
    moved = dataclasses.replace(start, params=start.params.at[0].add(1e-7))
    draw = lambda state: training.draw_batch(MECHANISM, state, num_examples=200)
    assert (draw(start).indices == draw(start).indices).all()
    assert (draw(start).indices != draw(moved).indices).any()
    # Where the batches of an epoch are dealt, all follow from one key.
    dealt = dpadambc.RandomAllocationGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batches_per_epoch=4,
        iterations=4,
        normalize_by=50,
    )
    state = init(dealt)
    parts = [
        training.draw_batch(
            dealt,
            dataclasses.replace(state, step=jnp.int32(i), params=jnp.ones(3) * i),
            num_examples=200,
        ).indices
        for i in range(4)
    ]
    everyone = np.concatenate(parts)
    np.testing.assert_array_equal(np.sort(everyone[everyone >= 0]), np.arange(200))


def layout_of(number):
    mesh = jax.make_mesh((number,), ("data",), (AxisType.Auto,))
    return Layout(mesh, ("data",), (P(),), (P(),))


ROUNDS_OTHERWISE = {
    "microbatches": {"microbatch_size": 8},
    "other microbatches": {"microbatch_size": 16},
    "padding": {"skip_padding": True},
    "precision": {"precision": jax.lax.Precision.HIGHEST},
    "devices": {"layout": layout_of(2)},
    "more devices": {"layout": layout_of(4)},
    "shards": {"layout": layout_of(4)._replace(params=(P("data"),))},
}


@pytest.mark.guarantee
def test_steps_that_round_otherwise_draw_batches_of_their_own():
    """Noise is another where a sum is, and would average out on one batch."""

    def words(**options):
        step = training.Step(loss_fn, MECHANISM, optax.sgd(0.1), **options)
        state = step.init(jnp.zeros(3), key=KEY)
        sampling, loss = map(jax.random.key_data, (state.sampling_key, state.loss_key))
        return [tuple(x.tolist()) for x in (sampling, state.noise.key_data, loss)]

    found = {name: words(**options) for name, options in ROUNDS_OTHERWISE.items()}
    plain = words()
    assert len({sampling for sampling, *_ in [plain, *found.values()]}) == 8
    # The noise and the loss keep their keys, and equal steps have equal ones.
    assert all(rest == plain[1:] for _, *rest in found.values())
    for name, options in ROUNDS_OTHERWISE.items():
        assert words(**dict(options)) == found[name]
    # Near miss: other devices of the same number round alike.
    devices = np.array(jax.devices()[2:4])
    elsewhere = layout_of(2)._replace(mesh=layout_of(2).mesh.update(devices=devices))
    assert words(layout=elsewhere) == found["devices"]


@pytest.mark.guarantee
def test_platforms_draw_batches_of_their_own(monkeypatch):
    monkeypatch.setattr(core_step, "folded_in", lambda key, words: words[-1])
    step = training.Step(loss_fn, MECHANISM, optax.sgd(0.1))
    platform = jax.jit(lambda: step.init(jnp.zeros(3), key=KEY).sampling_key).trace()
    lowered = lambda name: platform.lower(lowering_platforms=(name,)).as_text()
    texts = {lowered(name).split("func.func")[1] for name in ("cpu", "cuda", "tpu")}
    assert len(texts) == 3 and lowered("cpu") == lowered("cpu")


@pytest.mark.guarantee
def test_batches_for_another_mechanism_are_refused():
    state = init(MECHANISM)
    other = dataclasses.replace(MECHANISM, sampling_prob=0.9)
    with pytest.raises(TypeError, match="state"):
        training.draw_batch(other, state, num_examples=200)
    training.draw_batch(dataclasses.replace(MECHANISM), state, num_examples=200)


def test_a_digest_has_64_bits_and_no_number_of_steps():
    one = {"mechanism": "x", "iterations": 3, "data": "y"}
    digest = identity.digest(one)
    assert digest.shape == (2,) and digest.dtype == np.uint32
    np.testing.assert_array_equal(digest, identity.digest(one | {"iterations": 4}))
    assert (digest != identity.digest(one | {"data": "z"})).any()


def difference_of(first, second):
    """Two of sixty values, named b to z and then ba to bz and so on when printed."""

    def program(x):
        values = [x]
        for _ in range(60):
            values.append(jnp.sin(values[-1]))
        return values[1 + first] - values[1 + second]

    return jax.make_jaxpr(program)(1.0)


def test_the_order_of_operands_is_part_of_a_program():
    """Where a space is all that parts their names: `sub b bb` and `sub bb b`."""
    one, other = difference_of(0, 26), difference_of(26, 0)
    # The control: without spaces, the two are one text.
    assert len({"".join(str(program).split()) for program in (one, other)}) == 1
    assert identity.of_program(one) != identity.of_program(other)
    assert identity.of_program(one) == identity.of_program(difference_of(0, 26))


# Threads.


@pytest.mark.parametrize(
    "is_compiled", [False, common.slow(True)], ids=["new", "compiled"]
)
def test_runs_in_threads_are_the_runs_alone(is_compiled):
    kinds = [{}, {"key": jax.random.key(1)}, {"mechanism": OTHER}, {"params": X[0]}]

    def loss(w, x, y):
        return loss_fn(w, x, y)

    go = lambda options: run(loss_fn=loss, **options)
    alone = [go(options) for options in kinds] if is_compiled else []
    found, barrier = [None] * len(kinds), threading.Barrier(len(kinds))

    def target(i):
        barrier.wait()
        found[i] = go(kinds[i])

    threads = [threading.Thread(target=target, args=(i,)) for i in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = alone or [go(options) for options in kinds]
    for together, by_itself in zip(found, alone, strict=True):
        assert together is not None
        np.testing.assert_array_equal(together[1], by_itself[1])
        params = [result.state.params for result, _ in (together, by_itself)]
        np.testing.assert_array_equal(*params)
        assert together[0].epsilon == by_itself[0].epsilon
