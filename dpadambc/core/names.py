"""Mechanisms and their numbers as JSON can hold them."""

import dataclasses
import enum
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core.clip import ClipRule


def name_of(kind: type) -> str:
    """A class by its package: where in the package it is may change."""
    package = ".".join(kind.__module__.split(".")[:2])
    return f"{package}.{kind.__name__}"


def plain(value: Any) -> Any:
    """A number of any library, several, or a member of an enumeration by its name."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return value.item()
    if isinstance(value, tuple):
        return [plain(x) for x in value]
    return value.name if isinstance(value, enum.Enum) else value


def _number(field: Any) -> Any:
    """A field as JSON can hold it; a schedule and a rule are in the program too."""
    if hasattr(field, "private_gradient"):  # a mechanism inside of another
        return public_numbers(field)
    if isinstance(field, ClipRule):
        return re.sub(" at 0x[0-9a-f]+", "", repr(field))  # of a function
    if callable(field):
        first: Any = field(jnp.zeros([], int))
        return f"a schedule from {float(first):g}"
    return plain(field)


def public_numbers(mechanism: Any) -> dict[str, Any]:
    """The class of a mechanism and every field."""
    fields = dataclasses.fields(mechanism)
    numbers = {f.name: _number(getattr(mechanism, f.name)) for f in fields}
    return {"mechanism": name_of(type(mechanism)), **numbers}
