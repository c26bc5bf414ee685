"""Strict JAX on eight virtual devices, and one hypothesis profile, for all tests."""

import ctypes
import gc
import importlib
import os
import pathlib
import re
import sys

import chex
import hypothesis
import jax
import pytest

# XLA reads its flags when the first array is made. Arrays are on the first device
# unless a test puts them on others. Code that is not optimized compiles in a fourth of
# the time, and no test measures speed. `make test-slow` tests optimized code.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_parallel_codegen_split_count=1",  # tests are parallel already
]
if os.environ.get("DPADAMBC_OPTIMIZED_TESTS") != "1":
    FLAGS.append("--xla_backend_optimization_level=0")
    if jax.version.__version_info__ < (0, 11):  # newer ones have no such flag
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # of each operation, to lower
gc.set_threshold(20_000, 20, 10)  # a trace makes many objects, and few cycles

hypothesis.settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=25
)
hypothesis.settings.register_profile(
    "thorough", derandomize=False, deadline=None, max_examples=1000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    """Compiles a program once for all tests, in whatever process and run."""
    if not hasattr(config, "cache"):  # of `-p no:cacheprovider`
        return
    cache = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in cache.items():
        os.environ.setdefault(name.upper(), str(value))
        jax.config.update(name, value)


@pytest.hookimpl(tryfirst=True)  # before it is selected by markers
def pytest_collection_modifyitems(items):
    """Guarantees of numbers are for optimized code.

    What is refused or warned of does not depend on what XLA makes of a program.
    """
    for item in items:
        is_said = {"refused", "warned"} & set(re.split(r"\W|_", item.name))
        if item.get_closest_marker("guarantee") and not is_said:
            item.add_marker("optimized")


def pytest_collection_finish(session):
    """What was imported stays, so no collection of garbage has to look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def traces_are_counted_anew():
    """In each test, those of `chex.assert_max_traces`."""
    chex.clear_trace_counter()


def resident_bytes():
    """The memory of this process, of which Linux tells."""
    if sys.platform != "linux":
        return 0
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """JAX keeps compiled programs, about 50 MB a second, and glibc what JAX frees."""
    yield
    if resident_bytes() > 0.8e9:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture
def one_identity(monkeypatch):
    """All runs of one key draw the same batches, so that they can be compared."""
    for name in ("core.programs", "core.step", "training.search"):
        module = importlib.import_module(f"dpadambc.{name}")
        monkeypatch.setattr(module, "folded_in", lambda key, words: key)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def without_nonces(monkeypatch, one_identity):
    """Noise and batches of the key and the step alone, where rounding differs."""
    from dpadambc.core import noise

    monkeypatch.setattr(noise, "key_of_step", lambda key, *_: key)


@pytest.fixture
def each_array_is_drawn_alone(monkeypatch):
    """As on a mesh. Elsewhere arrays are drawn together, which draws other numbers."""
    from dpadambc.core import noise, normals

    noise.noised.clear_cache()
    alone = lambda sizes: [[i] for i in range(len(sizes))]
    monkeypatch.setattr(normals, "_groups", alone)
    yield
    noise.noised.clear_cache()
