"""The command line: `dpadambc epsilon`, `calibrate` and `plan`."""

import argparse
import dataclasses
import difflib
import json
import operator
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import dpadambc
from dpadambc import NeighboringRelation, accounting, graphs
from dpadambc.accounting.records import finite
from dpadambc.clipping.plan import aligned
from dpadambc.core.spending import class_name
from dpadambc.training.statement import ASSUMPTIONS

__all__ = ["main"]

_EPILOG = """\
examples:
  dpadambc plan --epsilon 1 3 8 --batch-size 256 1024 4096 --epochs 30 \\
      --num-examples 60000 --delta 1e-6
  dpadambc epsilon --noise-multiplier 1.85 --sampling-prob 0.02048 \\
      --iterations 3360 --delta 1e-5
  dpadambc calibrate --epsilon 3 --delta 1e-5 --batch-size 1024 \\
      --num-examples 50000 --epochs 60

Poisson sampling is the default: each example takes part in each step independently.
Epochs over shuffled data spend more: see --mechanism shuffled.
"""

# The words of --mechanism.
_MECHANISMS: dict[str, Any] = {
    "poisson": dpadambc.PoissonGaussian,
    "truncated-poisson": dpadambc.TruncatedPoissonGaussian,
    "fixed-size": dpadambc.FixedSizeGaussian,
    "shuffled": dpadambc.ShuffledGaussian,
    "random-allocation": dpadambc.RandomAllocationGaussian,
    "graph-poisson": graphs.NodePoissonGaussian,
    "graph-fixed-size": graphs.NodeFixedSizeGaussian,
}


def _number(text: str) -> float | int:
    """Reads a number, a whole one as an int, for counts; 60,000 and 6e4 are whole."""
    if re.fullmatch(r"\d{1,3}(,000)+", text):  # 256,102 may be two numbers
        text = text.replace(",", "")
    value = float(text)
    return int(value) if value.is_integer() else value


def _count(text: str) -> int:
    value = _number(text)
    if not isinstance(value, int):
        raise argparse.ArgumentTypeError(f"Expected a whole number, got {text}.")
    return value


_ACCOUNTANTS = {"pld": accounting.PLD, "rdp": accounting.RDP, None: None}

# The fields of mechanisms, and the numbers in place of some of them.
_FIELDS = {
    "noise_multiplier": (float, "noise over sensitivity"),
    "sampling_prob": (float, "the probability of taking part in a step"),
    "batch_size": (_number, "examples in a step, on average where batches are drawn"),
    "num_examples": (_count, "size of the data set"),
    "epochs": (float, "in place of --iterations"),
    "iterations": (_count, "number of steps"),
    "batches_per_epoch": (_count, "number of steps in an epoch"),
    "participations": (_count, "in how many steps of an epoch an example takes part"),
    "truncated_batch_size": (_count, "the largest batch"),
    "max_terms": (_count, "the most terms of the sum that a node is in"),
    "normalize_by": (float, "divisor of the sum (default: --batch-size, or 1)"),
}
_INSTEAD = {
    "epochs": {"iterations"},
    "batch_size": {"sampling_prob", "batches_per_epoch"},
}
_SOLVABLE = {"noise_multiplier", "iterations", "sampling_prob"}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Command(argparse.ArgumentParser):
    """The parser of one command, which names the option that a misspelled one means."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Looks for misspelled options first, since some may be missing for that."""
        known = set(re.findall(r"--[a-z-]+", self.format_usage()))
        for text in args:
            name = text.partition("=")[0]
            is_known = any(option.startswith(name) for option in known)
            near = difflib.get_close_matches(name, known, 1, 0.7)
            if name.startswith("--") and near and not is_known:
                self.error(f"Expected {near[0]}, got {name}. Rename it.")
        return super().parse_known_args(args, namespace)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="dpadambc",
        description="Plans and accounting of differentially private training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"dpadambc {dpadambc.__version__}"
    made.add_argument("--version", action="version", version=version)
    commands = made.add_subparsers(dest="command", required=True, parser_class=_Command)
    plan = commands.add_parser("plan", help="the noise for several budgets")
    epsilon = commands.add_parser("epsilon", help="the epsilon that training spends")
    solves = "solve for the noise multiplier, iterations or sampling probability,"
    solves += " whichever is left out"
    calibrate = commands.add_parser("calibrate", help=solves)
    calibrate.add_argument("--epsilon", type=float, required=True, help="the target")
    add = plan.add_argument
    add("--epsilon", type=float, nargs="+", required=True, help="targets")
    add("--batch-size", type=_count, nargs="+", required=True, help="expected sizes")
    add("--epochs", type=float, nargs="+", required=True, help="one number or several")
    add("--num-examples", type=_count, required=True, help="size of the data set")
    for command in (epsilon, calibrate):
        add, how = command.add_argument, "how batches are drawn (default: poisson)"
        add("--mechanism", choices=tuple(_MECHANISMS), default="poisson", help=how)
        for name, (kind, text) in _FIELDS.items():
            add(_option(name), type=kind, help=text)
        add("--clip-norm", type=float, default=1.0, help="default: 1")
        command.set_defaults(report=_spent, as_text=_spent_as_text)
    plan.set_defaults(report=_plan, as_text=_plan_as_text)
    relations = [relation.name.lower() for relation in NeighboringRelation]
    differ = "how neighboring data sets differ (default: that of the mechanism)"
    tightest = "default: the tightest that knows the sampling"
    for command in (plan, epsilon, calibrate):
        add = command.add_argument
        add("--delta", type=float, required=True, help="well below 1 / num_examples")
        add("--relation", choices=relations, help=differ)
        add("--accountant", choices=("pld", "rdp"), help=tightest)
        add("--json", action="store_true", help="print JSON")
    return made


