"""Strict JAX, and one hypothesis profile, for all tests."""

import os

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=25
)
hypothesis.settings.register_profile(
    "thorough", derandomize=False, deadline=None, max_examples=1000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
