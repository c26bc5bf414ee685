"""The options of the command line. Nothing here waits for JAX."""

import argparse
import dataclasses
import importlib.metadata
import pathlib
import re

RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")
CHECKS = (
    "sensitivity",
    "noise",
    "state",
    "isolation",
    "factored",
    "sampling",
    "correction",
)
_PICTURES = (".png", ".pdf", ".svg")
_EPILOG = """\
examples:
  dpadambc plan --epsilon 1 3 8 --batch-size 256 1024 4096 --epochs 30 \\
      --num-examples 60000 --delta 1e-6
  dpadambc epsilon --noise-multiplier 1.85 --sampling-prob 0.02048 \\
      --iterations 3360 --delta 1e-5
  dpadambc calibrate --epsilon 3 --delta 1e-5 --batch-size 1024 \\
      --num-examples 50000 --epochs 60
  dpadambc meaning --mechanism shuffled --noise-multiplier 8 --batch-size 1024 \\
      --num-examples 50000 --epochs 10 --delta 1e-6
  dpadambc meaning --epsilon 3 --delta 1e-5
  dpadambc audit my_training:make_pipeline

Poisson sampling is assumed unless --mechanism says otherwise: each example takes part
in each step independently with the sampling probability. Epochs over shuffled data
spend more.
"""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A way to draw batches: its mechanism, and what that needs and assumes."""

    package: str
    name: str
    needs: tuple[str, ...]
    assumed: str
    takes: tuple[str, ...] = ()


_PER_NODE = " A node of a graph is in at most so many terms of the sum."
SAMPLINGS = {
    "poisson": Sampling(
        "mechanisms",
        "PoissonGaussian",
        ("sampling_prob",),
        "Each example takes part in each step independently, with the sampling"
        " probability. Batches that are dealt from shuffled data are not drawn so.",
    ),
    "truncated-poisson": Sampling(
        "mechanisms",
        "TruncatedPoissonGaussian",
        ("sampling_prob", "truncated_batch_size", "num_examples"),
        "Poisson sampling; of a batch that is too large, a random part is kept."
        " Neighbors have the same number of examples, which is taken as known.",
    ),
    "fixed-size": Sampling(
        "mechanisms",
        "FixedSizeGaussian",
        ("batch_size", "num_examples"),
        "Each step draws a fresh uniform subset without replacement; neighbors have the"
        " same number of examples, which is taken as known.",
    ),
    "shuffled": Sampling(
        "mechanisms",
        "ShuffledGaussian",
        ("batch_size", "num_examples"),
        "Each epoch deals all examples into batches, a smaller one at the end included:"
        " for a loader that drops that, give the number of examples that it keeps. The"
        " order is given no credit, as if the attacker knew it: this is not the epsilon"
        " of Poisson sampling, which is far smaller.",
    ),
    "random-allocation": Sampling(
        "mechanisms",
        "RandomAllocationGaussian",
        ("batches_per_epoch",),
        "In each epoch each example takes part in random steps of its own,"
        " independently of the others. Batches of one size that are dealt from shuffled"
        " data are not drawn so.",
        takes=("participations",),
    ),
    "correlated": Sampling(
        "mechanisms",
        "CorrelatedGaussian",
        ("noising_coefficients", "batches_per_epoch"),
        "Each example is dealt once, at random, into one batch of an epoch, and all"
        " epochs have the same order, which is given no credit. Later steps take back a"
        " part of the noise: independent noise of that level is not for this epsilon.",
    ),
    "banded": Sampling(
        "mechanisms",
        "BandedGaussian",
        ("strategy_coefficients", "sampling_prob"),
        "As many parts of the data as the strategy has coefficients take turns, and"
        " each example of the part takes part independently, with the sampling"
        " probability. Later steps take back a part of the noise: independent noise of"
        " that level is not for this epsilon, and neither are other batches.",
    ),
    "graph-poisson": Sampling(
        "graphs",
        "NodePoissonGaussian",
        ("max_terms", "sampling_prob"),
        "Each root takes part in each step independently, with the sampling"
        " probability." + _PER_NODE,
    ),
    "graph-fixed-size": Sampling(
        "graphs",
        "NodeFixedSizeGaussian",
        ("max_terms", "batch_size", "num_examples"),
        "Each step draws a fresh uniform subset of the roots without replacement."
        + _PER_NODE,
    ),
}


def number(text: str) -> float | int:
    """A whole number as an int, so that it may be a count; 60,000 and 6e4 are."""
    if re.fullmatch(r"\d{1,3}(,000)+", text):  # 256,102 may be two numbers
        text = text.replace(",", "")
    try:
        return int(text)
    except ValueError:
        value = float(text)
    return int(value) if value.is_integer() else value


def count(text: str) -> int:
    """A whole number."""
    value = number(text)
    if not isinstance(value, int):
        raise argparse.ArgumentTypeError(f"Expected a whole number, got {text}.")
    return value


# The fields of mechanisms, and what may stand in their place.
_FIELDS = {
    "noise_multiplier": (float, "noise over sensitivity"),
    "sampling_prob": (float, "the probability of taking part in a step"),
    "batch_size": (number, "examples in a step, on average where batches are drawn"),
    "num_examples": (count, "size of the data set"),
    "epochs": (float, "in place of --iterations"),
    "iterations": (count, "number of steps"),
    "batches_per_epoch": (count, "number of steps in an epoch"),
    "participations": (count, "in how many steps of an epoch an example takes part"),
    "truncated_batch_size": (count, "the largest batch"),
    "max_terms": (count, "the most terms of the sum that a node is in"),
    "noising_coefficients": (float, "shares of earlier noise, such as 1 -0.9"),
    "strategy_coefficients": (float, "of a banded strategy, such as 1 0.5 0.375"),
    "normalize_by": (float, "what the sum is divided by (default: --batch-size, or 1)"),
}
FIELDS = tuple(_FIELDS)
_OF_SEVERAL_NUMBERS = {"noising_coefficients", "strategy_coefficients"}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    made = argparse.ArgumentParser(
        prog="dpadambc",
        description="Plans, accounting and audits of differentially private training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("dpadambc")
    made.add_argument("--version", action="version", version=f"dpadambc {version}")
    commands = made.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    epsilon = commands.add_parser("epsilon", help="the epsilon that training spends")
    calibrate = commands.add_parser(
        "calibrate",
        help="solve for the noise multiplier, iterations or sampling probability,"
        " whichever is left out",
    )
    calibrate.add_argument("--epsilon", type=float, required=True, help="the target")
    meaning = commands.add_parser(
        "meaning", help="how well an attacker can tell who was in the data"
    )
    for command in (epsilon, calibrate, meaning):
        _add_mechanism(command)
        _add_accounting(command)
    for command in (epsilon, calibrate):
        _add_accountant(command)
    # Rényi divergences do not say what attackers reach.
    meaning.set_defaults(accountant="pld")
    meaning.add_argument(
        "--epsilon", type=float, help="of a claim, of which no mechanism is known"
    )
    meaning.add_argument("--picture", metavar="FILE", help="draw it, to a .png or .pdf")
    _add_audit(commands)
    return made


def _add_plan(commands) -> None:
    command = commands.add_parser(
        "plan", help="the noise for several budgets and batch sizes"
    )
    add = command.add_argument
    add("--epsilon", type=float, nargs="+", required=True, help="targets")
    add("--batch-size", type=count, nargs="+", required=True, help="expected sizes")
    add("--epochs", type=float, nargs="+", required=True, help="one number or several")
    add("--num-examples", type=count, required=True, help="size of the data set")
    add(
        "--compare",
        action="store_true",
        help="what the same noise spends by other samplings and accountants",
    )
    add("--picture", metavar="FILE", help="draw it, to a .png or .pdf")
    _add_accounting(command)
    _add_accountant(command)


def _add_mechanism(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--mechanism",
        choices=tuple(SAMPLINGS),
        default="poisson",
        help="how batches are drawn (default: poisson)",
    )
    for name, (kind, text) in _FIELDS.items():
        nargs = "+" if name in _OF_SEVERAL_NUMBERS else None
        add(option(name), type=kind, help=text, nargs=nargs)
    add("--clip-norm", type=float, default=1.0, help="for the noise's unit (default 1)")


def _add_accounting(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--delta", type=float, help="required; well below 1 / num_examples")
    add(
        "--relation",
        choices=RELATIONS,
        help="what neighboring data sets differ in (default: that of the mechanism,"
        " add_or_remove_one for poisson)",
    )
    add("--json", action="store_true", help="print JSON")


def _add_accountant(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--accountant",
        choices=("pld", "rdp"),
        help="default: the tightest that knows the sampling",
    )


def _add_audit(commands) -> None:
    command = commands.add_parser(
        "audit",
        help="check a training pipeline; exits with 1 if a check fails, with 3 if none"
        " fails but one could not be made",
    )
    command.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns a dpadambc.audit.Pipeline",
    )
    command.add_argument(
        "--check",
        action="append",
        choices=CHECKS,
        help="only this check; may be given several times",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def option(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def check(args: argparse.Namespace) -> None:
    """Raises a ValueError for options that cannot fit, before anything is imported."""
    if args.command == "audit":
        return
    _check_picture(getattr(args, "picture", None))
    if args.delta is None:
        such_as = (
            f", such as {0.1 / args.num_examples:.0e}" if args.num_examples else ""
        )
        raise ValueError(
            "Expected --delta to be given: no value of it suits all data. Take one well"
            f" below 1 / num_examples{such_as}."
        )
    if args.command != "plan":
        _check_fields(args)
    elif args.picture and len(args.epochs) > 1:
        raise ValueError(
            "Expected one number of --epochs with --picture, got"
            f" {len(args.epochs)}. Draw one picture for each."
        )


def _check_picture(path: str | None) -> None:
    """Raises where it could not be written once it is drawn."""
    if path is None:
        return
    if pathlib.Path(path).suffix.lower() not in _PICTURES:
        raise ValueError(
            f"Expected --picture to end in one of {', '.join(_PICTURES)}, got {path}."
        )
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise ValueError(f"Expected --picture in a folder that exists, got {path}.")


def _check_fields(args: argparse.Namespace) -> None:
    sampling = SAMPLINGS[args.mechanism]
    given = {name for name in FIELDS if getattr(args, name) is not None}
    if is_of_a_claim(args):
        if given or args.picture:
            raise ValueError(
                "Expected --epsilon and --delta alone, or a mechanism without"
                f" --epsilon, got {_listed(given) or '--picture'} too."
            )
        return
    needs = {
        "noise_multiplier",
        "iterations",
        "normalize_by",
        *sampling.needs,
    }
    anywhere = {"epochs", "batch_size", "num_examples"}
    foreign = given - needs - anywhere - set(sampling.takes)
    if foreign:
        raise ValueError(
            f"Expected {_listed(needs)} for --mechanism {args.mechanism}, got"
            f" {_listed(foreign)}."
        )
    instead = {
        "epochs": {"iterations"},
        "batch_size": {"sampling_prob", "batches_per_epoch"},
    }
    missing = needs - given - {"normalize_by"}
    missing -= set().union(*(instead.get(name, ()) for name in given))
    if args.command == "calibrate":
        missing -= {"noise_multiplier", "iterations", "sampling_prob"}
    if missing:
        raise ValueError(f"Expected {_listed(missing)} to be given.")


def is_of_a_claim(args: argparse.Namespace) -> bool:
    """Whether an epsilon is to be explained that nothing else is known of."""
    return args.command == "meaning" and args.epsilon is not None


def _listed(names: set[str]) -> str:
    return ", ".join(option(name) for name in FIELDS if name in names)
