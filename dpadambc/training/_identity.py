"""What tells a run from others: its public numbers, and checksums of the rest."""

import dataclasses
import hashlib
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.clipping import rules
from dpadambc.mechanisms import _names
from dpadambc.mechanisms.accounting import Spending
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _keys


def _number(field: Any) -> Any:
    """A field as JSON can hold it; a schedule and a rule are in the program too."""
    if isinstance(field, rules.ClipRule):
        return re.sub(" at 0x[0-9a-f]+", "", repr(field))  # of a function
    if callable(field):
        first: Any = field(jnp.zeros([], int))
        return f"a schedule from {float(first):g}"
    return _names.plain(field)


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
    fields = dataclasses.fields(mechanism)  # pyright: ignore[reportArgumentType]
    numbers = {f.name: _number(getattr(mechanism, f.name)) for f in fields}
    # Two packages have a PoissonGaussian.
    return {"mechanism": _names.name_of(type(mechanism)), **numbers}


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
    return {"key": name_of_key(key), _ENTROPY: _keys.is_from_entropy(key)}


def name_of_key(key: jax.Array) -> str:
    """What tells a key from others, *secret* as it is."""
    words = np.asarray(jax.random.key_data(key)).tobytes()
    name = f"{jax.random.key_impl(key)} ".encode()
    return hashlib.sha256(name + words).hexdigest()[:16]


_EARLIER = "spent_before"
_NUMBERS = "numbers"
_ENTROPY = "key_of_entropy"
_MISSING = "nothing"
# What an identity has a checksum of.
_MEANING = {
    "program": "with other operations, or other constants in them",
    "data": "with other examples",
    "frozen": "with other numbers in what is frozen",
    "start": "with other parameters or another state of the optimizer",
    "functions": "with other code in the loss or the optimizer",
    "batches": "as this version or configuration of JAX draws them",
    "key": "which would draw other batches and other noise",
}
_MAY_DIFFER = "iterations", _NUMBERS, _ENTROPY
_OF_NUMBERS = {"program", "start", "functions"}  # where one with a name may say more


def _differing(there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """What is there and what is here, by name."""
    pairs = {
        name: (there.get(name, _MISSING), here.get(name, _MISSING))
        for name in {**there, **here}
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def numbers_apart(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """One line for each number in a closure or a state that is not the same."""
    apart = _differing(there.get(_NUMBERS, {}), here.get(_NUMBERS, {}))
    return [f"{name}: {a} there, {b} here" for name, (a, b) in apart.items()]


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """One line for each thing that is not the same in two identities.

    Where the program differs, its numbers that do are named, as far as they have names.
    How many steps a run was to have is no difference: a run may be extended.
    """
    apart = _differing(there, here)
    # Who begins with `secret_key`, and goes on with it, means the run and not a key.
    if there.get(_ENTROPY) and here.get(_ENTROPY):
        apart.pop("key", None)
    for name in _MAY_DIFFER:
        apart.pop(name, None)
    if "program" in apart:
        apart.pop("functions", None)
    numbers = numbers_apart(there, here) if _OF_NUMBERS & set(apart) else []
    lines = [*numbers]
    for name, (a, b) in apart.items():
        if name not in _MEANING:
            lines.append(f"{name}: {a} there, {b} here")
        elif not (numbers and name in _OF_NUMBERS):
            lines.append(f"{name}: another, {_MEANING[name]}")
    return lines
