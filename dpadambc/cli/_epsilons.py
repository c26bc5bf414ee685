"""`dpadambc epsilon`, `calibrate` and `meaning`: one mechanism, and what it spends."""

import argparse
import importlib
import math
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc import diagnostics
from dpadambc.accounting import PLD, RDP, TradeOff, trade_off
from dpadambc.cli import _options
from dpadambc.core import validate
from dpadambc.core.clip import NeighboringRelation

ACCOUNTANTS = {None: None, "pld": PLD, "rdp": RDP}
_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
_LEAST_ERROR_RATE = 1e-6


def mechanism(args: argparse.Namespace) -> Any:
    """The mechanism that the options describe."""
    sampling = _options.SAMPLINGS[args.mechanism]
    package = importlib.import_module(f"dpadambc.{sampling.package}")
    cls = getattr(package, sampling.name)
    numbers = {name: getattr(args, name) for name in _options.FIELDS}
    numbers["l2_clip_norm"] = args.clip_norm
    if numbers["normalize_by"] is None and numbers["batch_size"] is None:
        numbers["normalize_by"] = 1.0
    if args.relation is not None:
        relation = NeighboringRelation[args.relation.upper()]
        numbers["neighboring_relation"] = relation
    if args.command != "calibrate":
        return cls.of_epochs(**numbers)
    return cls.calibrate(
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        accountant=ACCOUNTANTS[args.accountant],
        **numbers,
    )


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What is printed, by name."""
    if _options.is_of_a_claim(args):
        return _claim(args)
    wants_picture = args.command == "meaning" and args.picture
    # Before anything is computed: it says what to install.
    pictures = diagnostics.pictures if wants_picture else None
    found = mechanism(args)
    accountant = ACCOUNTANTS[args.accountant] or found.accountants[0]
    sampling = _options.SAMPLINGS[args.mechanism]
    own = (*sampling.needs, *sampling.takes)
    return {
        "epsilon": found.epsilon(
            args.delta, accountant=accountant, num_examples=args.num_examples
        ),
        "delta": args.delta,
        "neighboring_relation": found.neighboring_relation.name,
        "accountant": accountant.name,
        "sampling": args.mechanism,
        "noise_multiplier": found.noise_multiplier,
        **{name: getattr(found, name) for name in own},
        "iterations": found.iterations,
        "l2_clip_norm": found.l2_clip_norm,
        "normalize_by": found.normalize_by,
        "noise_stddev": _noise_stddev(found),
        **(_meaning(args, found, pictures) if args.command == "meaning" else {}),
        "assumed": sampling.assumed + _unit(found),
    }


def _claim(args: argparse.Namespace) -> dict[str, Any]:
    """What an epsilon means of which nothing else is known."""
    validate.non_negative(epsilon=args.epsilon)
    validate.probability(delta=args.delta)
    claim = TradeOff(np.array([args.epsilon]), np.array([args.delta]))
    return {
        "epsilon": args.epsilon,
        "delta": args.delta,
        "true_positive_rates": _true_positive_rates(claim),
        "assumed": "A mechanism of this epsilon hides more: give its numbers in place"
        " of --epsilon.",
    }


def _true_positive_rates(found: TradeOff) -> dict[str, float]:
    reached = found.true_positive_rate(_RATES)
    return {f"{rate:g}": float(x) for rate, x in zip(_RATES, reached, strict=True)}


def _noise_stddev(found: Any) -> Any:
    """One number, or of a schedule the first step's, the largest and the last one's."""
    level = found.noise_stddev
    if not callable(level):
        return level
    steps = jnp.arange(max(found.iterations, 1))
    values = np.asarray(jax.vmap(level)(steps), float).tolist()
    return {"first": values[0], "largest": max(values), "last": values[-1]}


def _unit(found: Any) -> str:
    """What a noise multiplier is of, where it is not of the clip norm.

    Elsewhere it mostly is, and with the noise of that epsilon is larger.
    """
    clip_norms = round(found.sensitivity * found.normalize_by / found.l2_clip_norm)
    if clip_norms == 1:
        return ""
    return (
        f" The noise multiplier is in units of the sensitivity, here {clip_norms} clip"
        f" norms. If yours is in units of the clip norm, divide it by {clip_norms}."
    )


def _meaning(args: argparse.Namespace, found: Any, pictures: Any) -> dict[str, Any]:
    hidden = trade_off(found)
    if pictures:
        figure = pictures.trade_off({args.mechanism: hidden})
        figure.savefig(args.picture, dpi=150)
    return {
        "gaussian_mu": hidden.gaussian_mu(_LEAST_ERROR_RATE),
        "least_error_rate": _LEAST_ERROR_RATE,
        "true_positive_rates": _true_positive_rates(hidden),
    }


def as_text(numbers: dict[str, Any]) -> str:
    """The report for a reader."""
    numbers = dict(numbers)
    line = f"epsilon = {numbers.pop('epsilon'):.4f} at delta = {numbers.pop('delta'):g}"
    if "accountant" in numbers:
        accountant = numbers.pop("accountant").upper()
        line += f" ({numbers.pop('neighboring_relation')}, {accountant})"
    assumed = numbers.pop("assumed")
    meaning = _gaussian_as_text(numbers) if "gaussian_mu" in numbers else []
    if "true_positive_rates" in numbers:
        meaning += _rates_as_text(numbers.pop("true_positive_rates"))
    width = max(map(len, numbers), default=0) + 1
    rows = (
        f"  {k.replace('_', ' '):<{width}} {_value_as_text(v)}"
        for k, v in numbers.items()
    )
    return "\n".join([line, *rows, *meaning, *textwrap.wrap(assumed, 80)])


def _value_as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{number:.6g} ({step})" for step, number in value.items())
    return str(value)


def _gaussian_as_text(numbers: dict[str, Any]) -> list[str]:
    mu, least = numbers.pop("gaussian_mu"), numbers.pop("least_error_rate")
    if mu == math.inf:
        return ["Nothing is hidden: an attacker can be right of everybody."]
    return [
        f"As private as one number with Gaussian noise that an example moves by"
        f" {mu:.3f}",
        f"standard deviations, against attacks with both error rates at least"
        f" {least:g}.",
    ]


def _rates_as_text(rates: dict[str, float]) -> list[str]:
    rows = [f"  {float(rate):>23.2%}  {best:>20.2%}" for rate, best in rates.items()]
    head = f"  {'of those not in the data':>23}  {'of those in it, at most':>20}"
    return ["An attacker takes for members", head, *rows]
