"""The demo's two pictures."""

import pathlib
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import experiment

# Colors that color-blind readers tell apart (Okabe and Ito), and a line style and
# a marker for each, for readers of a print in gray.
STYLES: dict[str, dict[str, Any]] = {
    "DP-SGD": {"color": "#D55E00", "linestyle": "-.", "marker": "s"},
    "DP-Adam": {"color": "#E69F00", "linestyle": "-", "marker": "^"},
    "DP-AdamBC": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "DP-AdamW": {"color": "#CC79A7", "linestyle": ":", "marker": "v"},
    "DP-AdamW-BC": {"color": "#56B4E9", "linestyle": ":", "marker": "D"},
    experiment.NON_PRIVATE: {"color": "black", "linestyle": "--", "marker": "x"},
}


def _setting(report: dict[str, Any]) -> str:
    exponent = round(np.log10(report["delta"]))
    return f"ε = {report['epsilon']:.2f}, δ = $10^{{{exponent}}}$"


def learning_curves(report: dict[str, Any], path: pathlib.Path) -> None:
    """Test accuracy against the step, for all optimizers."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    lowest = []
    for i, (method, row) in enumerate(report["methods"].items()):
        steps, curves = np.array(row["steps"]), np.array(row["learning_curves"])
        mean, spread = curves.mean(axis=0), curves.std(axis=0)
        style = STYLES[method]
        label = f"{method}: {mean[-1]:.1%}"
        # Markers are staggered, for curves that lie on each other.
        axes.plot(steps, mean, **style, label=label, markevery=(i, 6), markersize=6)
        axes.fill_between(
            steps, mean - spread, mean + spread, color=style["color"], alpha=0.15, lw=0
        )
        lowest.append(np.interp(0.1 * steps[-1], steps, mean))
    # The first tenth is left to start below the picture, or the rest would be flat.
    axes.set_ylim(np.floor(10 * min(lowest)) / 10, 1)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=None))
    axes.set_xlabel("training step")
    axes.set_ylabel("test accuracy (%)")
    axes.grid(alpha=0.3)
    num_seeds = len(report["seeds"])
    axes.set_title(
        f"Handwritten digits at {_setting(report)}\n"
        f"mean over {num_seeds} seeds, band: one standard deviation"
    )
    figure.legend(
        loc="outside right center", title="after the last step", frameon=False
    )
    figure.savefig(path, dpi=150)


def second_moments(
    moments: experiment.SecondMoments,
    clean: np.ndarray,
    report: dict[str, Any],
    path: pathlib.Path,
) -> None:
    """How the second moment of all coordinates is distributed, in DP-AdamBC."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    top = 1.5 * max(moments.nu_hat.max(), clean.max())
    bins = np.geomspace(moments.floor / 1e4, top, 90)
    # What is smaller, such as the zeros of pixels that are always blank, is counted
    # in the first bin.
    visible = lambda values: np.clip(values, bins[0], None)
    axes.hist(
        visible(clean),
        bins,
        color="0.75",
        label="clean second moment\n(not private: for the picture only)",
    )
    axes.hist(
        moments.nu_hat,
        bins,
        histtype="step",
        color="#D55E00",
        linestyle="--",
        lw=1.8,
        label="$\\hat v$, before the correction",
    )
    axes.hist(
        visible(moments.corrected),
        bins,
        histtype="step",
        color="#0072B2",
        lw=1.8,
        label=r"$\max(\hat v - \Phi, \mathrm{floor})$, after it",
    )
    axes.axvline(
        moments.noise_variance,
        color="black",
        linestyle="-.",
        lw=1.2,
        label=f"noise variance Φ = {moments.noise_variance:.2g}",
    )
    axes.axvline(
        moments.floor,
        color="black",
        linestyle=":",
        lw=1.5,
        label=f"floor = {moments.floor:.2g}\n"
        f"({moments.share_at_floor:.0%} of the coordinates)",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(
        "second moment of one coordinate, in the unit of the squared gradient\n"
        "(the first bin also counts all that is smaller)"
    )
    axes.set_ylabel("number of coordinates")
    axes.set_title(
        f"DP-AdamBC on handwritten digits at {_setting(report)}\n"
        f"after the last step, {len(clean):,} coordinates, seed {report['seeds'][0]}"
    )
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)
