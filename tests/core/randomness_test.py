"""Every draw of a run, traced: no key is used twice, for anything.

The runs have keys of a kind of their own, which tells of each use and leaves the draw
to the default generator: under jit and scan, in the loop that users run.
"""

import collections
import dataclasses
import functools

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import training
from tests import common

USES = []


def tell(use, key, *rest):
    words = tuple(np.asarray(key).tolist())
    USES.append((use, words, *(int(x) for x in rest)))


def default(key):
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def bits(key, bit_width, shape):
    jax.debug.callback(tell, "draw", key)
    return jax.random.bits(default(key), shape, f"uint{bit_width}")


def split(key, shape):
    jax.debug.callback(tell, "split", key)
    return jax.random.key_data(jax.random.split(default(key), shape))


def fold_in(key, data):
    jax.debug.callback(tell, "fold in", key, data)
    return jax.random.key_data(jax.random.fold_in(default(key), data))


def seed(data):
    return jax.random.key_data(jax.random.key(data, impl="threefry2x32"))


TOLD = jax.extend.random.define_prng_impl(
    key_shape=(2,),
    seed=seed,
    split=split,
    random_bits=bits,
    fold_in=fold_in,
    name="told",
    tag="told",
)


def traced(run):
    """What a run does with its keys."""
    USES.clear()
    run()
    jax.effects_barrier()
    return list(USES)


def reuses(uses):
    """The keys that are used more than once, each with its uses.

    A draw and a split of one key may share their words, and so may two splits. Numbers
    that are folded into one key are uses apart if they differ.
    """
    by_key = collections.defaultdict(list)
    for use, key, *folded in uses:
        by_key[key].append((use, *folded))

    def once(found):
        folds = all(use == "fold in" for use, *_ in found)
        return len(set(found)) == len(found) if folds else len(found) == 1

    return {key: found for key, found in by_key.items() if not once(found)}


# All take part: padding consists of equal examples, which have equal keys.
MECHANISM = common.poisson_gaussian(sampling_prob=1 - 1e-9, normalize_by=1)
X = jnp.linspace(-1, 1, 12).reshape(4, 3)
PARAMS = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(())}


def with_dropout(params, x, *, key):
    kept = x * jax.random.bernoulli(key, 0.5, x.shape)
    return (params["w"].astype(float) @ kept + params["b"] - 1) ** 2


def shift(key, x):
    return (x + jax.random.normal(key, x.shape),)


def optimizer_for(mechanism, seed):
    return optax.chain(
        dpadambc.adam_bc(1e-3, mechanism.noise_stddev),
        dpadambc.round_stochastically(key=jax.random.key(seed, impl=TOLD)),
    )


def fit(
    loss_fn=with_dropout,
    mechanism=MECHANISM,
    optimizer=None,
    seed=0,
    steps_per_call=500,
):
    return training.fit(
        training.with_augmentations(loss_fn, shift, 2),
        PARAMS,
        (X,),
        mechanism,
        optimizer or optimizer_for(mechanism, seed),
        key=jax.random.key(seed, impl=TOLD),
        target_delta=1e-5,
        steps_per_call=steps_per_call,
    )


@pytest.mark.parametrize("iterations", [20, common.slow(400), common.thorough(2000)])
def test_no_key_is_used_twice(iterations):
    mechanism = dataclasses.replace(MECHANISM, iterations=iterations)
    uses = traced(lambda: fit(mechanism=mechanism))
    assert not reuses(uses)
    draws = collections.Counter(use for use, *_ in uses)["draw"]
    size = MECHANISM.sample_step(jax.random.key(0), 0, num_examples=4).indices.size
    # The sample, both leaves of noise, one that is rounded; a shift and a mask a view.
    assert draws == iterations * (1 + 1 + 1 + size * 2 * 2)


@pytest.mark.slow
def test_the_trace_is_the_same_however_the_steps_are_compiled():
    together = traced(fit)
    apart = traced(lambda: fit(steps_per_call=1))
    assert sorted(together) == sorted(apart) and len(together) > 20 * 10


@pytest.mark.slow
def test_two_runs_with_one_key_are_seen_to_share_it():
    """Negative control."""
    both = traced(lambda: [fit() for _ in range(2)])
    assert len(reuses(both)) > 20


def test_a_loss_that_draws_twice_with_its_key_is_seen():
    """Negative control."""

    def careless(params, x, *, key):
        return with_dropout(params, x, key=key) + params["b"] * jax.random.normal(key)

    found = reuses(traced(lambda: fit(careless)))
    assert found and all(uses == [("draw",)] * 2 for uses in found.values())


def test_noise_whose_key_stands_still_is_seen(monkeypatch):
    """Negative control."""

    def still(noise_stddev, *, key):
        noise = dpadambc.add_dp_noise(noise_stddev, key=key)

        def update(updates, state, params):
            updates, new = noise.update(updates, state, params)
            return updates, new._replace(key_data=state.key_data)

        return optax.GradientTransformation(noise.init, update)

    monkeypatch.setattr(dpadambc.core.mechanism, "add_dp_noise", still)
    assert reuses(traced(fit))


def test_parts_with_one_key_draw_with_keys_of_their_own():
    """As `optax.multi_transform` may be given them."""
    key = jax.random.key(0, impl=TOLD)
    part = functools.partial(dpadambc.add_dp_noise, 1.0, key=key)
    tx = optax.multi_transform({"a": part(), "b": part()}, {"w": "a", "b": "b"})

    def run():
        state = tx.init(PARAMS)
        each = {name: common.summed(x) for name, x in PARAMS.items()}
        for _ in range(5):
            _, state = tx.update(each, state, PARAMS)

    draws = [key for use, key in (u[:2] for u in traced(run)) if use == "draw"]
    assert len(draws) == 10 and len(set(draws)) == 10
