"""What noise of 128 random bits on a grid costs, against float32 noise of 23.

    python -m benchmarks.speed.noise [--rounds N] [--models NAME ...] [--output FILE]

Alone (`add_dp_noise` on arrays, with its checksum), and in a whole step of DP-AdamBC,
by keys of JAX's default kind and of ChaCha. All are compiled, warm, and interleaved in
one process; times are ratios within a round to noise by `jax.random.normal`.
"""

import argparse
import json
import pathlib
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import dpadambc
from benchmarks.environment import environment
from benchmarks.speed import models, run, sizes, timing
from dpadambc import training
from dpadambc.core import keys, noise

SHAPES = {
    "1 array of 1.8 million": [(1_800_000,)],
    "100 arrays, 13 million": [(512, 512), (512,)] * 50,
}
MODELS = ["cnn5-256", "transformer-64", "encoder-64", "mlp-256"]
BEFORE = "float32"


def float32_noised(key: jax.Array, sums: Any, stddev: Any) -> Any:
    """Noise as one writes it by hand, with a key for each array."""
    structure = jax.tree.structure(sums)
    per_leaf = structure.unflatten(keys.of_leaves(key, sums))
    add = lambda k, x: x + stddev * jax.random.normal(k, x.shape)
    return jax.tree.map(add, per_leaf, sums)


def compiled(
    cases: dict[str, tuple[Any, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each program, and the CPU seconds and lines of code that it was compiled to."""
    programs, found = {}, {}
    for name, case in cases.items():
        start = time.process_time()
        noised = float32_noised if name == BEFORE else noise.noised
        with mock.patch.object(noise, "noised", noised):
            programs |= timing.compile_cases({name: case})
        found[name] = {
            "cpu_seconds": round(time.process_time() - start, 2),
            "lines": len(programs[name].as_text().splitlines()),
            "bytes": timing.peak_bytes(programs[name]),
        }
    return programs, found


def measured(cases: dict[str, tuple[Any, Any]], rounds: int) -> dict[str, Any]:
    """Quartiles of the ratios, and of the milliseconds, of all cases."""
    programs, compilation = compiled(cases)
    times = timing.interleaved_times(cases, programs, rounds)
    return {
        name: {
            "ms": timing.quartiles(1e3 * seconds),
            "ratio": timing.quartiles(seconds / times[BEFORE][: len(seconds)]),
            **compilation[name],
        }
        for name, seconds in times.items()
    }


def cases_of(make: Any) -> dict[str, tuple[Any, Any]]:
    """The same program with each kind of noise: of a key, returns it and arguments."""
    default = jax.random.key(0)
    return {
        BEFORE: make(default),
        "threefry": make(default),
        "chacha": make(training.secret_key(bits=256)),
    }


def noise_alone(shapes: list[tuple[int, ...]]) -> dict[str, tuple[Any, Any]]:
    """`add_dp_noise` on arrays."""

    def make(key):
        arrays = [jnp.full(shape, 0.01) for shape in shapes]
        sums = dpadambc.as_clipped_sum(arrays, l2_clip_norm=1.0, normalize_by=1)
        tx = dpadambc.add_dp_noise(1.0, key=key)
        return lambda *args: tx.update(*args), (sums, tx.init(arrays))

    return cases_of(make)


def whole_step(problem: models.Problem) -> dict[str, tuple[Any, Any]]:
    """A step of DP-AdamBC, of the model that a benchmark of speed has."""

    def make(key):
        with mock.patch.object(run.jax.random, "key", lambda _: key):
            return run.step_cases(problem)["private"]

    return cases_of(make)


def main() -> None:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=MODELS)
    output = pathlib.Path(__file__).with_name("noise.json")
    parser.add_argument("--output", type=pathlib.Path, default=output)
    args = parser.parse_args()
    cases = {name: noise_alone(shapes) for name, shapes in SHAPES.items()}
    cases |= {name: whole_step(sizes.CPU[name]()) for name in args.models}
    found: dict[str, Any] = {"environment": environment()}
    for name, programs in cases.items():
        found[name] = measured(programs, args.rounds)
        for kind, row in found[name].items():
            print(name, kind, json.dumps(row), flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
