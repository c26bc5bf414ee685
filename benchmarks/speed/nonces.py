"""What a checksum costs in noise, and what `fit` does before its first step.

python -m benchmarks.speed.nonces [--rounds 20] [--rows 10_000_000] [--output FILE]
"""

import argparse
import json
import pathlib
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.environment import environment
from benchmarks.speed import timing
from dpadambc import training
from dpadambc.core import noise

SHAPES = {
    "1 array": [(10_000_000,)],
    "10 matrices": 10 * [(1_000, 1_000)],
    "100 arrays": 100 * [(100_000,)],
}


def of_the_key(key: jax.Array, *_: Any) -> jax.Array:
    """The key of a step as it is without a checksum."""
    return key


def cost_of_nonces(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Time of `add_dp_noise` with a checksum over that without, quartiles of pairs."""
    arrays = [jnp.full(shape, 0.01) for shape in shapes]
    sums = dpadambc.as_clipped_sum(arrays, l2_clip_norm=1.0, normalize_by=1)
    tx = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    args = sums, tx.init(arrays)
    with_nonce: timing.Cases = {"with": (lambda *args: tx.update(*args), args)}
    without: timing.Cases = {"without": (lambda *args: tx.update(*args), args)}
    compiled = timing.compile_cases(with_nonce)
    with mock.patch.object(noise, "key_of_step", of_the_key):
        compiled |= timing.compile_cases(without)
    times = timing.interleaved_times(with_nonce | without, compiled, rounds)
    ratios = times["with"] / times["without"]
    return {
        "ms": {name: float(1e3 * np.median(t)) for name, t in times.items()},
        "ratio": [float(np.quantile(ratios, q)) for q in (0.25, 0.5, 0.75)],
    }


def seconds_to_first_step(rows: int) -> float:
    """From the call of `fit` to its first callback, compilation included."""
    x = np.random.default_rng(0).random((rows, 32), np.float32)
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=min(1.0, 256 / rows),
        iterations=2,
        normalize_by=256,
    )
    mechanism.epsilon(1e-9)  # the accountant is none of it
    start, ends = time.perf_counter(), []
    training.fit(
        lambda w, x, y: (w @ x - y) ** 2,
        jnp.zeros(32),
        (x, np.float32(x[:, 0] > 0.5)),
        mechanism,
        optax.adam(1e-3),
        key=jax.random.key(0),
        target_delta=1e-9,
        callbacks=lambda _: ends.append(time.perf_counter()),
    )
    return ends[0] - start


def main() -> None:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000_000)
    output = pathlib.Path(__file__).with_name("nonces.json")
    parser.add_argument("--output", type=pathlib.Path, default=output)
    args = parser.parse_args()
    found = {
        "environment": environment(),
        "seconds_to_first_step": {
            rows: seconds_to_first_step(rows) for rows in (10_000, args.rows)
        },
        "noise": {
            name: cost_of_nonces(shapes, args.rounds) for name, shapes in SHAPES.items()
        },
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
