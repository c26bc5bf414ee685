"""What tests of several modules share."""

import chex
import jax
import optax
import pytest

import dpadambc


def poisson_gaussian(**changes):
    """A small mechanism: 20 steps on a quarter of some 200 examples."""
    numbers = dict(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.25,
        iterations=20,
        normalize_by=50,
    )
    return dpadambc.PoissonGaussian(**numbers | changes)


def slow(*values, id=None):
    """A row of a table that `make test` leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def thorough(*values, id=None):
    """A row whose parts are in other rows: `make test-thorough` has it."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)


def plain(tree):
    """With keys as numbers, which can be compared."""
    return optax.tree.unwrap_random_key_data(tree)


def assert_jit_changes_nothing(fun, *calls, rtol=1e-5, atol=1e-6):
    """By hand and compiled, once for the arguments of all calls, a function is one."""
    chex.clear_trace_counter()  # which takes the functions of all callers for one
    compiled = jax.jit(chex.assert_max_traces(lambda *args: fun(*args), n=1))
    for args in calls:
        by_hand, shapes = fun(*args), jax.eval_shape(fun, *args)
        chex.assert_trees_all_equal_shapes_and_dtypes(by_hand, shapes)
        got, expected = plain(compiled(*args)), plain(by_hand)
        chex.assert_trees_all_close(got, expected, rtol=rtol, atol=atol)
