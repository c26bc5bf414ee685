"""Computes what the papers' numbers are compared with and no other benchmark measures.

    python -m benchmarks.published.run [--seeds 10]

Accounting of the published runs, closed forms, and statistics of moments under noise
alone, which takes two minutes. What is trained has its own commands.
"""

import argparse
import json
import pathlib

import rich.progress

from benchmarks import environment
from benchmarks.published import accounting, formulas, noise

RESULTS = pathlib.Path(__file__).with_name("results.json")
NUM_COORDINATES = 10_000


def over_seeds(seeds: range) -> dict[str, dict[str, list[float]]]:
    """Each statistic of the simulation, one number for each seed."""
    numbers: dict[str, dict[str, list[float]]] = {}
    for seed in rich.progress.track(seeds, "seeds"):
        for name, row in noise.simulated(seed, NUM_COORDINATES).items():
            for label, number in row.items():
                numbers.setdefault(name, {}).setdefault(label, []).append(number)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    arguments = parser.parse_args()
    report = {
        "environment": environment.environment(),
        "num_coordinates": NUM_COORDINATES,
        "numbers": {
            **formulas.all_numbers(),
            **accounting.cifar(),
            **accounting.text(),
            **accounting.graph(),
            **over_seeds(range(arguments.seeds)),
        },
    }
    arguments.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
