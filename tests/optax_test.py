"""Any optimizer of Optax may follow the private gradient."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import dpadambc
from tests import common
from tests.contract_test import (
    assert_close,
    kinds,
    make,
    plain,
    stacked,
    start,
    stepper,
    take_steps,
)

GIVEN = {
    "noisy_sgd": dict(key=1),
    "lbfgs": dict(linesearch=None),
    "schedule_free": dict(base_optimizer=optax.sgd(1e-3)),
}
LEFT_OUT = {
    "dpsgd": "clips and adds noise itself",
    "momo": "takes the value of the loss, which is not private",
    "momo_adam": "takes the value of the loss, which is not private",
    "optimistic_adam": "is deprecated, and optimistic_adam_v2 is here",
    "sophia": "calls the loss, which is not private",
}  # `polyak_sgd`, which takes the value too, has no learning_rate.


def optimizers_of(module):
    for name, factory in sorted(vars(module).items()):
        if name.startswith(("_", "scale_by")):
            continue
        if inspect.isfunction(factory) or isinstance(factory, functools.partial):
            if "learning_rate" in inspect.signature(factory).parameters:
                yield name, factory


FOUND = dict(optimizers_of(optax)) | dict(optimizers_of(optax.contrib))
OPTIMIZERS = {
    name: functools.partial(factory, learning_rate=1e-3, **GIVEN.get(name, {}))
    for name, factory in FOUND.items()
    if name not in LEFT_OUT
} | {
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "muon and adam_bc": lambda: optax.multi_transform(
        {"muon": optax.contrib.muon(1e-3), "adam_bc": dpadambc.adam_bc(1e-3, 0.125)},
        {"w": "muon", "b": "adam_bc"},
    ),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
}
# One for each form of state and arguments; `make test-thorough` has the others.
FORMS = {
    *("adafactor", "adamw", "lbfgs", "lion", "muon", "schedule_free"),
    *("mechanize", "MultiSteps", "masked", "apply_if_finite"),
}
every_optimizer = pytest.mark.parametrize(
    "name", [x if x in FORMS else common.thorough(x) for x in OPTIMIZERS]
)


def test_the_search_finds_the_optimizers_of_optax():
    known = "adafactor adam adamw lamb lars lion nadam rmsprop sgd sm3 yogi"
    contributed = "adopt cocob dadapt_adamw dog muon prodigy schedule_free_adamw"
    assert {*known.split(), *contributed.split()} <= OPTIMIZERS.keys()
    assert LEFT_OUT.keys() <= FOUND.keys() and len(OPTIMIZERS) > 40
    assert FORMS <= OPTIMIZERS.keys()


def gradients_of(seed, *, sign=1, apart=0):
    """Of one step, none of which is clipped; `apart` moves examples, not their sum."""
    rng, batch = np.random.default_rng(seed), {}
    move = np.array([1, -1, 2, -2, 0, 0]) * apart
    for name, shape in dict(w=(3, 2), b=(2,)).items():
        # Numbers that are summed without rounding, in whatever order.
        rows = sign * rng.integers(8, 16, (6, *shape))
        rows = rows + move.reshape(6, *(1 for _ in shape))
        padding = np.full((1, *shape), 1000 * apart)
        batch[name] = np.concatenate([rows, padding]).astype(np.float32) / 64
    return batch, np.arange(7) == 6


def differ(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any((x != y).any() for x, y in pairs)


@pytest.mark.slow
def test_batches_apart_have_the_same_clipped_sum():
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    (one, padding), (other, _) = gradients_of(0), gradients_of(0, apart=1)
    assert all((one[leaf] != other[leaf]).any() for leaf in params)
    clip, sums = make("clip_per_example"), []
    for batch in (one, other):
        batch = dpadambc.as_per_example(batch, is_padding_example=padding)
        sums.append(clip.update(batch, clip.init(params), params)[0])
    assert not differ(*sums)


def private_run(name):
    """A step of `jax.lax.scan`, and where to start."""
    tx = optax.chain(make("privatize"), OPTIMIZERS[name]())
    examples = lambda _, x, **mask: dpadambc.as_per_example(x, **mask)
    params = {"w": jnp.full((3, 2), 0.5, "float32"), "b": jnp.ones(2, "float32")}
    return stepper(tx, examples), start(tx, params)


@pytest.mark.slow
@every_optimizer
def test_any_optimizer_of_optax_may_follow_and_sees_the_private_gradient_alone(name):
    step, begin = private_run(name)
    compiled = jax.jit(chex.assert_max_traces(step, n=1))

    def run(**options):
        carry, updates = begin, []
        for seed in range(3):
            carry, update = compiled(carry, gradients_of(seed, **options))
            updates.append(update)
        return carry, updates

    carry, updates = run()
    assert kinds(carry) == kinds(begin)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates[-1], begin[0])
    chex.assert_tree_all_finite(updates)
    # Of batches with the same clipped sum, all that it makes is the same.
    chex.assert_trees_all_equal(plain(run(apart=1)), plain((carry, updates)))
    assert differ(run(sign=-1)[1], updates)
    batches = stacked([gradients_of(seed) for seed in range(3)])
    scanned, _ = jax.eval_shape(functools.partial(jax.lax.scan, step), begin, batches)
    assert kinds(scanned) == kinds(begin)


@pytest.mark.slow
@every_optimizer
def test_any_optimizer_of_optax_gives_the_same_in_scan(name):
    step, begin = private_run(name)
    batches = [gradients_of(seed) for seed in range(3)]
    looped = take_steps(jax.jit(step), begin, batches)
    scanned, _ = jax.jit(functools.partial(jax.lax.scan, step))(begin, stacked(batches))
    assert_close(scanned, looped, tolerance=1e-5)
