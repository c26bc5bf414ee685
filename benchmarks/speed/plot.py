"""Time and memory of a gradient against the non-private one, in two pictures.

One has all rows, the other five for the first screens. Rows of a GPU come first, on
gray.

    python -m benchmarks.speed.plot [FILE ...]
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

FOLDER = pathlib.Path(__file__).parent
PICTURE, FIRST_SCREEN = FOLDER / "ratios.png", FOLDER / "first_screen.png"

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
    "jax_privacy, microbatches of 8": {
        "color": "#009E73",
        "marker": "d",
        "mfc": "white",
    },
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
# The rows of the first screens, by what a reader sees there.
_FIRST_SCREEN_GPU = {
    "decoder, remat, microbatches of 8, float32": (
        "decoder of 110 M,\njax.checkpoint,\nours in microbatches of 8\n(H200)"
    ),
    "encoder, float32": "encoder of MiniLM's size\n(H200)",
    "CNN5, float32": "CNN5\n(H200)",
}
_FIRST_SCREEN_CPU = {
    "transformer-64": "transformer of 18 M\n(2 cores)",
    "resnet18-16": "ResNet-18\n(2 cores)",
}
_NAMES = {"jax_privacy": "JAX-Privacy", "optax": "Optax's clip", "vmap": "jax.vmap"}
_NAMES["jax_privacy, microbatches of 8"] = "JAX-Privacy, microbatches of 8"
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
                contender = _GPU_NAMES.get(case, case)
                cases[contender] = {k: v for k, v in ratios.items() if v is not None}
    return rows


def _quartiles(ratio: Any) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; one number is all three."""
    if isinstance(ratio, dict):
        median = ratio["median"]
        return ratio.get("q1", median), median, ratio.get("q3", median)
    return ratio, ratio, ratio


def _shown(cases: table.Results) -> list[str]:
    """The contenders that have a row, in the order of the legend."""
    found = {name for case in cases.values() for name in case}
    return [name for name in _STYLES if name in found]


def _plot_ratio(axes: Axes, cases: table.Results, key: str) -> None:
    """One row for each model, one mark for each contender."""
    for i, contender in enumerate(names := _shown(cases)):
        style = _STYLES[contender]
        # Contenders are staggered, for marks that would lie on each other.
        offset = 0.6 * (i / (len(names) - 1) - 0.5)
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


def _drawn(
    cases: table.Results, num_gray: int, columns: int, size: tuple[float, float]
) -> Figure:
    """Two panels, time and memory."""
    figure = Figure(figsize=size, layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    _plot_ratio(time, cases, "time_ratio")
    _plot_ratio(memory, cases, "memory_ratio")
    _decorate(
        time,
        "time, private gradient / ordinary one\n(quartiles; Opacus, Opake: PyTorch)",
    )
    _decorate(memory, "peak memory, private / ordinary")
    time.set_yticks(range(len(cases)), list(cases))
    time.set_ylim(len(cases) - 0.5, -0.5)
    for axes in (time, memory):
        axes.axhspan(-0.5, num_gray - 0.5, color="0.94", zorder=0)
        for row in range(1, len(cases)):
            axes.axhline(row - 0.5, color="0.8", lw=0.8)
    marks = [
        Line2D([], [], ls="", label=_NAMES.get(name, name), **_STYLES[name])
        for name in _shown(cases)
    ]
    figure.legend(
        handles=marks, loc="outside upper center", ncols=min(columns, len(marks))
    )
    return figure


def picture(
    results: table.Results, pytorch: table.Results, on_gpu: gpu.Records
) -> Figure:
    """Every row that was measured."""
    first, others = _gpu_cases(on_gpu), _cases(results, pytorch)
    labels = {name: _label(row) for name, row in results["models"].items()}
    cases = first | {labels[name]: case for name, case in others.items()}
    return _drawn(cases, len(first), 4, (10, 1.5 + 0.8 * len(cases)))


def first_screen(
    results: table.Results, pytorch: table.Results, on_gpu: gpu.Records
) -> Figure:
    """Five rows, to be read at a width of 800 pixels."""
    rows = {name.partition("\nbatch")[0]: x for name, x in _gpu_cases(on_gpu).items()}
    others = _cases(results, pytorch)
    cases = {
        label: rows[_ON_GPU[name][1]] for name, label in _FIRST_SCREEN_GPU.items()
    } | {label: others[name] for name, label in _FIRST_SCREEN_CPU.items()}
    return _drawn(cases, len(_FIRST_SCREEN_GPU), 3, (8, 4.6))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=pathlib.Path, nargs="*", default=[table.RESULTS])
    args = parser.parse_args()
    pytorch: table.Results = {"models": {}}
    if table.PYTORCH.exists():
        pytorch = json.loads(table.PYTORCH.read_text())
    rows = table.load(args.files), pytorch, gpu.load(gpu.RESULTS, gpu.PEERS)
    picture(*rows).savefig(PICTURE, dpi=150)
    first_screen(*rows).savefig(FIRST_SCREEN, dpi=200)


if __name__ == "__main__":
    main()
