"""How much of delta the rounding of dp-accounting's composition takes away.

    python -m benchmarks.accounting.rounding [--number 100] [--seed 0] [--output FILE]

The losses of one Poisson-sampled step, on a grid, are composed in two ways: by
dp-accounting's Fourier transform, and by one of their law times exp(tilt * loss), whose
rounding is relative to delta. What the first says less than the second, over the number
of steps, is what `dpadambc.core.accounting` must spend on rounding at least.
"""

import argparse
import json
import pathlib
from typing import Any

import dp_accounting
import numpy as np
import rich.progress
from dp_accounting import pld

from benchmarks import environment
from dpadambc import NeighboringRelation
from dpadambc.accounting import PLD

RESULTS = pathlib.Path(__file__).with_name("rounding.json")
DELTAS = (1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-13)
RELATIONS = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_ONE,
)


def tilted(
    losses: np.ndarray, probs: np.ndarray, steps: int, delta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of so many losses around epsilon at delta, and their probabilities."""
    interval = losses[1] - losses[0]
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(probs, 0))
    cumulant = lambda tilt: np.log(np.exp(logs + tilt * (losses - losses[-1])).sum())
    log_mgf = lambda tilt: float(steps * (cumulant(tilt) + tilt * losses[-1]))
    tilts = np.geomspace(0.05, 50, 200)
    tilt = tilts[np.argmin([(log_mgf(t) - np.log(delta)) / t for t in tilts])]
    law = np.exp(logs + tilt * losses - log_mgf(tilt) / steps)
    mean = law @ losses
    deviation = np.sqrt(steps * (law @ (losses - mean) ** 2)) / interval
    size = 2 ** int(np.ceil(np.log2(max(60 * deviation, 2 * len(losses)))))
    composed = np.fft.irfft(np.fft.rfft(law, size) ** steps, size)
    center = int(steps * (law @ np.arange(len(law))))
    numbers = center + np.arange(-size // 2, size // 2)
    sums = steps * losses[0] + numbers * interval
    log_probs = np.log(np.maximum(composed[numbers % size], 1e-300))
    # Far below epsilon, where nothing is read, rounding is magnified without end.
    return sums, np.exp(np.minimum(log_probs + log_mgf(tilt) - tilt * sums, 0))


def taken(
    noise_multiplier: float,
    sampling_prob: float,
    steps: int,
    relation: NeighboringRelation,
    interval: float,
) -> float:
    """The most that any of the deltas falls short by, over the number of steps."""
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    step = dp_accounting.PoissonSampledDpEvent(sampling_prob, gaussian)
    on_grid = lambda event: (
        PLD.composed(event, pld.PLDAccountant(relation, interval))._pld
    )
    one = on_grid(step)._pmf_remove.to_dense_pmf()
    probs = np.array(one._probs)
    losses = interval * (one._lower_loss + np.arange(len(probs)))
    every = dp_accounting.SelfComposedDpEvent(step, steps)
    composed = on_grid(every)._pmf_remove
    most = 0.0
    for delta in DELTAS:
        sums, law = tilted(losses, probs, steps, delta)
        falling = lambda x, s=sums, p=law: p[s > x] @ -np.expm1(x - s[s > x])
        epsilon = _where(falling, delta, sums)
        short = falling(epsilon) - composed.get_delta_for_epsilon(epsilon)
        most = max(most, float(short) / steps)
    return most


def _where(falling: Any, delta: float, sums: np.ndarray) -> float:
    """Where a function that falls meets delta, among the sums."""
    low, high = 0, len(sums) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if falling(sums[middle]) > delta else (low, middle)
    return float(sums[high])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    rows = []
    for _ in rich.progress.track(range(arguments.number), "compositions"):
        row = {
            "noise_multiplier": float(np.exp(rng.uniform(np.log(0.6), np.log(6)))),
            "sampling_prob": float(np.exp(rng.uniform(np.log(1e-4), np.log(0.2)))),
            "steps": int(np.exp(rng.uniform(np.log(3), np.log(1e6)))),
            "relation": RELATIONS[rng.integers(2)],
            "interval": float(np.exp(rng.uniform(np.log(3e-4), np.log(1e-2)))),
        }
        most = taken(*row.values())
        rows.append(row | {"relation": row["relation"].name, "taken_per_step": most})
    report = {
        "environment": environment.environment(),
        "seed": arguments.seed,
        "most_taken_per_step": max(row["taken_per_step"] for row in rows),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"at most {report['most_taken_per_step']:.3g} of delta for each step")


if __name__ == "__main__":
    main()
