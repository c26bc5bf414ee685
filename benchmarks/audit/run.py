"""The audit of the zoo and of jax_privacy's steps: what is found, by which check.

    python -m benchmarks.audit.run [--only NAME ...] [--results FILE]

A broken pipeline runs all checks, so that one sees which find it. A line is written
after each pipeline, and one that is there already is not repeated.
"""

import argparse
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

# Some defects need several devices. Of the host only, and before JAX looks.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

from benchmarks import environment  # noqa: E402
from benchmarks.audit import jax_privacy_steps  # noqa: E402
from dpadambc import audit  # noqa: E402
from tests.audit import zoo  # noqa: E402

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")


def pipelines() -> Iterator[tuple[str, str, str | None, Callable[[], Any]]]:
    """Kind, name, the check that must fail, and what makes the pipeline."""
    for name, row in zoo.BROKEN.items():
        yield "broken", name, row.check, row.make
    for name, make in zoo.SOUND.items():
        yield "sound", name, None, make
    for name, make in jax_privacy_steps.STEPS.items():
        yield "jax_privacy 2.0.0", name, None, make


def measure(make: Callable[[], Any]) -> dict[str, Any]:
    """The findings for a pipeline, without their parts."""
    start = time.perf_counter()
    found = json.loads(audit.run(make()).to_json())["findings"]
    fields = ("check", "passed", "figure", "bound", "sentence", "fails_if")
    findings = [{field: row[field] for field in fields} for row in found]
    return {"findings": findings, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of pipelines")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    text = args.results.read_text() if args.results.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    done = {(line["kind"], line["name"]) for line in lines}
    for kind, name, must_fail, make in pipelines():
        if (kind, name) in done or (args.only and name not in args.only):
            continue
        own = {"kind": kind, "name": name, "must_fail": must_fail}
        line: dict[str, Any] = (
            own | measure(make) | {"environment": environment.environment()}
        )
        with args.results.open("a") as file:
            print(json.dumps(line), file=file)
        outcomes = {row["check"]: row["passed"] for row in line["findings"]}
        print(kind, name, outcomes, f"{line['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
