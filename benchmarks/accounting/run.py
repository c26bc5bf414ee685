"""CPU time, memory and tightness of this library's accounting.

    python -m benchmarks.accounting.run [--accountants NAME ...] [--output FILE]

Two to three minutes. `peers_run` does the same where the peers are installed.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import optax

import dpadambc
from benchmarks import environment
from benchmarks.accounting import exact, process, settings
from benchmarks.accounting.settings import Setting

RESULTS = pathlib.Path(__file__).with_name("results.json")

_CLASSES = {
    "poisson": dpadambc.PoissonGaussian,
    "fixed": dpadambc.FixedSizeGaussian,
    "node": dpadambc.graphs.PoissonGaussian,
}


def public_numbers(setting: Setting) -> dict[str, Any]:
    """The fields of the mechanism of a setting."""
    noise = setting.noise_multiplier
    if setting.linear_to is not None:
        noise = optax.linear_schedule(noise, setting.linear_to, setting.iterations)
    numbers = {
        "l2_clip_norm": 1.0,
        "noise_multiplier": noise,
        "iterations": setting.iterations,
        "normalize_by": setting.batch_size,
        "neighboring_relation": dpadambc.NeighboringRelation[setting.relation],
    }
    if setting.kind == "fixed":
        sizes = ("batch_size", "num_examples")
        return numbers | {name: getattr(setting, name) for name in sizes}
    if setting.kind == "node":
        numbers["max_terms"] = setting.max_terms
    return numbers | {"sampling_prob": setting.rate}


def account(setting: Setting, accountant: Any = None) -> float | None:
    """Epsilon, or the noise multiplier that meets the target."""
    numbers, mechanism = public_numbers(setting), _CLASSES[setting.kind]
    deltas = {"target_delta": setting.delta, "accountant": accountant}
    no_rdp = setting.relation == "REPLACE_ONE" and setting.kind == "poisson"
    if accountant == "rdp" and no_rdp:
        return None
    if setting.target is None:
        return mechanism(**numbers).epsilon(**deltas)
    found = mechanism.calibrate(target_epsilon=setting.target, **deltas, **numbers)
    return found.noise_multiplier


ACCOUNTANTS: dict[str, process.Accountant] = {
    "dpadambc": account,
    "dpadambc, RDP": functools.partial(account, accountant="rdp"),
}


def measure(
    module: str, name: str, grid: Sequence[Setting] = settings.ALL
) -> dict[str, process.Row]:
    """One accountant of a module on all settings that it can account for."""
    rows = {}
    for setting in grid:
        row = process.measure(module, name, setting)
        if "value" in row and setting.target is not None:
            # What the noise that it found really spends, from below.
            row["epsilon"] = exact.epsilon_bounds(setting, row["value"])[0]
        if row:
            rows[setting.name] = row
            print(f"{name}, {setting.name}: {row}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--accountants", nargs="+", choices=ACCOUNTANTS)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    module = "benchmarks.accounting.run"
    process.prepare(module)
    results: dict[str, Any] = {"accountants": {}}
    if args.output.exists():
        results = json.loads(args.output.read_text())
    for name in args.accountants or ACCOUNTANTS:
        where = {"environment": environment.environment()}
        rows = {"settings": measure(module, name)}
        results["accountants"][name] = where | rows
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
