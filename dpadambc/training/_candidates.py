"""What a search chooses among: numbers, or several numbers by name."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import validate

# A number, or several by name: what `make_optimizer` is called with.
Candidate = float | dict[str, float]


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Candidates as arrays, one entry each."""

    listed: tuple[Candidate, ...]
    numbers: Any  # a pytree of arrays of shape (number of candidates,)

    @classmethod
    def of(cls, candidates: Any) -> "Candidates":
        """Raises unless they are numbers, all under the same names."""
        listed = tuple(candidates) if isinstance(candidates, Sequence) else ()
        if not listed or isinstance(candidates, str):
            raise TypeError(
                "Expected candidates as a list of numbers, or of dictionaries of"
                f" numbers by name, got {candidates!r}."
            )
        structures = {jax.tree.structure(each) for each in listed}
        names = {tuple(each) if isinstance(each, dict) else None for each in listed}
        if len(structures) > 1 or any(map(_is_nested, listed)):
            raise ValueError(
                "Expected candidates that are all numbers, or all dictionaries of"
                f" numbers by the same names, got {sorted(map(str, names))}. A"
                " setting that is no number needs another program: fix it, and search"
                " over numbers."
            )
        for leaf in jax.tree.leaves(listed):
            _check_number(leaf)
        # On the host: no program has the shape of what is taken of them.
        as_jax_has_them = lambda *x: np.asarray(jnp.asarray(x))
        return cls(listed, jax.tree.map(as_jax_has_them, *listed))


def _is_nested(candidate: Any) -> bool:
    values = candidate.values() if isinstance(candidate, dict) else [candidate]
    return any(jax.tree.structure(x) != jax.tree.structure(0) for x in values)


def _check_number(value: Any) -> None:
    if (
        isinstance(value, bool | np.bool_)
        or validate.known_number("candidates", value) is None
    ):
        raise TypeError(
            f"Expected every hyperparameter of a candidate to be a number, got {value}."
        )


def made(make_optimizer: Callable[..., Any], candidate: Any) -> Any:
    """The optimizer of a candidate; an error says that its numbers are traced."""
    try:
        if isinstance(candidate, dict):
            return make_optimizer(**candidate)
        return make_optimizer(candidate)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "A search compiles one program for all candidates, so make_optimizer gets"
            " their numbers traced, and nothing in it may branch on them. Schedules of"
            " Optax do, some of them, on their peak. Make one with a peak of 1, and"
            " multiply it: lambda step: learning_rate * schedule(step)."
        )
        raise
    except TypeError as error:
        if isinstance(candidate, dict):
            error.add_note(
                "A candidate that is a dictionary is given by name:"
                f" make_optimizer({', '.join(f'{name}=...' for name in candidate)})."
            )
        raise
