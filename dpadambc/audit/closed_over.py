"""That no example is in the loss of others, by an array that the step closes over."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import arrays as _arrays
from dpadambc.audit.examined import Examined
from dpadambc.audit.finding import Finding, within

_ROUNDING = 1e-3


def closed_over(found: Examined) -> Finding | None:
    """How far a row of an array that the step closes over moves the clipped sum.

    Only arrays that begin with the examples of the batch are looked at; None if the
    step has none. The example itself does not take part, if the step takes a mask.
    """
    if not found.steps.closes_over_examples:
        return None
    changed = dataclasses.replace(found, steps=found.steps.with_other_first_row(_other))
    size = jax.tree.leaves(found.pipeline.batch)[0].shape[0]
    mask = {"is_padding_example": jnp.arange(size) == 0}
    options = mask if found.pipeline.takes_mask else {}
    before, after = (
        _arrays.flat(jax.jit(x.before_noise)(found.state, *x.pipeline.batch, **options))
        for x in (found, changed)
    )
    distance = float(np.linalg.norm(after - before))
    rounding = 8 * float(np.finfo(np.float32).eps * np.linalg.norm(before))
    allowed = _ROUNDING * found.bound + rounding
    leaks = not distance <= allowed
    sentence = (
        "The step closes over an array that begins with the examples, and a row of it"
        f" moves what others add by {distance / found.bound:.4g} of the bound. Give the"
        " loss public arrays alone; if this one is public, audit with other examples."
        if leaks
        else "The rows of the examples that the step closes over move no other one."
    )
    return within(
        "sensitivity",
        np.inf if np.isnan(distance) else distance,
        allowed,
        sentence,
        "fails if a row of what the step closes over moves what others add",
    )


def _other(row: jax.Array) -> Any:
    return -10 * row - 1
