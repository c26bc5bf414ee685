"""The command line: `dpadambc epsilon ...` and `dpadambc calibrate ...`."""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from dpadambc._core import validate
from dpadambc.clipping.flat import NeighboringRelation
from dpadambc.mechanisms.poisson import PoissonGaussian

_EPILOG = """\
examples:
  dpadambc epsilon --noise-multiplier 1.85 --sampling-prob 0.02048 \\
      --iterations 3360 --delta 1e-5
  dpadambc calibrate --epsilon 3 --delta 1e-5 --batch-size 1024 \\
      --num-examples 50000 --iterations 3360

Poisson sampling is assumed: each example takes part in each step independently with
the sampling probability. Epochs over shuffled data spend more.
"""

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpadambc",
        description="Privacy accounting for differentially private training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    epsilon = commands.add_parser("epsilon", help="the epsilon that training spends")
    calibrate = commands.add_parser(
        "calibrate",
        help="solve for the noise multiplier, iterations or sampling probability,"
        " whichever is left out",
    )
    calibrate.add_argument("--epsilon", type=float, required=True, help="the target")
    for command in (epsilon, calibrate):
        _add_mechanism_arguments(command)
    return parser


def _add_mechanism_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--delta", type=float, required=True, help="delta, well below 1/num_examples")
    add("--noise-multiplier", type=float, help="noise over sensitivity")
    add("--sampling-prob", type=float, help="the probability of taking part in a step")
    add("--batch-size", type=float, help="expected batch size, with --num-examples")
    add("--num-examples", type=int, help="size of the data set")
    add("--iterations", type=int, help="number of steps")
    add("--clip-norm", type=float, default=1.0, help="for the noise's unit (default 1)")
    add(
        "--normalize-by",
        type=float,
        help="what the sum is divided by (default: --batch-size, or 1)",
    )
    add("--accountant", choices=("pld", "rdp"), default="pld", help="default: pld")
    add(
        "--relation",
        choices=[relation.name.lower() for relation in NeighboringRelation],
        default=NeighboringRelation.ADD_OR_REMOVE_ONE.name.lower(),
        help="what neighboring data sets differ in (default: add_or_remove_one)",
    )
    add("--json", action="store_true", help="print JSON")


def _public_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `PoissonGaussian`, None where one was left out."""
    sampling_prob, batch_size = args.sampling_prob, args.batch_size
    if batch_size is not None:
        if sampling_prob is not None or not args.num_examples:
            raise ValueError(
                "Expected --batch-size with --num-examples, in place of"
                " --sampling-prob."
            )
        validate.positive(batch_size=batch_size)
        sampling_prob = batch_size / args.num_examples
    normalize_by = args.normalize_by
    if normalize_by is None:
        normalize_by = 1.0 if batch_size is None else batch_size
    return {
        "l2_clip_norm": args.clip_norm,
        "noise_multiplier": args.noise_multiplier,
        "sampling_prob": sampling_prob,
        "iterations": args.iterations,
        "normalize_by": normalize_by,
        "neighboring_relation": NeighboringRelation[args.relation.upper()],
    }


def _mechanism(args: argparse.Namespace) -> PoissonGaussian:
    numbers = _public_numbers(args)
    if args.command == "calibrate":
        return PoissonGaussian.calibrate(
            target_epsilon=args.epsilon,
            target_delta=args.delta,
            accountant=args.accountant,
            **numbers,
        )
    missing = [f"--{k.replace('_', '-')}" for k, v in numbers.items() if v is None]
    if missing:
        raise ValueError(f"Expected {', '.join(missing)} to be given.")
    return PoissonGaussian(**numbers)


def _report(args: argparse.Namespace) -> dict[str, Any]:
    mechanism = _mechanism(args)
    return {
        "epsilon": mechanism.epsilon(
            args.delta, accountant=args.accountant, num_examples=args.num_examples
        ),
        "delta": args.delta,
        "neighboring_relation": mechanism.neighboring_relation.name,
        "accountant": args.accountant,
        "sampling": "poisson",
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_prob": mechanism.sampling_prob,
        "iterations": mechanism.iterations,
        "l2_clip_norm": mechanism.l2_clip_norm,
        "normalize_by": mechanism.normalize_by,
        "noise_stddev": mechanism.noise_stddev,
    }


def _as_text(report: dict[str, Any]) -> str:
    lines = [
        f"epsilon = {report['epsilon']:.4f} at delta = {report['delta']:g}"
        f" ({report['neighboring_relation']}, {report['accountant'].upper()})"
    ]
    names = list(report)
    for name in names[names.index("sampling") :]:
        lines.append(f"  {name.replace('_', ' '):<17} {report[name]}")
    return "\n".join(lines)


def _as_json(report: dict[str, Any]) -> str:
    # JSON has no infinity.
    return json.dumps(
        {k: "inf" if v == math.inf else v for k, v in report.items()}, indent=2
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      0, or 2 for numbers that do not fit, explained on the standard error stream.

    Raises:
      SystemExit: for arguments that cannot be parsed, and after --help.

    Example:
      >>> from dpadambc import cli
      >>> status = cli.main([
      ...     "epsilon", "--noise-multiplier", "2", "--sampling-prob", "0.1",
      ...     "--iterations", "100", "--delta", "1e-5"])
      epsilon = 2.3375 at delta = 1e-05 (ADD_OR_REMOVE_ONE, PLD)
        sampling          poisson
        noise multiplier  2.0
        sampling prob     0.1
        iterations        100
        l2 clip norm      1.0
        normalize by      1.0
        noise stddev      2.0
    """
    args = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = _report(args)
    except (TypeError, ValueError) as error:
        print(f"dpadambc: {error}", file=sys.stderr)
        return 2
    for warning in caught:
        print(f"dpadambc: warning: {warning.message}", file=sys.stderr)
    print(_as_json(report) if args.json else _as_text(report))
    return 0