def _check_fields(args: argparse.Namespace, fields: Sequence[Any]) -> None:
    """Raises for options that the mechanism does not have, or that are missing."""
    given = {name for name in _FIELDS if getattr(args, name) is not None}
    names = {field.name for field in fields} | {"epochs", "batch_size", "num_examples"}
    listed = lambda names: ", ".join(map(_option, (x for x in _FIELDS if x in names)))
    if given - names:
        raise ValueError(
            f"Expected {listed(names)} for --mechanism {args.mechanism}, got"
            f" {listed(given - names)}."
        )
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    missing = needed - given - {"l2_clip_norm", "normalize_by"}
    missing -= set().union(*(_INSTEAD.get(name, ()) for name in given))
    if args.command == "calibrate":
        missing -= _SOLVABLE
    if missing:
        raise ValueError(f"Expected {listed(missing)} to be given.")


def _mechanism(args: argparse.Namespace) -> Any:
    """The mechanism that the options describe, calibrated if they ask for that."""
    cls = _MECHANISMS[args.mechanism]
    _check_fields(args, dataclasses.fields(cls))
    numbers = {name: getattr(args, name) for name in _FIELDS}
    numbers["l2_clip_norm"] = args.clip_norm
    if args.normalize_by is None and args.batch_size is None:
        numbers["normalize_by"] = 1.0
    if args.relation is not None:
        numbers["neighboring_relation"] = NeighboringRelation[args.relation.upper()]
    if args.command == "epsilon":
        return cls.of_epochs(**numbers)
    numbers |= dict(target_epsilon=args.epsilon, target_delta=args.delta)
    return cls.calibrate(accountant=_ACCOUNTANTS[args.accountant], **numbers)


def _unit(mechanism: Any) -> str:
    """Explains the unit of the noise, if the sensitivity is not the clip norm."""
    sensitivity = mechanism.sensitivity * mechanism.normalize_by
    clip_norms = round(sensitivity / mechanism.l2_clip_norm)
    if clip_norms == 1:
        return ""
    return (
        f" The noise multiplier is in units of the sensitivity, here {clip_norms} clip"
        f" norms. If yours is in units of the clip norm, divide it by {clip_norms}."
    )


