"""CPU time, memory and tightness of this library's accounting.

    python -m benchmarks.accounting.run [--accountants NAME ...] [--missing]

`peers_run` does the same where the peers are installed.
"""

import argparse
import pathlib

from benchmarks import environment
from benchmarks.accounting import measuring, ours, process

RESULTS = pathlib.Path(__file__).with_name("results.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = list(ours.ACCOUNTANTS)
    parser.add_argument("--accountants", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--missing", action="store_true", help="what is not recorded")
    parser.add_argument("--repeats", type=int, default=process.REPEATS)
    args = parser.parse_args()
    where = lambda name: environment.environment()
    measuring.record(
        ours.__name__,
        args.accountants,
        where,
        args.output,
        missing=args.missing,
        repeats=args.repeats,
    )


if __name__ == "__main__":
    main()
