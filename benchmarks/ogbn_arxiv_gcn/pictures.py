"""Learning curves of every optimizer, one panel for each epsilon.

python -m benchmarks.ogbn_arxiv_gcn.pictures [FILE] [--output FILE]
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import experiment
from benchmarks.digits.pictures import STYLES
from benchmarks.ogbn_arxiv_gcn import table

PICTURE = pathlib.Path(__file__).with_name("learning_curves.png")


def learning_curves(rows: Sequence[table.Row]) -> Figure:
    """Validation accuracy against the share of the steps taken."""
    found = table.lines(rows)
    epsilons = sorted({e for _, e, _ in found if e is not None})
    figure = Figure(figsize=(4 * len(epsilons), 4), layout="constrained")
    panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    shown: dict[str, Any] = {}
    for axes, epsilon in zip(panels, epsilons, strict=True):
        for i, method in enumerate(experiment.PRIVATE):
            for is_alone in (False, True):
                trainings = found.get((method, epsilon, is_alone))
                if not trainings:
                    continue
                curves = np.array([row["validation_curve"] for row in trainings])
                steps = np.array(trainings[0]["steps"]) / trainings[0]["steps"][-1]
                style = dict(STYLES[method], markevery=(i % 3, 3), markersize=6)
                if is_alone:
                    style |= {"color": "black", "linestyle": "--", "marker": "*"}
                name = f"{method}, trained on nodes alone" if is_alone else method
                (shown[name],) = axes.plot(steps, curves.mean(0), **style)
        axes.set_title(f"ε = {epsilon:g}")
        axes.set_xlabel("share of the steps")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy with neighbors (%)")
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=pathlib.Path, nargs="?", default=table.RESULTS)
    parser.add_argument("--output", type=pathlib.Path, default=PICTURE)
    arguments = parser.parse_args()
    lines = arguments.file.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    learning_curves(rows).savefig(arguments.output, dpi=150)


if __name__ == "__main__":
    main()
