"""What tells a run from others: its public numbers, and checksums of the rest."""

import json
from typing import Any

import jax

from dpadambc._core import differences, keys
from dpadambc.mechanisms import _names
from dpadambc.mechanisms.accounting import Spending
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _keys

_EARLIER = "spent_before"


def public_numbers(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism by name: its class and every field.

    Args:
      mechanism: the public numbers, such as a `PoissonGaussian`.

    Returns:
      A dictionary that JSON can hold. Of a schedule it has the first value, as text,
      and of a rule of clipping what it prints.

    Example:
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> numbers = training.public_numbers(mechanism)
      >>> numbers["mechanism"], numbers["noise_multiplier"], numbers["iterations"]
      ('dpadambc.mechanisms.PoissonGaussian', 1.0, 4)
    """
    return _names.public_numbers(mechanism)


def of_earlier(earlier: Spending | None) -> dict[str, Any]:
    """What was spent before a run, and is in its epsilon; nothing where there is none.

    As text, which is the same after JSON.
    """
    return {} if earlier is None else {_EARLIER: json.dumps(earlier.to_json())}


def check_earlier(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises if one run counts other earlier runs than the other."""
    pair = there.get(_EARLIER), here.get(_EARLIER)
    if pair[0] == pair[1]:
        return
    named = [repr(_read(text)) if text else "nothing" for text in pair]
    raise ValueError(
        f"Expected the spent= that the run of the checkpoint began with, {named[0]},"
        f" got {named[1]}. Its epsilon counts that and all steps of the run itself, so"
        " do not give those. To add an earlier run that was forgotten then, compose it"
        " with the result: dpadambc.mechanisms.accounting.compose."
    )


def _read(text: str) -> Any:
    try:
        return Spending.from_json(json.loads(text))
    except ValueError:  # a mechanism that this process does not know
        return text


def of_key(key: jax.Array) -> dict[str, Any]:
    """With which key a run began."""
    return {"key": keys.name_of(key), differences.ENTROPY: _keys.is_from_entropy(key)}
