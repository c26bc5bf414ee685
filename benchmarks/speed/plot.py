"""Time and memory of a gradient against the non-private one, in one picture.

Rows of a GPU come first, on gray.

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

from benchmarks.speed import gpu, table

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


_DECODER = "width 768, 12 layers, length 256"
_ENCODER = "width 384, 6 layers, length 64"
# The gradients that were measured on a GPU, by their rows: the model, and a label.
_ON_GPU = {
    "decoder, float32": ("decoder", f"decoder, float32\n{_DECODER}"),
    "decoder, bfloat16": ("decoder", f"decoder, bfloat16\n{_DECODER}"),
    "decoder, remat, microbatches of 8, float32": (
        "decoder",
        "the same, float32, remat\nmicrobatches of 8",
    ),
    "encoder, float32": ("encoder", f"encoder, float32\n{_ENCODER}"),
    "encoder without types, bfloat16": (
        "encoder",
        f"encoder without types, bfloat16\n{_ENCODER}",
    ),
    "CNN5, float32": ("cnn5", "CNN5, float32\n32x32x3"),
}
_GPU_NAMES = {"private": "dpadambc", "ordinary": "non-private"}


def _gpu_cases(found: gpu.Records) -> table.Results:
    """The cases of each of these rows, by its label; each has its ordinary gradient."""
    rows = {}
    for name, (model, label) in _ON_GPU.items():
        same = {k: v for k, v in found.items() if f"{k}, ".startswith(f"{name}, ")}
        device = same[name]["ordinary"]["device"]
        batch = f"batch {gpu.SIZES[model]['batch_size']:,}, {device}"
        cases = rows[f"{label}\n{batch}"] = {}
        for others in same.values():
            for case, line in others.items():
                memory = gpu.memory_ratio(line, others["ordinary"])
                ratios = {"time_ratio": line["ratio"], "memory_ratio": memory}
                contender = _GPU_NAMES.get(case, case.split(", microbatches")[0])
                cases[contender] = {k: v for k, v in ratios.items() if v is not None}
    return rows


def _quartiles(ratio: Any) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; one number is all three."""
    if isinstance(ratio, dict):
        median = ratio["median"]
        return ratio.get("q1", median), median, ratio.get("q3", median)
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
    """The model, its sizes, its batch and the machine."""
    where = row["environment"]
    cores = f"{where['cpu_count']} cores"
    machine = cores if where["device"] == "cpu" else where["device"]
    batch = f"batch {row['batch_size']:,}, {machine}"
    return "\n".join([*row["model"].split(", ", maxsplit=1), batch])


def picture(
    results: table.Results, pytorch: table.Results, on_gpu: gpu.Records
) -> Figure:
    """Two panels, time and memory."""
    first = _gpu_cases(on_gpu)
    cases = first | _cases(results, pytorch)
    labels = [*first, *(_label(row) for row in results["models"].values())]
    figure = Figure(figsize=(10, 1.5 + 0.8 * len(cases)), layout="constrained")
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
        axes.axhspan(-0.5, len(first) - 0.5, color="0.94", zorder=0)
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
    on_gpu = gpu.load(gpu.RESULTS, gpu.PEERS)
    picture(table.load(args.files), pytorch, on_gpu).savefig(args.output, dpi=150)


if __name__ == "__main__":
    main()
