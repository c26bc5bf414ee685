"""The command line: `dpadambc plan`, `epsilon`, `calibrate`, `meaning` and `audit`.

What computes is imported by the command that needs it: help and wrong options do not
wait for JAX.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from dpadambc.cli import _options

__all__ = ["main"]


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return "inf" if value == math.inf else value


def _compute(args: argparse.Namespace) -> str:
    """What the command prints."""
    if args.command == "plan":
        from dpadambc.cli import _plans as command
    else:
        from dpadambc.cli import _epsilons as command
    numbers = command.report(args)
    if args.json:
        return json.dumps(_finite(numbers), indent=2)
    return command.as_text(numbers)


def _run(args: argparse.Namespace) -> int:
    _options.check(args)
    if args.command == "audit":
        from dpadambc.cli import _audits

        return _audits.run(args)
    print(_compute(args))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      0, or 2 for arguments that do not fit, explained on the standard error stream. Of
      an audit, 1 if a check failed, and 3 if none did and one was not made.

    Raises:
      SystemExit: for arguments that cannot be parsed, and after --help.

    Example:
      >>> from dpadambc import cli
      >>> status = cli.main([
      ...     "plan", "--epsilon", "1", "8", "--batch-size", "512", "--epochs", "2",
      ...     "--num-examples", "10000", "--delta", "1e-5", "--accountant", "rdp"])
      10,000 examples, delta = 1e-05 (ADD_OR_REMOVE_ONE, RDP, Poisson sampling)
      epochs  epsilon  batch size  sampling prob  steps  noise multiplier  noise stddev
           2        1         512        0.05120     40            1.7611       0.00344
           2        8         512        0.05120     40            0.6580       0.00129
      noise stddev: in the mean gradient, in units of the clip norm.
      Each example takes part in each step independently: draw the batches so. Epochs
      over shuffled data spend more: see --compare.
    """
    args = _options.parser().parse_args(argv)
    try:
        return _run(args)
    except (ModuleNotFoundError, OSError, TypeError, ValueError) as error:
        print(f"dpadambc: {error}", file=sys.stderr)
        return 2
