"""What `fit` refuses before the first step, and what any optimizer in it sees."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib, training
from dpadambc.core import keys
from tests import common
from tests.attacks import (
    BATCH,
    MECHANISM,
    PARAMS,
    fit,
    mechanism,
    of_fixed_size,
    square,
)

pytestmark = pytest.mark.guarantee


NOISE = MECHANISM.noise_stddev


PLAIN = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "lion": optax.lion(0.1),
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    "multi_transform": optax.multi_transform(
        {"adam": dpadambc.adam_bc(0.1, MECHANISM), "sgd": optax.sgd(0.1)},
        {"w": "adam", "b": "sgd"},
    ),
    "ema first": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "adam first": optax.chain(optax.scale_by_adam(), optax.sgd(0.1)),
    "every_fourth": optax.MultiSteps(optax.adam(0.1), 4),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "clipped again": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "injected": optax.inject_hyperparams(dpadambc.adamw_bc)(0.1, NOISE),
    "adam_bc": dpadambc.adam_bc(0.1, NOISE),
    "adamw_bc": dpadambc.adamw_bc(0.1, NOISE),
    "rms_bc": dpadambc.rms_bc(0.1, NOISE),
    "ademamix_bc": contrib.ademamix_bc(0.1, NOISE),
    "adafactor_bc": contrib.adafactor_bc(0.1, NOISE),
    "low pass first": optax.chain(
        contrib.low_pass((0.1,), (1.0, -0.9)), optax.sgd(0.1)
    ),
    "lookahead free": optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    "rmsprop": optax.rmsprop(0.1),
    "frozen part": optax.multi_transform(
        {"adam": optax.adam(0.1), "still": optax.set_to_zero()},
        {"w": "adam", "b": "still"},
    ),
}


TWO = {"w": jnp.zeros(8), "b": jnp.zeros(())}


def spy():
    """An optimizer that shows what it gets."""
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda g: seen.append(g), updates)
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(lambda p: optax.EmptyState(), update), seen


# Of a state without noise, one that averages steps, and a correction of the noise.
KINDS_IN_FIT = ["adam", "every_fourth", "adam_bc"]
KINDS = [*KINDS_IN_FIT, *map(common.slow, ["muon", "multi_transform", "injected"])]
REST = PLAIN.keys() - {"muon", "multi_transform", "injected", *KINDS_IN_FIT}


@pytest.mark.parametrize("name", KINDS + [common.thorough(n) for n in sorted(REST)])
def test_a2_any_optimizer_of_the_private_gradient_is_safe_in_fit(name):
    """Two data sets whose clipped sums agree end in the same state: no example is
    seen by another way."""
    # By a power of two, so that the sums have the same bits.
    loud = jnp.tile(jnp.array([[1e4], [1e4], [-1e4], [1e4]]), (BATCH // 4, 8))
    loss = lambda params, x: params["w"] @ x + 0 * params["b"]
    ends = [
        fit(
            PLAIN[name],
            loss,
            (scale * loud,),
            mechanism(iterations=5, sampling_prob=1.0),
            params=TWO,
        )
        for scale in (1.0, 128.0)
    ]
    one, two = (training.releasable(end)[1:] for end in ends)
    chex.assert_trees_all_close(one, two, rtol=2e-3, atol=2e-3)
    # Every trained coordinate that moves has moved by noise of its own.
    if name not in ("every_fourth", "frozen part", "masked"):
        assert np.asarray(one[0]["b"]) != 0


def test_a2_every_coordinate_gets_noise_of_the_mechanisms_level():
    size = 5_000
    tx, seen = spy()
    params = {"w": jnp.zeros(size), "frozen later": jnp.zeros(size)}
    loss = lambda params, x: jnp.sum(params["w"]) * 1e-12 * x[0]
    fit(tx, loss, mechanism=mechanism(iterations=4), params=params)
    jax.effects_barrier()
    assert len(seen) == 4
    for leaf in ("w", "frozen later"):
        drawn = np.stack([g[leaf] for g in seen])
        # The standard error of a standard deviation of n draws is 1 / sqrt(2 n).
        assert drawn.std() == pytest.approx(NOISE, rel=5 / np.sqrt(2 * drawn.size))
        correlation = np.corrcoef(drawn)[np.triu_indices(4, 1)]
        assert np.abs(correlation).max() < 5 / np.sqrt(size)


@pytest.mark.parametrize(
    "make",
    [
        lambda key: dpadambc.dp_sgd(0.1, MECHANISM, key=key),
        lambda key: dpadambc.dp_adam_bc(0.1, MECHANISM, key=key),
        lambda key: dpadambc.contrib.dp2_rmsprop(
            0.1, MECHANISM, key=key, interval=1, preconditioned_clip_norm=1.0
        ),
        lambda key: dpadambc.add_dp_noise(0.0, key=key),
        lambda key: optax.chain(dpadambc.add_dp_noise(0.001, key=key), optax.sgd(0.1)),
        lambda key: optax.MultiSteps(dpadambc.dp_sgd(0.1, MECHANISM, key=key), 2),
    ],
    ids=["dp_sgd", "dp_adam_bc", "dp2_rmsprop", "no noise", "little noise", "inside"],
)
def test_a2_optimizers_that_add_noise_of_their_own_are_refused(make):
    with pytest.raises(ValueError, match="optimizer"):
        fit(make(jax.random.key(0)))


def test_a2_an_optimizer_that_wants_losses_is_refused():
    """They are not private, and fit gives it none."""
    with pytest.raises(TypeError, match="value"):
        fit(optax.contrib.reduce_on_plateau())


def test_a8_a_public_draw_with_the_key_shows_nothing_of_the_runs_keys():
    key = jax.random.key(3)
    step = training.Step(square, MECHANISM, optax.sgd(0.1))
    state = step.init(PARAMS, key=key)
    words = lambda key: set(np.asarray(jax.random.key_data(key)).ravel().tolist())
    secret = words(state.sampling_key) | words(state.loss_key)
    secret |= set(np.asarray(state.noise.key_data).tolist())
    shown = set(np.asarray(jax.random.bits(key, (10_000,))).tolist())
    for split in (jax.random.split(key, 100), jax.random.split(key, 2)):
        shown |= words(split) | words(jax.vmap(lambda k: jax.random.split(k))(split))
    assert len(secret) == 6 and not secret & shown
    # Negative control: keys split from it without a domain are what it draws.
    bare = keys.of_domain(jax.random.split(key)[0], "add_dp_noise")
    assert words(jax.random.split(key)) & shown and not words(bare) & shown


def test_a10_a_run_begun_with_entropy_goes_on_with_its_own_key(tmp_path, caplog):
    saved = lambda: training.Checkpoints(tmp_path)
    first = fit(checkpoints=saved(), key=training.secret_key())
    again = fit(checkpoints=saved(), key=training.secret_key())
    np.testing.assert_array_equal(again.state.params, first.state.params)
    assert first.resumed_from is None and again.resumed_from == 20
    assert "step 20" in caplog.text and str(tmp_path) in caplog.text
    # A key of another kind has other words.
    with pytest.raises(ValueError, match="kind of key"):
        fit(checkpoints=saved(), key=training.secret_key(bits=256))


def test_b1_epsilon_is_computed_before_the_first_step(monkeypatch):
    def fails(self, *args, **options):
        raise MemoryError("364 TiB")

    monkeypatch.setattr(dpadambc.PoissonGaussian, "epsilon", fails)
    heard = []
    with pytest.raises(MemoryError):
        fit(callbacks=heard.append)
    assert not heard


def test_b2_a_run_without_noise_says_that_it_is_not_private():
    silent = of_fixed_size(noise_multiplier=0.0, iterations=3)
    assert fit(mechanism=silent).epsilon == np.inf
    assert fit(mechanism=mechanism(noise_multiplier=1e-9)).epsilon == np.inf
