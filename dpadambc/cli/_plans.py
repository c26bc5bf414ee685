"""`dpadambc plan`: the noise for several budgets and batch sizes."""

import argparse
from typing import Any

from dpadambc import diagnostics
from dpadambc.accounting import PlannedRun, plan
from dpadambc.cli._epsilons import ACCOUNTANTS
from dpadambc.core.clip import NeighboringRelation

_COLUMNS = {
    "epochs": ("epochs", "{:g}"),
    "epsilon": ("epsilon", "{:g}"),
    "batch_size": ("batch size", "{}"),
    "sampling_prob": ("sampling prob", "{:.5f}"),
    "iterations": ("steps", "{}"),
    "noise_multiplier": ("noise multiplier", "{:.4f}"),
    "noise_stddev": ("noise stddev", "{:.3g}"),
}


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What is printed, by name."""
    # Before anything is computed: it says what to install.
    pictures = diagnostics.pictures if args.picture else None
    relation = NeighboringRelation[(args.relation or "add_or_remove_one").upper()]
    rows = plan(
        target_epsilons=args.epsilon,
        target_delta=args.delta,
        batch_sizes=args.batch_size,
        epochs=args.epochs,
        num_examples=args.num_examples,
        neighboring_relation=relation,
        accountant=ACCOUNTANTS[args.accountant],
    )
    if pictures:
        pictures.plan(rows).savefig(args.picture, dpi=150)
    return {
        "delta": args.delta,
        "num_examples": args.num_examples,
        "neighboring_relation": relation.name,
        "accountant": rows[0].accountant.name,
        "sampling": "poisson",
        "rows": [_row(row, args.compare) for row in rows],
    }


def _row(row: PlannedRun, compare: bool) -> dict[str, Any]:
    numbers = {
        "epochs": row.epochs,
        "epsilon": row.target_epsilon,
        "batch_size": row.batch_size,
        "sampling_prob": row.mechanism.sampling_prob,
        "iterations": row.mechanism.iterations,
        "noise_multiplier": row.mechanism.noise_multiplier,
        "noise_stddev": row.noise_stddev,
    }
    if not compare:
        return numbers
    return numbers | {
        "comparison": [
            {
                "sampling": spent.sampling,
                "neighboring_relation": spent.neighboring_relation.name,
                "accountant": spent.accountant.name,
                "epsilon": spent.epsilon,
            }
            for spent in row.comparison()
        ]
    }


def as_text(numbers: dict[str, Any]) -> str:
    """The plan for a reader."""
    table = [
        [shape.format(row[name]) for name, (_, shape) in _COLUMNS.items()]
        for row in numbers["rows"]
    ]
    table.insert(0, [title for title, _ in _COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    return "\n".join(
        [
            f"{numbers['num_examples']:,} examples, delta = {numbers['delta']:g}"
            f" ({numbers['neighboring_relation']}, {numbers['accountant'].upper()},"
            " Poisson sampling)",
            *lines,
            "noise stddev: in the mean gradient, in units of the clip norm.",
            *(line for row in numbers["rows"] for line in _comparison(row)),
            _ASSUMED,
        ]
    )


_ASSUMED = """\
Each example takes part in each step independently: draw the batches so. Epochs
over shuffled data spend more: see --compare."""


def _comparison(row: dict[str, Any]) -> list[str]:
    if "comparison" not in row:
        return []
    return [
        f"with the noise of epsilon {row['epsilon']:g}, batch size {row['batch_size']}"
        f" and {row['epochs']:g} epochs:",
        *(
            f"  {spent['sampling']:<18} {spent['neighboring_relation']:<18}"
            f" {spent['accountant'].upper()}  epsilon {spent['epsilon']:.4g}"
            for spent in row["comparison"]
        ),
    ]
