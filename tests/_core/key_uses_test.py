"""Chains by hand with one key add the same noise: the second is warned of."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import clipping, training, transforms
from dpadambc._core import key_uses
from tests import common

pytestmark = pytest.mark.filterwarnings(
    "error:Expected a key of its own for each run:UserWarning"
)

WARNED = "Expected a key of its own for each run"
KEY = jax.random.key(7)
PARAMS = {"w": jnp.arange(3.0), "b": jnp.zeros(2)}
OTHERS = {"w": jnp.arange(3.0) + 1, "b": jnp.zeros(2)}


def mechanism(**changes):
    return common.poisson_gaussian(
        **{"noise_multiplier": 4.0, "iterations": 4} | changes
    )


MADE = mechanism()
CORRELATED = common.correlated_gaussian()
KINDS = {
    "dp_sgd": lambda key: dpadambc.dp_sgd(0.1, MADE, key=key),
    "dp_adam_bc": lambda key: dpadambc.dp_adam_bc(0.1, MADE, key=key),
    "dp_adamw_bc": lambda key: dpadambc.dp_adamw_bc(0.1, MADE, key=key),
    "privatize": lambda key: dpadambc.privatize(MADE, key=key),
    "moving bound": lambda key: dpadambc.privatize(
        mechanism(clip_rule=clipping.QuantileClipping()), key=key
    ),
    "own chain": lambda key: optax.chain(
        dpadambc.privatize(MADE, key=key), optax.adam(0.1)
    ),
    "noise": lambda key: dpadambc.add_dp_noise(0.1, key=key),
    "levels": lambda key: dpadambc.add_dp_noise({"w": 0.1, "b": 0.2}, key=key),
    "schedule": lambda key: dpadambc.add_dp_noise(
        lambda step: 1.0 / (1 + step), key=key
    ),
    "correlated": lambda key: transforms.add_correlated_noise(
        0.1, (1.0, -0.5), key=key
    ),
    "banded": lambda key: transforms.add_banded_noise(0.1, (1.0, 0.5), key=key),
    "correlated mechanism": lambda key: dpadambc.privatize(CORRELATED, key=key),
    "hyperparameters": lambda key: optax.inject_hyperparams(
        dpadambc.dp_sgd, static_args=("mechanism", "key")
    )(0.1, MADE, key=key),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@pytest.mark.guarantee
@each_kind
def test_one_chain_for_two_models_is_warned_of(make):
    chain = make(KEY)
    chain.init(PARAMS)
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*params: another") as caught:
        chain.init(OTHERS)
    assert len(caught) == 1


@pytest.mark.guarantee
@each_kind
def test_a_key_for_each_model_and_the_same_run_again_are_not(make):
    make(KEY).init(PARAMS)
    make(jax.random.fold_in(KEY, 1)).init(OTHERS)
    # A cell of a notebook that is run again, the shape of a state, other processes.
    make(KEY).init(PARAMS)
    jax.eval_shape(make(KEY).init, OTHERS)
    jax.jit(make(KEY).init)(OTHERS)
    jax.jit(make(KEY).init)({"w": (), "b": ()})
    make(KEY).init(jax.tree.map(np.asarray, PARAMS))


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: dpadambc.dp_adam(0.2, MADE, key=KEY),
            r"step_size: -0\.1 there, -0\.2",
        ),
        (lambda: dpadambc.dp_adam(0.1, MADE, key=KEY, b1=0.5), r"b1: 0\.9 there, 0\.5"),
        (lambda: dpadambc.dp_sgd(0.1, MADE, key=KEY), "b1: 0.9 there, nothing here"),
        (
            lambda: dpadambc.dp_adam(0.1, mechanism(l2_clip_norm=2.0), key=KEY),
            r"l2_clip_norm: 1\.0 there, 2\.0 here",
        ),
        (
            lambda: dpadambc.dp_adam(0.1, mechanism(noise_multiplier=1.0), key=KEY),
            r"noise_multiplier: 4\.0 there, 1\.0 here",
        ),
    ],
    ids=["learning rate", "decay", "optimizer", "clip norm", "noise"],
)
def test_optimizers_compared_with_one_key_are_warned_of(make, said):
    dpadambc.dp_adam(0.1, MADE, key=KEY).init(PARAMS)
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*{said}") as caught:
        make().init(PARAMS)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.guarantee
def test_noise_of_two_levels_with_one_key_is_warned_of():
    dpadambc.add_dp_noise(0.1, key=KEY).init(PARAMS)
    with pytest.warns(UserWarning, match=r"noise_stddev: 0\.1 there, 0\.2 here"):
        dpadambc.add_dp_noise(0.2, key=KEY).init(PARAMS)


def test_why_one_key_for_two_models_breaks_privacy():
    """What is warned of: the difference of two noised gradients has no noise."""
    chain = dpadambc.add_dp_noise(100.0, key=KEY)
    gradients = [{"w": jnp.full(3, x), "b": jnp.zeros(2)} for x in (0.0, 1.0)]
    first, _ = chain.update(gradients[0], chain.init(PARAMS))
    with pytest.warns(UserWarning, match=WARNED):
        second, _ = chain.update(gradients[1], chain.init(OTHERS))
    np.testing.assert_allclose(second["w"] - first["w"], 1.0, atol=1e-4)


def test_no_noise_an_extended_run_and_other_kinds_of_noise_need_no_other_key():
    silent = mechanism(noise_multiplier=0.0)
    for params in (PARAMS, OTHERS):
        dpadambc.dp_sgd(0.1, silent, key=KEY).init(params)
        dpadambc.add_dp_noise(0.0, key=KEY).init(params)
    dpadambc.dp_sgd(0.1, MADE, key=KEY).init(PARAMS)
    dpadambc.dp_sgd(0.1, mechanism(iterations=8), key=KEY).init(PARAMS)
    transforms.add_banded_noise(0.1, (1.0, 0.5), key=KEY).init(PARAMS)
    transforms.add_correlated_noise(0.1, (1.0, 0.5), key=KEY).init(OTHERS)


def test_to_ask_for_moments_begins_nothing():
    chain = dpadambc.dp_adam_bc(0.1, MADE, key=KEY)
    optax.tree.map_params(chain, jnp.zeros_like, chain.init(PARAMS))


def test_parts_of_the_parameters_may_share_a_key():
    of = lambda level: dpadambc.add_dp_noise(level, key=KEY)
    parts = optax.multi_transform({"w": of(0.1), "b": of(0.2)}, {"w": "w", "b": "b"})
    with pytest.warns(UserWarning, match="sees a part"):
        parts.init(PARAMS)


@pytest.mark.guarantee
def test_a_loop_of_steps_is_told_once():
    step = training.Step(lambda w, x: w @ x, MADE, optax.sgd(0.1))
    step.init(jnp.zeros(3), key=KEY)
    with pytest.warns(UserWarning, match=WARNED) as caught:
        step.init(jnp.ones(3), key=KEY)
    assert len(caught) == 1
    training.init_state(jnp.zeros(3), MADE, optax.sgd(0.1), key=KEY)
    with pytest.warns(UserWarning, match=WARNED) as caught:
        training.init_state(jnp.ones(3), MADE, optax.sgd(0.1), key=KEY)
    assert len(caught) == 1


def test_what_one_thread_tells_is_not_left_untold_in_another():
    found = []

    def begins():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for params in (PARAMS, OTHERS):
                dpadambc.add_dp_noise(0.1, key=KEY).init(params)
            found.extend(caught)

    with key_uses.told_by_caller():
        thread = threading.Thread(target=begins)
        thread.start()
        thread.join()
    assert WARNED in str(found[0].message)


@pytest.mark.guarantee
def test_a_chain_of_the_package_and_one_by_hand_with_one_key_are_told():
    """Of one key the noise is the same, whoever asked for it."""
    first = dpadambc.dp_sgd(1.0, MADE, key=KEY)
    second = optax.chain(dpadambc.privatize(MADE, key=KEY), optax.sgd(1.0))
    for one, other in ((first, second), (second, first)):
        key_uses._BEGAN.clear()
        one.init(PARAMS)
        with pytest.warns(UserWarning, match="params: another"):
            other.init(OTHERS)


@pytest.mark.guarantee
def test_a_state_by_hand_and_a_step_with_one_key_are_told():
    step = training.Step(lambda w, x: w @ x, MADE, optax.sgd(0.1))
    step.init(jnp.zeros(3), key=KEY)
    with pytest.warns(UserWarning, match="params: another"):
        training.init_state(jnp.ones(3), MADE, optax.sgd(0.1), key=KEY)
    key_uses._BEGAN.clear()
    training.init_state(jnp.zeros(3), MADE, optax.sgd(0.1), key=KEY)
    step.init(jnp.zeros(3), key=KEY)


def per_group(labels):
    rule = clipping.PerGroup(labels, {"one": 0.6, "two": 0.8})
    return dpadambc.privatize(mechanism(clip_rule=rule), key=KEY)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            lambda: transforms.add_correlated_noise(5.0, (1.0, -0.9), key=KEY),
            lambda: transforms.add_correlated_noise(5.0, (1.0, -0.5), key=KEY),
        ),
        (
            lambda: transforms.add_banded_noise(5.0, (1.0, 0.9), key=KEY),
            lambda: transforms.add_banded_noise(5.0, (1.0, 0.5), key=KEY),
        ),
        (
            lambda: dpadambc.privatize(mechanism(sampling_prob=0.5), key=KEY),
            lambda: dpadambc.privatize(mechanism(sampling_prob=0.1), key=KEY),
        ),
        (
            lambda: dpadambc.privatize(mechanism(normalize_by=4.0), key=KEY),
            lambda: dpadambc.privatize(
                mechanism(l2_clip_norm=0.25, normalize_by=1.0), key=KEY
            ),
        ),
        (
            lambda: dpadambc.privatize(MADE, key=KEY),
            lambda: dpadambc.privatize(
                mechanism(clip_rule=clipping.Automatic()), key=KEY
            ),
        ),
        (
            lambda: per_group({"w": "one", "b": "two"}),
            lambda: per_group({"w": "two", "b": "one"}),
        ),
        (
            lambda: dpadambc.dp2_rmsprop(
                0.1, MADE, key=KEY, interval=2, preconditioned_clip_norm=1.0
            ),
            lambda: dpadambc.dp2_rmsprop(
                0.2, MADE, key=KEY, interval=2, preconditioned_clip_norm=1.0
            ),
        ),
    ],
    ids=[
        "coefficients",
        "bands",
        "sampling",
        "clip and divisor",
        "rule",
        "groups",
        "dp2",
    ],
)
def test_whatever_else_differs_is_told(first, second):
    first().init(PARAMS)
    first().init(PARAMS)
    with pytest.warns(UserWarning, match=WARNED):
        second().init(PARAMS)


@pytest.mark.guarantee
def test_a_sweep_over_a_default_argument_is_told():
    schedules = [lambda step, rate=rate: rate * 0.99**step for rate in (0.1, 0.2)]
    first, second = (dpadambc.dp_sgd(each, MADE, key=KEY) for each in schedules)
    first.init(PARAMS)
    with pytest.warns(UserWarning, match=r"rate: 0\.1 there, 0\.2 here"):
        second.init(PARAMS)


def test_numbers_that_are_traced_are_let_through():
    """Each run has its own key; what is not known is not compared."""

    def run(key, z):
        chain = dpadambc.dp_sgd(0.1, mechanism(noise_multiplier=z), key=key)
        return chain.init(PARAMS)[0].noised_steps

    levels = jnp.array([1.0, 2.0])
    jax.vmap(run)(jax.random.split(KEY, 2), levels)
    jax.jit(run)(KEY, 1.0)

    def stepped(rate):
        chain = dpadambc.dp_sgd(rate, mechanism(normalize_by=2.0), key=KEY)
        gradients = dpadambc.as_per_example(
            {"w": jnp.ones((2, 3)), "b": jnp.ones((2, 2))},
            is_padding_example=jnp.zeros(2, bool),
        )
        updates, _ = chain.update(gradients, chain.init(PARAMS), PARAMS)
        return jnp.sum(updates["w"])

    assert jnp.isfinite(jax.grad(stepped)(0.1))
    level = lambda x: dpadambc.add_dp_noise(x, key=KEY).init(PARAMS).noised_steps * x
    assert jax.grad(level)(0.1) == 0.0


def test_parameters_that_were_given_away_are_let_through():
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    dpadambc.dp_sgd(0.1, MADE, key=KEY).init(params)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    jax.tree.map(lambda x: x.shape, dpadambc.dp_sgd(0.1, MADE, key=KEY).init(params))


def test_a_level_of_zero_of_any_kind_is_no_noise():
    for zero in (0, 0.0, np.float32(0), jnp.float32(0)):
        for params in (PARAMS, OTHERS):
            dpadambc.add_dp_noise(zero, key=KEY).init(params)
            dpadambc.privatize(mechanism(noise_multiplier=zero), key=KEY).init(params)
