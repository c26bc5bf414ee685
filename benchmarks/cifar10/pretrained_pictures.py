"""Learning curves of the linear probe, one panel for each epsilon.

python -m benchmarks.cifar10.pretrained_pictures [FILE] [--output FILE]
"""

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import records
from benchmarks.cifar10 import pretrained, probe
from benchmarks.digits.pictures import STYLES

PICTURE = pathlib.Path(__file__).with_name("pretrained.png")
CONTROL_STYLE = {"color": "black", "linestyle": "--", "marker": "*"}


def learning_curves(rows: Sequence[records.Row]) -> Figure:
    """Test accuracy, the mean over seeds, against the share of the steps taken."""
    tested = [row for row in rows if row["what"] == "probe"]
    epsilons = sorted({row["target_epsilon"] for row in tested})
    figure = Figure(figsize=(4 * len(epsilons), 4), layout="constrained")
    panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    shown = {}
    for axes, epsilon in zip(panels, epsilons, strict=True):
        for i, method in enumerate(probe.OPTIMIZERS):
            line = (method, epsilon)
            curves = [
                row["curve"]
                for row in tested
                if (row["method"], row["target_epsilon"]) == line
            ]
            if not curves:
                continue
            mean = np.mean(curves, 0)
            steps = np.arange(1, len(mean) + 1) / len(mean)
            style = dict(STYLES.get(method, CONTROL_STYLE))
            style |= {"markevery": (i % 3, 3), "markersize": 6}
            (shown[method],) = axes.plot(steps, mean, **style)
        axes.set_title(f"ε = {epsilon:g}")
        axes.set_xlabel("share of the steps")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
        axes.set_ylim(0.74, 0.92)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy (%)")
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "file", type=pathlib.Path, nargs="?", default=pretrained.RESULTS
    )
    parser.add_argument("--output", type=pathlib.Path, default=PICTURE)
    arguments = parser.parse_args()
    rows = records.read(arguments.file)
    learning_curves(rows).savefig(arguments.output, dpi=150)


if __name__ == "__main__":
    main()
