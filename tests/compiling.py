"""Compiling takes most of the time of tests, and most programs of a test run once."""

import functools

import jax

# Without optimizing machine code, and with all of XLA's own passes.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
