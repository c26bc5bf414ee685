"""The tables of `benchmarks/README.md` on accounting, from its results files.

python -m benchmarks.accounting.table
"""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.accounting import settings
from benchmarks.accounting.settings import Setting

FOLDER = pathlib.Path(__file__).parent
FILES = ("results.json", "peers_results.json")

Results = dict[str, Any]  # by accountant
Reference = dict[str, float]  # see `exact.main`


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all but the first column are aligned to the right."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_false(setting: Setting, row: dict[str, Any], reference: Reference) -> bool:
    """Whether an epsilon is below the truth, or what was calibrated above its target.

    The truth is a lower bound here, so what is found is certain.
    """
    if "value" not in row:
        return False
    if setting.target is None:
        return row["value"] < reference["below"]
    return row["epsilon"] > setting.target


def excess(setting: Setting, row: dict[str, Any], reference: Reference) -> float:
    """How much larger epsilon, or the noise, is than the least that is known."""
    least = "above" if setting.target is None else "noise_multiplier"
    return row["value"] / reference[least] - 1


def _percent(x: float) -> str:
    return f"{100 * x:+.2g} %" if abs(x) < 0.1 else f"{100 * x:+.0f} %"


def _cell(setting: Setting, row: dict[str, Any] | None, reference: Reference) -> str:
    if row is None:
        return "not run"
    if "value" not in row:
        return row.get("error", "-").split(":")[0]
    over = _percent(excess(setting, row, reference))
    if is_false(setting, row, reference):
        over = f"**{over}**"
    return f"{over} · {row['seconds']:.2g} s · {row['megabytes']:.0f} MB"


def _least(setting: Setting, reference: Reference) -> str:
    if setting.target is not None:
        return f"{reference['noise_multiplier']:.4f}"
    below, above = (f"{reference[bound]:.4f}" for bound in ("below", "above"))
    return below if below == above else f"{below} to {above}"


def grid(
    results: Results, references: dict[str, Reference], *, calibrated: bool
) -> str:
    """One row for each setting, one column for each accountant."""
    what = "least noise multiplier" if calibrated else "least ε"
    header = ["of examples × steps", what, *results]
    rows = []
    for setting in settings.ALL:
        if calibrated == (setting.target is None):
            continue
        reference = references[setting.name]
        found = (r["settings"].get(setting.name) for r in results.values())
        cells = [_cell(setting, row, reference) for row in found]
        rows.append([setting.name, _least(setting, reference), *cells])
    return markdown(header, rows)


def _summary_row(result: Results, references: dict[str, Reference]) -> list[str]:
    rows = result["settings"]
    found = [(s, rows[s.name]) for s in settings.ALL if "value" in rows.get(s.name, {})]
    cells = [f"{len(found)} of {len(settings.ALL)}"]
    for calibrated in (False, True):
        part = [(s, row) for s, row in found if calibrated == (s.target is not None)]
        over = [excess(s, row, references[s.name]) for s, row in part]
        false = sum(is_false(s, row, references[s.name]) for s, row in part)
        if not part:
            cells += ["-"] * 3
            continue
        cells += [f"{_percent(statistics.median(over))}, {_percent(max(over))}"]
        cells += [f"**{false}**" if false else "0"]
        seconds = [row["seconds"] for _, row in part]
        cells += [f"{statistics.median(seconds):.2g}, {max(seconds):.2g}"]
    megabytes = [row["megabytes"] for _, row in found]
    return [*cells, f"{statistics.median(megabytes):.0f}, {max(megabytes):.0f}"]


def summary(results: Results, references: dict[str, Reference]) -> str:
    """One row for each accountant: median and largest."""
    header = ["accountant", "settings", "ε over the least", "too small", "s"]
    header += ["noise over the least", "ε above target", "s", "MB"]
    rows = [
        [name, *_summary_row(result, references)] for name, result in results.items()
    ]
    return markdown(header, rows)


def errors(results: Results) -> str:
    """What failed, in full."""
    return "\n".join(
        f"- {name}, {setting}: {row['error']}"
        for name, result in results.items()
        for setting, row in result["settings"].items()
        if "error" in row
    )


def environments(results: Results) -> str:
    """Where each accountant was measured."""
    lines = []
    for name, result in results.items():
        where = result["environment"]
        packages = ("dp-accounting", "prv-accountant", "opacus", "opake-accounting")
        versions = [f"{key} {where[key]}" for key in packages if key in where]
        lines.append(
            f"- {name}: {where['cpu_count']} cores ({where['processor']}), Python"
            f" {where['python']}, {', '.join(versions)}, {where['date']}"
        )
    return "\n".join(lines)


def load(folder: pathlib.Path = FOLDER) -> tuple[Results, dict[str, Reference]]:
    """What was recorded by accountant, and the references by setting."""
    results = {}
    for file in FILES:
        if (folder / file).exists():
            results |= json.loads((folder / file).read_text())["accountants"]
    return results, json.loads((folder / "exact.json").read_text())


def render(results: Results, references: dict[str, Reference]) -> str:
    """All tables."""
    sections = [
        summary(results, references),
        grid(results, references, calibrated=False),
        grid(results, references, calibrated=True),
        errors(results),
        environments(results),
    ]
    return "\n\n".join(section for section in sections if section)


if __name__ == "__main__":
    print(render(*load()))
