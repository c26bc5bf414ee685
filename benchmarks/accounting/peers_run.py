"""The accountants of other libraries; for an interpreter that has some of them.

    python -m benchmarks.accounting.peers_run [--accountants NAME ...] [--missing]

It needs NumPy and SciPy, and not this library. What is measured again replaces what was
recorded, so that several interpreters fill one file.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
from typing import Any

from benchmarks import environment
from benchmarks.accounting import measuring, peers, process

RESULTS = pathlib.Path(__file__).with_name("peers_results.json")


def _library(name: str) -> tuple[str, str]:
    return peers.LIBRARIES[name.split(",")[0]]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _where(name: str) -> dict[str, Any]:
    packages = ("numpy", "scipy", _library(name)[0])
    return {
        "date": datetime.date.today().isoformat(),
        "processor": environment.processor(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def main() -> None:
    installed = [name for name in peers.ACCOUNTANTS if _is_installed(_library(name)[1])]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--accountants", nargs="+", choices=installed, default=installed
    )
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--missing", action="store_true", help="what is not recorded")
    parser.add_argument("--repeats", type=int, default=process.REPEATS)
    args = parser.parse_args()
    names = args.accountants
    modules = [_library(name)[1] for name in names]
    measuring.record(
        peers.__name__,
        names,
        _where,
        args.output,
        missing=args.missing,
        repeats=args.repeats,
        imports=modules,
    )


if __name__ == "__main__":
    main()
