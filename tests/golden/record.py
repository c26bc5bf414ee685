"""Records the numbers of the golden programs, or says which differ from the record.

    python -m tests.golden.record [--check] [--zoo]

Without options it writes `programs.json` and `epsilons.json`. With --check it prints
what differs in its bits, which depend on the processor and the version of JAX. With
--zoo it does the same for the verdicts of the audit on its zoo, which takes minutes.
"""

import argparse
import hashlib
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests import conftest  # noqa: F401, before JAX makes an array: flags of XLA

import jax  # isort: skip
import numpy as np  # isort: skip

from dpadambc import audit
from dpadambc.core import noise, step
from dpadambc.core import programs as core_programs
from tests.golden import epsilons, programs

FOLDER = pathlib.Path(__file__).parent
LEADING = 4


def on_any_machine(fun: Callable[[], Any]) -> Any:
    """What it returns with noise and batches of the keys alone.

    A nonce is made of the bits of a sum, which depend on the processor, and the key of
    the batches of `fit` is made of a program as a release of JAX prints it.
    """
    of_the_key = mock.patch.object(noise, "key_of_step", lambda key, *_: key)
    as_it_is = dict(folded_in=lambda key, _: key)
    with of_the_key, mock.patch.multiple(core_programs, **as_it_is):
        with mock.patch.multiple(step, **as_it_is):
            return fun()


def summary(array: Any) -> dict[str, Any]:
    """The hash of an array, a few of its values and its moments."""
    x = np.asarray(array)
    flat = x.ravel().astype(np.float64)
    digits = lambda value: float(f"{value:.9g}")
    exact = {
        "dtype": str(x.dtype),
        "shape": list(x.shape),
        "sha256": hashlib.sha256(x.tobytes()).hexdigest(),
    }
    if not np.issubdtype(x.dtype, np.floating):
        return exact
    return exact | {
        "leading": [digits(value) for value in flat[:LEADING]],
        "sum": digits(flat.sum()),
        "sum_of_squares": digits((flat**2).sum()),
    }


def of_program(name: str) -> list[dict[str, Any]]:
    """The arrays that a program returns, in the order of its leaves."""
    found = on_any_machine(programs.PROGRAMS[name])
    return [summary(leaf) for leaf in jax.tree.leaves(jax.device_get(found))]


def of_epsilon(name: str) -> float:
    return float(epsilons.table()[name]())


def of_zoo(name: str) -> dict[str, bool | None]:
    """By check: of what is broken the one that must find it, of what is sound all."""
    from tests.audit import zoo

    row = zoo.BROKEN.get(name)
    make = row.make if row else zoo.SOUND[name]
    options = {"checks": [row.check]} if row else {}
    report = audit.run(make(), **options)
    return {finding.check: finding.passed for finding in report.findings}


def tables(with_zoo: bool) -> Iterator[tuple[str, list[str], Callable[[str], Any]]]:
    """The name of each record, its rows, and what computes one."""
    if with_zoo:
        from tests.audit import zoo

        yield "zoo", [*zoo.BROKEN, *zoo.SOUND], of_zoo
        return
    yield "programs", list(programs.PROGRAMS), of_program
    yield "epsilons", list(epsilons.table()), of_epsilon


def made_on() -> dict[str, str]:
    return {"jax": jax.__version__, "machine": platform.machine()}


def read(name: str) -> dict[str, Any]:
    """The rows of a record, and what it was made on."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(name: str, rows: dict[str, Any]) -> None:
    """One line for each row, or for each array of a row."""
    lines = []
    for row, value in rows.items():
        parts = value if isinstance(value, list) else [value]
        text = ",\n".join(f"   {json.dumps(part)}" for part in parts)
        is_list = isinstance(value, list)
        body = f"[\n{text}\n  ]" if is_list else json.dumps(value)
        lines.append(f"  {json.dumps(row)}: {body}")
    head = json.dumps(made_on())
    text = f'{{\n "made_on": {head},\n "rows": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    (FOLDER / f"{name}.json").write_text(text)


def check(name: str, rows: dict[str, Any]) -> list[str]:
    """The rows that differ from the record."""
    recorded = read(name)
    if recorded["made_on"] != made_on():
        print(f"{name}: recorded on {recorded['made_on']}, this is {made_on()}")
    names = dict.fromkeys([*recorded["rows"], *rows])
    return [x for x in names if recorded["rows"].get(x) != rows.get(x)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--zoo", action="store_true", help="the audit's verdicts alone")
    args = parser.parse_args()
    different = []
    for name, rows, compute in tables(args.zoo):
        found = {row: compute(row) for row in rows}
        if not args.check:
            write(name, found)
            continue
        different += [f"{name}: {row} differs" for row in check(name, found)]
        print(f"{name}: {len(found)} rows compared")
    print("\n".join(different))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
