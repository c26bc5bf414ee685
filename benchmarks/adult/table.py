"""The Adult results as tables in Markdown.

python -m benchmarks.adult.table [FILE]
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def _percent(row: Row) -> str:
    mean, stdev = row["mean_test_accuracy"], row["stdev_test_accuracy"]
    return f"{100 * mean:.2f} ± {100 * stdev:.2f}"


def _settings(row: Row) -> str:
    rate = f"{row['learning_rate']:g}"
    if row["share_at_floor"] is None:
        return rate
    return f"{rate} ({row['share_at_floor']:.0%})"


def _by_epsilon(rows: list[Row], cell: Callable[[Row], str]) -> list[str]:
    """One line for each optimizer, one column for each epsilon."""
    epsilons = list(dict.fromkeys(row["target_epsilon"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = {(row["method"], row["target_epsilon"]): cell(row) for row in rows}
    return [
        "| optimizer | " + " | ".join(f"ε = {e:g}" for e in epsilons) + " |",
        "| --- |" + " ---: |" * len(epsilons),
        *(
            f"| {method} | " + " | ".join(cells[method, e] for e in epsilons) + " |"
            for method in methods
        ),
    ]


def render(report: dict[str, Any]) -> str:
    """Two tables, accuracies and settings, with a line on what they are."""
    private = [row for row in report["results"] if row["epsilon"] is not None]
    (non_private,) = (row for row in report["results"] if row["epsilon"] is None)
    means: dict[float, list[float]] = {}
    for row in private:
        means.setdefault(row["target_epsilon"], []).append(row["mean_test_accuracy"])
    widest = max(max(column) - min(column) for column in means.values())

    def accuracy(row: Row) -> str:
        is_best = row["mean_test_accuracy"] == max(means[row["target_epsilon"]])
        return f"**{_percent(row)}**" if is_best else _percent(row)

    num_trials = len(non_private["validation_accuracy_of_trials"])
    lines = [
        f"Test accuracy in percent, mean and standard deviation over"
        f" {len(report['seeds'])} seeds, at δ = {report['delta']:g} under"
        f" {report['neighboring_relation']}; the best mean of each column in bold;"
        f" no two means of a column are more than {100 * widest:.2f} apart."
        f" Without privacy, Adam reaches {_percent(non_private)}; the majority class is"
        f" {100 * report['majority_class_test_accuracy']:.2f}. The learning rate is the"
        f" best of {num_trials} on a validation part of the training data, a search"
        " that ε does not account for.",
        "",
        *_by_epsilon(private, accuracy),
        "",
        "The learning rates chosen and, for the corrected optimizers, the share of"
        " coordinates whose corrected second moment is at the floor.",
        "",
        *_by_epsilon(private, _settings),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The Adult results in Markdown.")
    default = pathlib.Path(__file__).parent / "results.json"
    parser.add_argument("file", type=pathlib.Path, nargs="?", default=default)
    print(render(json.loads(parser.parse_args().file.read_text())))


if __name__ == "__main__":
    main()
