"""What is not the same in two runs, for a message."""

from typing import Any

_NUMBERS = "numbers"
ENTROPY = "key_of_entropy"  # whether a key is drawn from it
_MISSING = "nothing"
# What an identity has a checksum of.
_MEANING = {
    "program": "with other operations, such as those of another microbatch_size, or"
    " other constants in them",
    "loss_and_optimizer": "with other operations, or other constants in them",
    "derivatives": "with another derivative of its own in the loss",
    "data": "with other examples",
    "scored": "scored by other examples",
    "score": "scored by another function",
    "frozen": "with other numbers in what is frozen",
    "start": "with other parameters or another state of the optimizer",
    "functions": "with other code, or other constants, in the loss or the optimizer",
    "params": "with other parameters",
    "noise": "by another schedule or rule of clipping",
    "level": "of another level or with other coefficients",
    "batches": "as this version or configuration of JAX draws them",
    "key": "which would draw other batches and other noise",
}
_MAY_DIFFER = "iterations", _NUMBERS, ENTROPY
# What the one tells, it tells better: two functions may differ by a word alone.
# A program is of a whole step. What is traced is the loss and the optimizer alone.
_TELLS = {
    "program": {"functions", "noise"},
    "loss_and_optimizer": {"functions"},
    "start": {"params"},
}
# Where a number with a name may say more.
_OF_NUMBERS = {"program", "loss_and_optimizer", "start", "functions"}


def _differing(there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """What is there and what is here, by name."""
    pairs = {
        name: (there.get(name, _MISSING), here.get(name, _MISSING))
        for name in {**there, **here}
    }
    return {name: pair for name, pair in pairs.items() if not _is_same(*pair)}


def _is_same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)  # NaN is what it was


def of_numbers(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """One line for each number in a closure or a state that is not the same."""
    apart = _differing(there.get(_NUMBERS, {}), here.get(_NUMBERS, {}))
    return [f"{name}: {a} there, {b} here" for name, (a, b) in apart.items()]


def of_identities(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """One line for each thing that is not the same in two identities.

    Where the program differs, its numbers that do are named, as far as they have names.
    How many steps a run was to have is no difference: a run may be extended.
    """
    left_out = {*_MAY_DIFFER}
    # Who begins with `secret_key`, and goes on with it, means the run and not a key.
    if there.get(ENTROPY) and here.get(ENTROPY):
        left_out.add("key")
    for name in _TELLS.keys() & there.keys() & here.keys():
        left_out |= _TELLS[name]
    every = _differing(there, here)
    apart = {name: pair for name, pair in every.items() if name not in left_out}
    numbers = of_numbers(there, here) if _OF_NUMBERS & set(apart) else []
    lines = [*numbers]
    for name, (a, b) in apart.items():
        if name not in _MEANING:
            lines.append(f"{name}: {a} there, {b} here")
        elif not (numbers and name in _OF_NUMBERS):
            lines.append(f"{name}: another, {_MEANING[name]}")
    return list(dict.fromkeys(lines))  # a number may be in a closure, too
