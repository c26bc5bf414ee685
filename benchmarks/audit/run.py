"""The audit of the zoo and of steps of other libraries: what is found, by which check.

    python -m benchmarks.audit.run [--run] [--method NAME ...]

A broken pipeline runs all checks, so that one sees which find it. The zoo is that of
the tests. Steps of jax_privacy and of Opacus are audited where these are installed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown
from dpadambc import audit

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
PEERS = {"jax_privacy": "jax_privacy", "opacus": "Opacus"}  # packages, and their names
_SIGNS = {True: "pass", False: "**FAIL**", None: "–"}


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    # Some defects need several devices. Of the host only, and before JAX looks.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    from tests.audit import zoo

    of = lambda kind, name, *setting: Cell(
        name, None, None, {"kind": kind, "name": name}, setting
    )
    for name, row in zoo.BROKEN.items():
        yield of("broken", name, row.check, row.make)
    for name, make in zoo.SOUND.items():
        yield of("sound", name, None, make)
    for package, name_of_package in PEERS.items():
        if importlib.util.find_spec(package):
            kind = f"{name_of_package} {importlib.metadata.version(package)}"
            module = importlib.import_module(f"benchmarks.audit.{package}_steps")
            for name, make in module.STEPS.items():
                yield of(kind, name, None, make)


def measure(cell: Cell) -> Row:
    """The findings for a pipeline, or the one that is made, without their parts."""
    must_fail, make = cell.setting
    start, made = time.perf_counter(), make()
    report = (
        audit.run(made) if isinstance(made, audit.Pipeline) else audit.Report((made,))
    )
    found = json.loads(report.to_json())["findings"]
    fields = ("check", "passed", "figure", "bound", "sentence", "fails_if")
    findings = [{field: row[field] for field in fields} for row in found]
    seconds = time.perf_counter() - start
    return {"must_fail": must_fail, "findings": findings, "seconds": seconds}


def _outcomes(row: Row) -> dict[str, bool | None]:
    return {finding["check"]: finding["passed"] for finding in row["findings"]}


def of_zoo(rows: Sequence[Row]) -> str:
    """How many pipelines each check must find, and how many it did."""
    broken, sound = ([r for r in rows if r["kind"] == x] for x in ("broken", "sound"))
    failures = lambda rows, check: sum(_outcomes(r).get(check) is False for r in rows)
    body = []
    for check in audit.CHECKS:
        own = [row for row in broken if row["must_fail"] == check]
        alarms = f"{failures(sound, check)} of {len(sound)}"
        body.append([check, str(len(own)), str(failures(own, check)), alarms])
    head = ["check", "broken pipelines that it must find", "found", "false alarms"]
    seconds = [row["seconds"] for row in (*broken, *sound)]
    return (
        f"{markdown(head, body)}\n\nSeconds for all checks of a pipeline: median"
        f" {statistics.median(seconds):.1f}, largest {max(seconds):.1f}."
    )


def of_peers(rows: Sequence[Row]) -> str:
    """The outcomes for steps of other libraries."""
    checks = ("sensitivity", "noise", "state", "sampling")
    signs = lambda row: (_SIGNS[_outcomes(row).get(check)] for check in checks)
    body = [[f"{row['kind']}, {row['name']}", *signs(row)] for row in rows]
    return markdown(["step", *checks], body, num_left=5)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    zoo = [row for row in rows if row["kind"] in ("broken", "sound")]
    peers = [row for row in rows if row not in zoo]
    return {"zoo": of_zoo(zoo), "peers": of_peers(peers)}


STUDY = Study(RESULTS, cells, lambda arguments: measure, tables, needs_data=False)

if __name__ == "__main__":
    STUDY.main(__doc__)
