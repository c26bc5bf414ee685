"""What a diagnostic snapshot costs, against the update of the optimizer it looks at.

python -m benchmarks.speed.snapshot [--rounds 15] [--output FILE]
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import optax

import dpadambc
from benchmarks import environment
from benchmarks.speed import models, timing
from dpadambc import diagnostics

RESULTS = pathlib.Path(__file__).with_name("snapshot.json")
PROBLEMS = {
    "DP-GCN": lambda: models.gcn(1),
    "MLP": lambda: models.mlp(1),
    "transformer": lambda: models.transformer(1),
}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Times and memory of a snapshot, and of noise with DP-AdamBC."""
    params = PROBLEMS[name]().params
    optimizer = optax.chain(
        dpadambc.add_dp_noise(0.1, key=jax.random.key(0)),
        dpadambc.scale_by_adam_bc(0.1),
    )
    gradient = dpadambc.as_clipped_sum(params, l2_clip_norm=1.0, normalize_by=1)
    state = jax.jit(optimizer.update)(gradient, optimizer.init(params))[1]
    cases: timing.Cases = {
        "update": (optimizer.update, (gradient, state)),
        "snapshot": (diagnostics.snapshot, (state,)),
    }
    compiled = timing.compile_cases(cases)
    times = timing.interleaved_times(cases, compiled, rounds)
    analysis = compiled["snapshot"].memory_analysis()
    return {
        "name": name,
        "num_params": optax.tree.size(params),
        "seconds": {case: timing.quartiles(t) for case, t in times.items()},
        "ratio": timing.quartiles(times["snapshot"] / times["update"]),
        "state_bytes": analysis.argument_size_in_bytes,
        "snapshot_bytes": analysis.output_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
    }


def render(report: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "| parameters of | number | update, ms | snapshot, ms | ratio | state, MB"
        " | temporaries, MB | snapshot, kB |",
        f"| --- |{' ---: |' * 7}",
    ]
    for row in report["models"]:
        update, seen = (row["seconds"][k]["median"] for k in ("update", "snapshot"))
        ratio = row["ratio"]
        cells = (
            row["name"],
            f"{row['num_params']:,}",
            f"{1e3 * update:.1f}",
            f"{1e3 * seen:.1f}",
            f"{ratio['median']:.1f} ({ratio['q1']:.1f} to {ratio['q3']:.1f})",
            f"{row['state_bytes'] / 1e6:.1f}",
            f"{row['temporary_bytes'] / 1e6:.1f}",
            f"{row['snapshot_bytes'] / 1e3:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    report = {
        "environment": environment.environment(),
        "models": [measure(name, arguments.rounds) for name in PROBLEMS],
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))


if __name__ == "__main__":
    main()