def _spent(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the report of `epsilon` and `calibrate`."""
    mechanism = _mechanism(args)
    accountant = _ACCOUNTANTS[args.accountant] or mechanism.accountants[0]
    how = dict(accountant=accountant, num_examples=args.num_examples)
    names = {field.name for field in dataclasses.fields(mechanism)}
    return {
        "epsilon": mechanism.epsilon(args.delta, **how),
        "delta": args.delta,
        "neighboring_relation": mechanism.neighboring_relation.name,
        "accountant": accountant.name,
        "sampling": args.mechanism,
        **{name: getattr(mechanism, name) for name in _FIELDS if name in names},
        "l2_clip_norm": mechanism.l2_clip_norm,
        "noise_stddev": mechanism.noise_stddev,
        "assumed": ASSUMPTIONS[class_name(type(mechanism))] + _unit(mechanism),
    }


# These are in the first and the last line of a report; the rest is its table.
_STATED = "epsilon", "delta", "neighboring_relation", "accountant", "assumed"


def _spent_as_text(numbers: dict[str, Any]) -> str:
    rows = dict(numbers)
    epsilon, delta, relation, accountant, assumed = (rows.pop(x) for x in _STATED)
    stated_by = f"({relation}, {accountant.upper()})"
    first = f"epsilon = {epsilon:.4f} at delta = {delta:g} {stated_by}"
    width = max(map(len, rows)) + 1
    lines = [f"  {name.replace('_', ' '):<{width}} {x}" for name, x in rows.items()]
    return "\n".join([first, *lines, *textwrap.wrap(assumed, 80)])


# For each column of a plan: its title, its format, and the attribute of `PlannedRun`.
_COLUMNS = {
    "epochs": ("epochs", "{:g}", "epochs"),
    "epsilon": ("epsilon", "{:g}", "target_epsilon"),
    "batch_size": ("batch size", "{}", "batch_size"),
    "sampling_prob": ("sampling prob", "{:.5f}", "mechanism.sampling_prob"),
    "iterations": ("steps", "{}", "mechanism.iterations"),
    "noise_multiplier": ("noise multiplier", "{:.4f}", "mechanism.noise_multiplier"),
    "noise_stddev": ("noise stddev", "{:.3g}", "noise_stddev"),
}


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the report of `plan`."""
    relation = NeighboringRelation[(args.relation or "add_or_remove_one").upper()]
    planned = accounting.plan(
        target_epsilons=args.epsilon,
        target_delta=args.delta,
        batch_sizes=args.batch_size,
        epochs=args.epochs,
        num_examples=args.num_examples,
        neighboring_relation=relation,
        accountant=_ACCOUNTANTS[args.accountant],
    )
    values = operator.attrgetter(*(path for _, _, path in _COLUMNS.values()))
    return {
        "delta": args.delta,
        "num_examples": args.num_examples,
        "neighboring_relation": relation.name,
        "accountant": planned[0].accountant.name,
        "sampling": "poisson",
        "rows": [dict(zip(_COLUMNS, values(run), strict=True)) for run in planned],
    }


def _plan_as_text(numbers: dict[str, Any]) -> str:
    table = [[title for title, _, _ in _COLUMNS.values()]]
    for row in numbers["rows"]:
        table.append([shape.format(row[x]) for x, (_, shape, _) in _COLUMNS.items()])
    lines = [
        f"{numbers['num_examples']:,} examples, delta = {numbers['delta']:g}"
        f" ({numbers['neighboring_relation']}, {numbers['accountant'].upper()},"
        " Poisson sampling)",
        *aligned(table, num_left=0),
        "noise stddev: in the mean gradient, in units of the clip norm.",
    ]
    assumed = ASSUMPTIONS[class_name(dpadambc.PoissonGaussian)]
    return "\n".join([*lines, *textwrap.wrap(assumed, 80)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      0, or 2 for arguments that do not fit, explained on the standard error stream.

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
      Each example takes part in each step independently, with the sampling
      probability. Batches of shuffled data are not drawn so.
    """
    args = _parser().parse_args(argv)
    try:
        numbers = args.report(args)
    except (TypeError, ValueError) as error:
        print(f"dpadambc: {error}", file=sys.stderr)
        return 2
    print(json.dumps(finite(numbers), indent=2) if args.json else args.as_text(numbers))
    return 0
