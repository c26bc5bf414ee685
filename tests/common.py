"""What tests of several modules share."""

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
