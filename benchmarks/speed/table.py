"""The speed results as tables in Markdown.

python -m benchmarks.speed.table [FILE ...]
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "results.json"
PYTORCH = FOLDER / "pytorch_results.json"
PYTORCH_ON_GPU = FOLDER / "pytorch_gpu.json"
LARGEST = FOLDER / "largest.json"
COMPILE = FOLDER / "compile.json"

Results = dict[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all but the first column are aligned to the right."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"


def _time(case: Results) -> list[str]:
    """The time and its ratio, where it was measured."""
    if "milliseconds" not in case:
        return ["-", "-"]
    return [f"{case['milliseconds']['median']:.1f}", _spread(case["time_ratio"])]


def _memory(case: Results) -> list[str]:
    return [f"{case['peak_megabytes']:,.0f}", f"{case['memory_ratio']:.2f}"]


def _resident(case: Results) -> str:
    if "resident_megabytes" not in case:
        return "-"
    return f"{case['resident_megabytes']:,.0f}"


def _cases(results: Results, section: str) -> Iterator[tuple[list[str], Results]]:
    """All cases of a section, with the cells that say which they are."""
    for row in results["models"].values():
        for name, case in row[section].items():
            yield [row["model"], f"{row['batch_size']:,}", name], case


def gradients(results: Results) -> str:
    """The gradient, clipped and summed, in all ways."""
    header = ["model", "batch", "gradient", "time, ms", "time against non-private"]
    header += ["memory, MB", "memory against non-private", "process, MB"]
    rows = [
        [*which, *_time(case), *_memory(case), _resident(case)]
        for which, case in _cases(results, "gradients")
    ]
    return markdown(header, rows)


def steps(results: Results) -> str:
    """Whole steps."""
    header = ["model", "batch", "step", "time, ms", "time against Adam"]
    header += ["memory, MB", "memory against Adam"]
    rows = [
        [*which, *_time(case), *_memory(case)]
        for which, case in _cases(results, "steps")
    ]
    return markdown(header, rows)


def chains(results: Results) -> str:
    """What comes after the gradient."""
    header = ["model", "parameters", "`optax.adam`, ms", "noise, ms"]
    header += ["`jax.random.normal`, ms", "noise and DP-AdamBC, ms"]
    header += ["over (adam + noise)"]
    rows = []
    for row in results["models"].values():
        cases = row["chain"]["cases"].values()
        times = [f"{case['milliseconds']['median']:.2f}" for case in cases]
        ratio = _spread(row["chain"]["over_adam_plus_noise"])
        rows.append([row["model"], f"{row['num_params']:,}", *times, ratio])
    return markdown(header, rows)


def operations(results: Results) -> str:
    """Operations of one gradient, in units of 10^9."""
    header = ["model", "batch", "non-private, GFLOP", "private, GFLOP", "ratio"]
    rows = []
    for row in results["models"].values():
        non_private = row["operations"]["non_private"]
        private = row["operations"]["private"]
        counts = [f"{1e-9 * n:,.2f}" for n in (non_private, private)]
        ratio = f"{private / non_private:.2f}"
        rows.append([row["model"], f"{row['batch_size']:,}", *counts, ratio])
    return markdown(header, rows)


def microbatches(results: Results) -> str:
    """What microbatches save, and what they cost."""
    header = ["model", "batch", "gradient", "memory, MB", "memory against non-private"]
    header += ["GFLOP", "GFLOP against non-private", "time against non-private"]
    rows = []
    for row in results["models"].values():
        counts = row["operations"].get("contenders", {})
        for name, count in counts.items():
            case = row["gradients"][name]
            ratio = count / row["operations"]["non_private"]
            cells = [*_memory(case), f"{1e-9 * count:,.2f}", f"{ratio:.2f}"]
            which = [row["model"], f"{row['batch_size']:,}", name]
            rows.append([*which, *cells, _time(case)[1]])
    return markdown(header, rows) if rows else ""


def environments(results: Results) -> str:
    """Where each model was measured, and by which command."""
    lines = []
    for row in results["models"].values():
        where = row["environment"]
        machine = f"{where['cpu_count']} cores ({where['processor']})"
        if where["device"] != "cpu":
            machine = where["device"]
        versions = f"Python {where['python']}, jax {where['jax']}, {where['date']}"
        lines.append(f"- {row['model']}: `{row['command']}`; {machine}, {versions}")
    return "\n".join(lines)


def left_out(results: Results) -> str:
    """Which contenders were left out, and why."""
    reasons = {}
    for row in results["models"].values():
        reasons |= row["left_out"]
    return "\n".join(f"Left out: {name} ({why})." for name, why in reasons.items())


def render(results: Results) -> str:
    """All tables of one file of results."""
    sections = (
        gradients,
        microbatches,
        steps,
        chains,
        operations,
        environments,
        left_out,
    )
    return "\n\n".join(text for section in sections if (text := section(results)))


def pytorch_name(mode: str) -> str:
    """What a mode is called beside the contenders in JAX."""
    library = {"hooks": "Opacus, ", "ghost": "Opacus, "}.get(mode.split(",")[0], "")
    return library + mode.replace("opake", "Opake")


def pytorch(results: Results) -> str:
    """The gradient in PyTorch; its ratios are against PyTorch without privacy."""
    header = ["model", "batch", "gradient", "time, ms", "time against non-private"]
    header += ["process or GPU, MB"]
    rows, errors, commands = [], [], []
    for row in results["models"].values():
        for mode, case in row["gradients"].items():
            name = pytorch_name(mode)
            which = [row["model"], f"{row['batch_size']:,}", name]
            megabytes = _resident(case)
            if "peak_megabytes" in case:
                megabytes = f"{case['peak_megabytes']:,.0f}"
            rows.append([*which, *_time(case), megabytes])
            if "error" in case:
                batch = f"batch {row['batch_size']:,}"
                errors.append(f"- {row['model']}, {batch}, {name}: {case['error']}")
        where = row["environment"]
        libraries = ("torch", "opacus", "opake")
        versions = ", ".join(f"{k} {where[k]}" for k in libraries if k in where)
        commands.append(f"- {row['model']}: `{row['command']}`; {versions}")
    lists = ("\n".join(lines) for lines in (errors, commands) if lines)
    return "\n\n".join([markdown(header, rows), *lists])


def largest(results: Results) -> str:
    """The largest batch that fits."""
    names = dict.fromkeys(
        name for row in results["models"].values() for name in row["batch_sizes"]
    )
    header = [f"largest batch in {results['gibibytes']:g} GiB", *names]
    rows = [
        [row["model"], *(f"{row['batch_sizes'].get(name) or '-'}" for name in names)]
        for row in results["models"].values()
    ]
    text = left_out(results)
    return "\n\n".join([markdown(header, rows), *([text] if text else [])])


def compile_times(results: Results) -> str:
    """CPU seconds from Python to a compiled program."""
    header = ["model", "compiled", "trace, s", "lower, s", "compile, s", "all, s"]
    header += ["against non-private"]
    rows = []
    for row in results["models"].values():
        for name, case in row["cases"].items():
            stages = ("trace", "lower", "compile", "total")
            times = [f"{case['seconds'][stage]['median']:.2f}" for stage in stages]
            ratio = _spread(case["ratio"]) if "ratio" in case else "-"
            rows.append([row["model"], name, *times, ratio])
    return markdown(header, rows)


def load(files: Sequence[pathlib.Path]) -> Results:
    """The results of several files as one; of a model in two files, the later one."""
    models = {}
    for file in files:
        models |= json.loads(file.read_text())["models"]
    return {"models": models}


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed results in Markdown.")
    parser.add_argument("files", type=pathlib.Path, nargs="*", default=[RESULTS])
    print(render(load(parser.parse_args().files)))
    others = (
        (PYTORCH, pytorch),
        (PYTORCH_ON_GPU, pytorch),
        (LARGEST, largest),
        (COMPILE, compile_times),
    )
    for file, section in others:
        if file.exists():
            print("\n" + section(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
