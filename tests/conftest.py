"""Strict JAX on eight virtual devices, and one hypothesis profile, for all tests."""

import os

import hypothesis
import jax
import pytest

# Read when the first array is made. Nothing lies on the others unless it is put there.
FLAGS = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=25
)
hypothesis.settings.register_profile(
    "thorough", derandomize=False, deadline=None, max_examples=1000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    """Compiles a program once for all tests, in whatever process and run."""
    cache = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in cache.items():
        os.environ.setdefault(name.upper(), str(value))
        jax.config.update(name, value)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
