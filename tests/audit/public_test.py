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
from dpadambc import audit
from tests import common

NUM_EXAMPLES = 1_000
RELATION = dpadambc.NeighboringRelation
MECHANISM = common.poisson_gaussian(
    sampling_prob=0.05, iterations=100, l2_clip_norm=0.5, normalize_by=50
)
NOISE = MECHANISM.noise_stddev
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(NUM_EXAMPLES, 50)), jnp.float32)
DATA = X, X.sum(1)
PARAMS = {"w": jnp.zeros(50), "b": jnp.zeros(())}
ADAM_BC = dpadambc.adam_bc(0.1, NOISE)
LABELS = {"w": "first", "b": "second"}

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
    "multi_transform": optax.multi_transform(
        {"first": ADAM_BC, "second": optax.sgd(0.1)}, LABELS
    ),
    "frozen": optax.multi_transform(
        {"first": ADAM_BC, "second": optax.set_to_zero()}, LABELS
    ),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 4),
    "injected": optax.inject_hyperparams(dpadambc.adam_bc)(0.1, NOISE),
    "if_finite": optax.apply_if_finite(ADAM_BC, 3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "averaged": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "rounded": optax.chain(
        ADAM_BC, dpadambc.round_stochastically(key=jax.random.key(5))
    ),
}
CHAINS = {
    "dp_sgd": dpadambc.dp_sgd,
    "dp_adam": dpadambc.dp_adam,
    "dp_adam_bc": dpadambc.dp_adam_bc,
    "dp_adamw": dpadambc.dp_adamw,
    "dp_adamw_bc": dpadambc.dp_adamw_bc,
    "dp2_rmsprop": functools.partial(
        dpadambc.contrib.dp2_rmsprop, interval=1, preconditioned_clip_norm=1.0
    ),
}
OF_SIZE = dict(batch_size=50, num_examples=NUM_EXAMPLES)
NUMBERS = dict(
    l2_clip_norm=0.5, noise_multiplier=1.0, iterations=100, normalize_by=50.0
)
MECHANISMS = {
    "poisson": MECHANISM,
    "poisson, replace one": dataclasses.replace(
        MECHANISM, neighboring_relation=RELATION.REPLACE_ONE
    ),
    "poisson, replace special": dataclasses.replace(
        MECHANISM, neighboring_relation=RELATION.REPLACE_SPECIAL
    ),
    "all examples": dataclasses.replace(MECHANISM, sampling_prob=1.0),
    "truncated": dpadambc.TruncatedPoissonGaussian(
        sampling_prob=0.05,
        truncated_batch_size=52,
        num_examples=NUM_EXAMPLES,
        **NUMBERS,
    ),
    "fixed size": dpadambc.FixedSizeGaussian(**OF_SIZE, **NUMBERS),
    "shuffled": dpadambc.ShuffledGaussian(**OF_SIZE, **NUMBERS),
    "random allocation": dpadambc.RandomAllocationGaussian(
        batches_per_epoch=20, **NUMBERS
    ),
    "scheduled": dataclasses.replace(
        MECHANISM, noise_multiplier=optax.linear_schedule(1.0, 0.5, 50)
    ),
    "nodes": dpadambc.graphs.NodePoissonGaussian(
        max_terms=4, sampling_prob=0.05, **NUMBERS
    ),
    "nodes, fixed size": dpadambc.graphs.NodeFixedSizeGaussian(
        max_terms=4, **OF_SIZE, **NUMBERS
    ),
}


# One for each form of state, and for each way to sample and to add noise.
SLOW = ("muon", "schedule_free", "multi_steps", "injected", "if_finite", "rounded")
SLOW_MECHANISMS = (
    *("poisson, replace one", "truncated", "shuffled", "random allocation"),
    *("scheduled", "nodes"),
)


def loss_fn(params, x, y):
    return jnp.tanh(params["w"] @ x + params["b"] - y) * 3 + params["w"] @ x


def failures(pipeline, checks=audit.CHECKS):
    """What did not pass; a chain without a correction has none to check."""
    report = audit.run(pipeline, checks=checks)
    return [
        str(finding)
        for finding in report.findings
        if finding.passed is not True
        and not (finding.check == "correction" and finding.passed is None)
    ]


