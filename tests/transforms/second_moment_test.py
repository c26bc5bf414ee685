"""The corrected second moment and its floor, as functions of numbers."""

import jax.numpy as jnp
import pytest

from dpadambc import RelativeFloor
from dpadambc.transforms.second_moment import corrected_second_moment


def test_corrected_second_moment_keeps_dtype_and_floor():
    out = corrected_second_moment(jnp.array([2.0, 0.5]), 1.0, 0.25)
    assert out.tolist() == [1.0, 0.25]
    assert out.dtype == jnp.float32


@pytest.mark.parametrize(("b2", "spread"), [(0.999, 0.031631), (0.99, 0.100251)])
def test_relative_floor_tends_to_the_published_resolution(b2, spread):
    phi, factor = 0.04, 3.0
    floor = RelativeFloor(factor).variance(phi, b2, 100_000)
    assert floor == pytest.approx(factor * spread * phi, 1e-4)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf")])
def test_refuses_a_relative_floor_that_is_not_positive(bad):
    with pytest.raises(ValueError, match="factor"):
        RelativeFloor(bad)
