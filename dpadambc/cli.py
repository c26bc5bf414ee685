"""The command line: `dpadambc epsilon`, `dpadambc calibrate`, `dpadambc audit`."""

import argparse
import importlib
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from dpadambc._core import validate
from dpadambc.audit import report
from dpadambc.audit.pipeline import Pipeline
from dpadambc.clipping.flat import NeighboringRelation
from dpadambc.mechanisms.poisson import PoissonGaussian

_EPILOG = """\
examples:
  dpadambc epsilon --noise-multiplier 1.85 --sampling-prob 0.02048 \\
      --iterations 3360 --delta 1e-5
  dpadambc calibrate --epsilon 3 --delta 1e-5 --batch-size 1024 \\
      --num-examples 50000 --iterations 3360
  dpadambc audit my_training:make_pipeline

Poisson sampling is assumed: each example takes part in each step independently with
the sampling probability. Epochs over shuffled data spend more.
"""

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpadambc",
        description="Accounting and audits of differentially private training.",
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
    audited = commands.add_parser(
        "audit",
        help="check a training pipeline; exits with 1 if a check fails, with 3 if none"
        " does and one was not made",
    )
    audited.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns a dpadambc.audit.Pipeline",
    )
    audited.add_argument(
        "--check",
        action="append",
        choices=report.CHECKS,
        help="only this check; may be given several times",
    )
    audited.add_argument("--json", action="store_true", help="print JSON")
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


def _pipeline(factory: str) -> Pipeline:
    """What `MODULE:FACTORY` makes, from the working directory or an installation."""
    module, _, name = factory.partition(":")
    if not name:
        raise ValueError(f"Expected MODULE:FACTORY, got {factory!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Expected a function {name!r} in {module!r}: {error}.") from (
            error
        )
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(made, Pipeline):
        raise TypeError(
            f"Expected {factory} to return a dpadambc.audit.Pipeline, got {made!r}."
        )
    return made


def _audit(args: argparse.Namespace) -> int:
    """Prints what the checks find; progress goes to the standard error stream."""
    found = report.run(
        _pipeline(args.factory),
        checks=args.check or report.CHECKS,
        progress=lambda text: print(text, file=sys.stderr),
    )
    print(found.to_json() if args.json else found)
    return found.exit_code


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
      0, or 2 for arguments that do not fit, explained on the standard error stream. Of
      an audit, 1 if a check failed, and 3 if none did and one was not made.

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
        if args.command == "audit":
            return _audit(args)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            numbers = _report(args)
    except (TypeError, ValueError) as error:
        print(f"dpadambc: {error}", file=sys.stderr)
        return 2
    for warning in caught:
        print(f"dpadambc: warning: {warning.message}", file=sys.stderr)
    print(_as_json(numbers) if args.json else _as_text(numbers))
    return 0