def some(cases, *fast, slow=()):
    """The rest are chains of the same parts."""
    rows = {n: n for n in fast} | {n: common.slow(n) for n in slow}
    assert rows.keys() <= cases.keys()
    return [rows.get(name) or common.thorough(name) for name in cases]


@pytest.mark.slow
@pytest.mark.parametrize("name", some(OPTIMIZERS, "adam_bc", slow=SLOW))
def test_no_optimizer_in_fit_keeps_what_has_no_noise(name):
    pipeline = audit.Pipeline.of_fit(loss_fn, PARAMS, DATA, MECHANISM, OPTIMIZERS[name])
    # What comes before the noise is the same for all; one of them has it checked.
    checks = ("sensitivity", "noise", "state") if name == "adam_bc" else ("state",)
    if name not in ("if_finite", "clipped", "averaged"):  # they change the level
        checks = (*checks, "correction")
    assert not failures(pipeline, checks)


@pytest.mark.parametrize("name", some(CHAINS, slow=("dp_adamw_bc",)))
def test_the_full_chains_pass(name):
    make = functools.partial(CHAINS[name], 0.1, MECHANISM)
    pipeline = audit.Pipeline.of_chain(
        loss_fn,
        PARAMS,
        DATA,
        MECHANISM,
        lambda key: make(key=key),
        loader=host(MECHANISM),
    )
    assert not failures(pipeline)


def test_batches_of_a_loop_that_are_not_shown_are_not_tested():
    """It tested the mechanism's own, and a loop that shuffles got a pass."""
    make = lambda key: dpadambc.dp_sgd(0.1, MECHANISM, key=key)
    pipeline = audit.Pipeline.of_chain(loss_fn, PARAMS, DATA, MECHANISM, make)
    report = audit.run(pipeline, checks=("sampling",))
    assert report.passed is None
    assert "no loader shows" in str(report)

    def shuffled(seed):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            yield from rng.permutation(NUM_EXAMPLES).reshape(-1, NUM_EXAMPLES // 10)

    pipeline = audit.Pipeline.of_chain(
        loss_fn, PARAMS, DATA, MECHANISM, make, loader=shuffled
    )
    assert audit.run(pipeline, checks=("sampling",)).passed is False


@pytest.mark.slow
def test_dp2_rmsprop_passes_from_a_preconditioned_step_on():
    """The checks look at the first steps; so they begin behind those of DP-SGD."""
    make = functools.partial(
        dpadambc.contrib.dp2_rmsprop,
        0.1,
        MECHANISM,
        interval=2,
        preconditioned_interval=200,
        preconditioned_clip_norm=5.0,
    )
    pipeline = audit.Pipeline.of_chain(
        loss_fn, PARAMS, DATA, MECHANISM, lambda key: make(key=key)
    )

    def init(key):
        state = pipeline.init(key)
        for _ in range(2):
            state = pipeline.step(state, *pipeline.batch)
        return state

    assert not failures(
        dataclasses.replace(pipeline, init=init), ("sensitivity", "noise", "state")
    )


@pytest.mark.thorough
def test_nor_does_fit_with_arguments_in_a_dictionary():
    """The other kinds of data and losses are in the zoo."""
    pipeline = audit.Pipeline.of_fit(
        lambda params, row: loss_fn(params, row["x"], row["y"]),
        PARAMS,
        dict(zip("xy", DATA, strict=True)),
        MECHANISM,
        ADAM_BC,
    )
    assert not failures(pipeline)


@pytest.mark.parametrize("name", some(MECHANISMS, slow=SLOW_MECHANISMS))
def test_noise_and_sensitivity_are_those_of_every_mechanism(name):
    mechanism = MECHANISMS[name]
    if isinstance(
        mechanism,
        dpadambc.graphs.NodePoissonGaussian | dpadambc.graphs.NodeFixedSizeGaussian,
    ):
        make = lambda key: dpadambc.add_dp_noise(mechanism.noise_stddev, key=key)
        assert audit.noise(make, jnp.zeros(1_000), mechanism).passed
        return
    make = lambda key: dpadambc.dp_adam_bc(0.1, mechanism, key=key)
    pipeline = audit.Pipeline.of_chain(loss_fn, PARAMS, DATA, mechanism, make)
    assert not failures(pipeline, ("sensitivity", "noise", "state", "correction"))


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
