"""What the loop, its checkpoints and more devices cost.

python -m benchmarks.training.run [--rounds 15] [--output FILE] [--distributed]

On a CPU it makes eight virtual devices of the machine's cores. On GPUs and TPUs it
takes those that are there; with --distributed, those of all processes of a cluster.
"""

import argparse
import json
import os
import pathlib
from typing import Any

# Of the host only, and before JAX looks.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402

from benchmarks import environment  # noqa: E402
from benchmarks.speed import models  # noqa: E402
from benchmarks.training import overhead, saving, scaling  # noqa: E402

RESULTS = pathlib.Path(__file__).with_name("results.json")
STEPS = (  # of about 1, 10 and 100 ms on two cores
    lambda: models.mlp(128, (64, 256, 10)),
    lambda: models.mlp(448, (256, 512, 512, 10)),
    lambda: models.mlp(1280),
)
STATES = (lambda: models.mlp(8), lambda: models.transformer(8))
SPLIT = (
    lambda: models.mlp(512),
    lambda: models.transformer(32, width=256, layers=2),
)


def _spread(quartiles: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
    median, low, high = (scale * quartiles[k] for k in ("median", "q1", "q3"))
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def render(report: dict[str, Any]) -> str:
    """The tables in Markdown."""
    lines = ["| model | batch | steps per call | bare, ms | fit, ms | fit / bare |"]
    lines.append("| --- |" + " ---: |" * 5)
    for row in report["overhead"]:
        bare, fit = (1e3 * row["seconds"][k]["median"] for k in ("bare", "fit"))
        lines.append(
            f"| {row['name']} | {row['batch_size']} | {row['steps_per_call']}"
            f" | {bare:.2f} | {fit:.2f} | {_spread(row['ratio'], digits=3)} |"
        )
    lines += ["", "| state of | parameters | MB | save, s | restore, s |"]
    lines.append("| --- |" + " ---: |" * 4)
    for row in report["checkpoints"]:
        save, restore = (_spread(row["seconds"][k]) for k in ("save", "restore"))
        lines.append(
            f"| {row['name']} | {row['num_params']:,} | {row['bytes'] / 1e6:.0f}"
            f" | {save} | {restore} |"
        )
    lines += [
        "",
        "| model | batch | parameters | devices | step, ms | faster"
        " | state, MB a device | temporaries, MB a device |",
        "| --- |" + " ---: |" * 7,
    ]
    for row in report["scaling"]:
        held, more = (row[k] / 1e6 for k in ("state_bytes", "temporary_bytes"))
        lines.append(
            f"| {row['name']} | {row['batch_size']}"
            f" | {'split' if row['split_params'] else 'whole'} | {row['devices']}"
            f" | {_spread(row['seconds'], 1e3, 1)} | {_spread(row['speedup'])}"
            f" | {held:.1f} | {more:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--distributed", action="store_true")
    arguments = parser.parse_args()
    if arguments.distributed:
        jax.distributed.initialize()
    report: dict[str, Any] = {
        "environment": environment.environment(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "scaling": [
            row for make in SPLIT for row in scaling.measure(make(), arguments.rounds)
        ],
    }
    if jax.process_count() == 1:
        report["overhead"] = [
            overhead.measure(make(), arguments.rounds, steps_per_call)
            for make in STEPS
            for steps_per_call in (1, overhead.CHUNK)
        ]
        report["checkpoints"] = [saving.measure(make(), 5) for make in STATES]
    if jax.process_index() == 0:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        print(render(report))


if __name__ == "__main__":
    main()
