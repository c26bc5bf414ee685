"""Learning curves of a linear probe, one panel for each epsilon."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import records
from benchmarks.digits.pictures import STYLES
from benchmarks.probe import linear

MORE_STYLES = {
    linear.CONTROL: {"color": "black", "linestyle": "--", "marker": "*"},
    linear.AUTOMATIC: {"color": "0.5", "linestyle": "-.", "marker": "P"},
}


def learning_curves(rows: Sequence[records.Row]) -> Figure:
    """Test accuracy, the mean over seeds, against the share of the steps taken."""
    tested = [row for row in rows if row["what"] == "probe"]
    epsilons = sorted({row["target_epsilon"] for row in tested})
    figure = Figure(figsize=(4 * len(epsilons), 4), layout="constrained")
    panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    shown = {}
    # The first steps would take most of the picture.
    early = np.concatenate([row["curve"][3:] for row in tested])
    for axes, epsilon in zip(panels, epsilons, strict=True):
        for i, method in enumerate(linear.OPTIMIZERS):
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
            style = dict(STYLES.get(method) or MORE_STYLES[method])
            style |= {"markevery": (i % 3, 3), "markersize": 6}
            (shown[method],) = axes.plot(steps, mean, **style)
        axes.set_title(f"ε = {epsilon:g}")
        axes.set_xlabel("share of the steps")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
        axes.set_ylim(early.min() - 0.01, early.max() + 0.01)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy (%)")
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    return figure
