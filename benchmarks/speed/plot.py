"""Time and memory of a gradient against the non-private one, in one picture.

python -m benchmarks.speed.plot [FILE ...] [--output FILE]
"""

import argparse
import json
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, LogLocator

from benchmarks.speed import table

PICTURE = pathlib.Path(__file__).with_name("ratios.png")

# Colors that color-blind readers tell apart (Okabe and Ito), and a marker for each,
# for readers of a print in gray.
_STYLES: dict[str, dict[str, Any]] = {
    "dpadambc": {"color": "#0072B2", "marker": "o"},
    "dpadambc, microbatches of 8": {"color": "#56B4E9", "marker": "8"},
    "dpadambc, microbatches of 4": {"color": "#56B4E9", "marker": "p"},
    "dpadambc, microbatches of 2": {"color": "#56B4E9", "marker": "<"},
    "vmap": {"color": "#D55E00", "marker": "s"},
    "optax": {"color": "#E69F00", "marker": "^"},
    "jax_privacy": {"color": "#009E73", "marker": "D"},
    "Opacus, hooks": {"color": "black", "marker": "x"},
    "Opacus, ghost": {"color": "black", "marker": "+"},
    "Opacus, ghost, untied head": {"color": "black", "marker": "1"},
    "Opake": {"color": "#CC79A7", "marker": "v"},
    "Opake, microbatches of 4": {"color": "#CC79A7", "marker": ">"},
}


def _cases(results: table.Results, pytorch: table.Results) -> table.Results:
    """All cases of each model; those of PyTorch have no memory to compare."""
    cases = {name: dict(row["gradients"]) for name, row in results["models"].items()}
    for name, row in pytorch["models"].items():
        for mode, case in row["gradients"].items():
            if mode != "non-private" and "error" not in case:
                cases.get(name, {})[table.pytorch_name(mode)] = case
    return cases


def _quartiles(ratio: Any) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; one number is all three."""
    if isinstance(ratio, dict):
        return ratio["q1"], ratio["median"], ratio["q3"]
    return ratio, ratio, ratio


def _plot_ratio(axes: Axes, cases: table.Results, key: str) -> None:
    """One row for each model, one mark for each contender."""
    for i, (contender, style) in enumerate(_STYLES.items()):
        # Contenders are staggered, for marks that would lie on each other.
        offset = 0.6 * (i / (len(_STYLES) - 1) - 0.5)
        for row, case in enumerate(cases.values()):
            if key not in case.get(contender, {}):
                continue
            q1, median, q3 = _quartiles(case[contender][key])
            spread = [[median - q1], [q3 - median]]
            axes.errorbar(median, row + offset, xerr=spread, ls="", **style)


def _decorate(axes: Axes, label: str) -> None:
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter("")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(label)


def _label(row: table.Results) -> str:
    """The model, its sizes and its batch."""
    batch = f"batch {row['batch_size']:,}"
    return "\n".join([*row["model"].split(", ", maxsplit=1), batch])


def picture(results: table.Results, pytorch: table.Results) -> Figure:
    """Two panels, time and memory."""
    cases = _cases(results, pytorch)
    labels = [_label(row) for row in results["models"].values()]
    figure = Figure(figsize=(10, 1.5 + 0.9 * len(cases)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    _plot_ratio(time, cases, "time_ratio")
    _plot_ratio(memory, cases, "memory_ratio")
    _decorate(
        time,
        "time of the clipped gradient / non-private\n"
        "(quartiles; Opacus, Opake: PyTorch)",
    )
    _decorate(memory, "peak memory / non-private")
    time.set_yticks(range(len(labels)), labels)
    time.set_ylim(len(labels) - 0.5, -0.5)
    for axes in (time, memory):
        for row in range(1, len(labels)):
            axes.axhline(row - 0.5, color="0.8", lw=0.8)
    shown = {name for case in cases.values() for name in case}
    marks = [
        Line2D([], [], ls="", label=name, **style)
        for name, style in _STYLES.items()
        if name in shown
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=min(4, len(marks)))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=pathlib.Path, nargs="*", default=[table.RESULTS])
    parser.add_argument("--output", type=pathlib.Path, default=PICTURE)
    args = parser.parse_args()
    pytorch: table.Results = {"models": {}}
    if table.PYTORCH.exists():
        pytorch = json.loads(table.PYTORCH.read_text())
    picture(table.load(args.files), pytorch).savefig(args.output, dpi=150)


if __name__ == "__main__":
    main()
