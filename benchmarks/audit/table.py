"""The tables of `benchmarks/README.md` on the audit, from its results files.

python -m benchmarks.audit.table
"""

import collections
import json
import pathlib
import statistics
from typing import Any

from dpadambc import audit

FOLDER = pathlib.Path(__file__).parent
_SIGNS = {True: "pass", False: "**FAIL**", None: "–"}


def _lines(name: str) -> list[dict[str, Any]]:
    path = FOLDER / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _outcomes(line: dict[str, Any]) -> dict[str, bool | None]:
    return {row["check"]: row["passed"] for row in line["findings"]}


def zoo(lines: list[dict[str, Any]]) -> list[str]:
    """How many pipelines each check must find, and how many it did."""
    broken = [line for line in lines if line["kind"] == "broken"]
    sound = [line for line in lines if line["kind"] == "sound"]
    rows = [
        _row("check", "broken pipelines that it must find", "found", "false alarms"),
        _row("---", "---:", "---:", "---:"),
    ]
    for check in audit.CHECKS:
        own = [line for line in broken if line["must_fail"] == check]
        found = sum(_outcomes(line).get(check) is False for line in own)
        alarms = sum(_outcomes(line).get(check) is False for line in sound)
        rows.append(_row(check, len(own), found, f"{alarms} of {len(sound)}"))
    seconds = [line["seconds"] for line in (*broken, *sound)]
    rows.append(
        f"\nSeconds for all checks of a pipeline: median"
        f" {statistics.median(seconds):.1f}, largest {max(seconds):.1f}."
    )
    return rows


def peers(lines: list[dict[str, Any]], opacus: dict[str, Any]) -> list[str]:
    """What is found in steps of other libraries."""
    checks = ("sensitivity", "noise", "state", "sampling")
    rows = [_row("step", *checks), _row("---", *("---" for _ in checks))]
    for line in lines:
        if line["kind"].startswith("jax_privacy"):
            found = _outcomes(line)
            name = f"{line['kind']}, {line['name']}"
            rows.append(_row(name, *(_SIGNS[found[check]] for check in checks)))
    for name, found in opacus.get("findings", {}).items():
        signs = [
            _SIGNS[found["passed"]] if found["check"] == check else "–"
            for check in checks
        ]
        version = opacus["environment"]["opacus"]
        rows.append(_row(f"Opacus {version}, {name}", *signs))
    return rows


def epsilon(lines: list[dict[str, Any]]) -> list[str]:
    """Lower bounds beside the claim, mean and standard deviation over seeds."""
    runs = collections.defaultdict(list)
    for line in lines:
        runs[line["canaries"], line["steps"], line["target_epsilon"]].append(line)

    def cell(found: list[dict[str, Any]], name: str) -> str:
        values = [line[name] for line in found]
        if None in values:
            return "–"
        return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"

    rows = [
        _row("canaries", "steps", "claimed ε", "one run", "error rates", "trade-off"),
        _row("---", "---", "---:", "---:", "---:", "---:"),
    ]
    for (canaries, steps, target), found in sorted(runs.items()):
        bounds = (cell(found, x) for x in ("one_run", "error_rates", "family"))
        rows.append(_row(canaries, steps, f"{target:g}", *bounds))
    failed = sum(not line["passed"] for line in lines)
    rows.append(f"\n{len(lines)} runs; {failed} refuted the claim.")
    return rows


def main() -> None:
    path = FOLDER / "opacus_results.json"
    opacus = json.loads(path.read_text()) if path.exists() else {}
    lines = _lines("results.jsonl")
    tables = zoo(lines), peers(lines, opacus), epsilon(_lines("epsilon.jsonl"))
    print("\n\n".join("\n".join(table) for table in tables))


if __name__ == "__main__":
    main()
