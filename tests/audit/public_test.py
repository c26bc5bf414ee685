"""The audit of every public optimizer and mechanism: all of it passes.

Each optimizer stands in the step of `fit`, and the full chains stand alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import audit, contrib, graphs
from tests import common

NUM_EXAMPLES = 1_000
RELATION = dpadambc.NeighboringRelation
NUMBERS = dict(l2_clip_norm=0.5, iterations=100, normalize_by=50.0)
MECHANISM = common.poisson_gaussian(**NUMBERS, sampling_prob=0.05)
NOISE = MECHANISM.noise_stddev
X = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 50)), jnp.float32)
DATA = X, X.sum(1)
PARAMS = {"w": jnp.zeros(50), "b": jnp.zeros(())}
ADAM_BC = dpadambc.adam_bc(0.1, NOISE)
parts = lambda **named: optax.multi_transform(named, {"w": "first", "b": "second"})
ROUNDING = dpadambc.round_stochastically(key=jax.random.key(5))

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "lamb": optax.lamb(0.1),
    "muon": optax.contrib.muon(0.1),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "adam_bc": ADAM_BC,
    "adamw_bc": dpadambc.adamw_bc(0.1, NOISE),
    "rms_bc": dpadambc.rms_bc(0.1, NOISE),
    "masked": optax.masked(ADAM_BC, {"w": True, "b": False}),
    "multi_transform": parts(first=ADAM_BC, second=optax.sgd(0.1)),
    "frozen": parts(first=ADAM_BC, second=optax.set_to_zero()),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 4),
    "injected": optax.inject_hyperparams(dpadambc.adam_bc)(0.1, NOISE),
    "if_finite": optax.apply_if_finite(ADAM_BC, 3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "averaged": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "rounded": optax.chain(ADAM_BC, ROUNDING),
}
CHANGE_THE_LEVEL = {"if_finite", "clipped", "averaged"}
DP2 = functools.partial(contrib.dp2_rmsprop, 0.1, MECHANISM)
CHAINS = {
    name: functools.partial(getattr(dpadambc, name), 0.1, MECHANISM)
    for name in ("dp_sgd", "dp_adam", "dp_adam_bc", "dp_adamw", "dp_adamw_bc")
} | {"dp2_rmsprop": functools.partial(DP2, interval=1, preconditioned_clip_norm=1.0)}
SIZED = NUMBERS | dict(noise_multiplier=1.0, batch_size=50, num_examples=NUM_EXAMPLES)
DRAWN = NUMBERS | dict(noise_multiplier=1.0, sampling_prob=0.05)
replaced = functools.partial(dataclasses.replace, MECHANISM)
MECHANISMS = {
    "poisson": MECHANISM,
    "poisson, replace one": replaced(neighboring_relation=RELATION.REPLACE_ONE),
    "poisson, replace special": replaced(neighboring_relation=RELATION.REPLACE_SPECIAL),
    "all examples": replaced(sampling_prob=1.0),
    "truncated": dpadambc.TruncatedPoissonGaussian(
        **DRAWN, truncated_batch_size=52, num_examples=NUM_EXAMPLES
    ),
    "fixed size": dpadambc.FixedSizeGaussian(**SIZED),
    "shuffled": dpadambc.ShuffledGaussian(**SIZED),
    "random allocation": dpadambc.RandomAllocationGaussian(
        **NUMBERS, noise_multiplier=1.0, batches_per_epoch=20
    ),
    "scheduled": replaced(noise_multiplier=optax.linear_schedule(1.0, 0.5, 50)),
    "nodes": graphs.NodePoissonGaussian(**DRAWN, max_terms=4),
    "nodes, fixed size": graphs.NodeFixedSizeGaussian(**SIZED, max_terms=4),
}

# One for each form of state, and for each way to sample and to add noise.
SLOW = ("muon", "schedule_free", "multi_steps", "injected", "if_finite", "rounded")
SLOW_MECHANISMS = (
    *("poisson, replace one", "truncated", "shuffled", "random allocation"),
    *("scheduled", "nodes"),
)


def loss_fn(params, x, y):
    return jnp.tanh(params["w"] @ x + params["b"] - y) * 3 + params["w"] @ x


def chain(make, mechanism=MECHANISM, loader=None):
    return audit.Pipeline.of_chain(
        loss_fn, PARAMS, DATA, mechanism, lambda key: make(key=key), loader=loader
    )


def failures(pipeline, checks=audit.CHECKS):
    """The findings that did not pass; a chain may have no correction to check."""
    return [
        str(finding)
        for finding in audit.run(pipeline, checks=checks).findings
        if finding.passed is not True
        and not (finding.check == "correction" and finding.passed is None)
    ]


def rows(cases, *fast, slow=()):
    """The rest are chains of the same parts."""
    marked = {n: n for n in fast} | {n: common.slow(n) for n in slow}
    assert marked.keys() <= cases.keys()
    return [marked.get(name) or common.thorough(name) for name in cases]


@pytest.mark.slow
@pytest.mark.parametrize("name", rows(OPTIMIZERS, "adam_bc", slow=SLOW))
def test_no_optimizer_in_fit_keeps_an_array_without_noise(name):
    pipeline = audit.Pipeline.of_fit(loss_fn, PARAMS, DATA, MECHANISM, OPTIMIZERS[name])
    # All is the same before the noise: one of them has it checked.
    checks = ("sensitivity", "noise", "state") if name == "adam_bc" else ("state",)
    if name not in CHANGE_THE_LEVEL:
        checks = (*checks, "correction")
    assert not failures(pipeline, checks)


@pytest.mark.parametrize("name", rows(CHAINS, slow=("dp_adamw_bc",)))
def test_the_full_chains_pass(name):
    assert not failures(chain(CHAINS[name], loader=host(MECHANISM)))


def test_batches_of_a_loop_that_are_not_shown_are_not_tested():
    """Tested instead, the mechanism's own gave a loop that shuffles a pass."""
    (finding,) = audit.run(chain(CHAINS["dp_sgd"]), checks=("sampling",)).findings
    assert finding.passed is None

    def shuffled(seed):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            yield from rng.permutation(NUM_EXAMPLES).reshape(-1, NUM_EXAMPLES // 10)

    pipeline = chain(CHAINS["dp_sgd"], loader=shuffled)
    assert audit.run(pipeline, checks=("sampling",)).passed is False


@pytest.mark.slow
def test_dp2_rmsprop_passes_from_a_preconditioned_step_on():
    """The checks look at the first steps; so they begin behind those of DP-SGD."""
    sizes = dict(interval=2, preconditioned_interval=200, preconditioned_clip_norm=5.0)
    pipeline = chain(functools.partial(DP2, **sizes))

    def init(key):
        state = pipeline.init(key)
        for _ in range(2):
            state = pipeline.step(state, *pipeline.batch)
        return state

    later = dataclasses.replace(pipeline, init=init)
    assert not failures(later, ("sensitivity", "noise", "state"))


@pytest.mark.thorough
def test_nor_does_fit_with_arguments_in_a_dictionary():
    """The other kinds of data and losses are in the zoo."""
    loss = lambda params, row: loss_fn(params, row["x"], row["y"])
    data = dict(zip("xy", DATA, strict=True))
    assert not failures(audit.Pipeline.of_fit(loss, PARAMS, data, MECHANISM, ADAM_BC))


@pytest.mark.parametrize("name", rows(MECHANISMS, slow=SLOW_MECHANISMS))
def test_noise_and_sensitivity_are_those_of_every_mechanism(name):
    mechanism = MECHANISMS[name]
    if name.startswith("nodes"):
        make = lambda key: dpadambc.add_dp_noise(mechanism.noise_stddev, key=key)
        assert audit.noise(make, jnp.zeros(1_000), mechanism).passed
        return
    make = functools.partial(dpadambc.dp_adam_bc, 0.1, mechanism)
    checks = ("sensitivity", "noise", "state", "correction")
    assert not failures(chain(make, mechanism), checks)


def host(mechanism):
    return lambda seed: mechanism.batches(
        jax.random.key(seed), num_examples=NUM_EXAMPLES
    )


def device(mechanism):
    draw = jax.jit(
        lambda key, step: mechanism.sample_step(key, step, num_examples=NUM_EXAMPLES)
    )
    return lambda seed: (draw(jax.random.key(seed), step) for step in range(100))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("draw", [host, device])
def test_every_mechanism_draws_the_batches_that_it_accounts_for(name, draw):
    if draw is device and name == "shuffled":
        return  # it has none
    mechanism = MECHANISMS[name]
    finding = audit.sampling(draw(mechanism), mechanism, num_examples=NUM_EXAMPLES)
    assert finding.passed, finding
