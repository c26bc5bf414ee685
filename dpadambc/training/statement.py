"""What the epsilon of a run says, in words: of whom, and on which assumption."""

import math
import textwrap
from collections.abc import Iterator
from typing import Any

from dpadambc.core.clip import NeighboringRelation
from dpadambc.core.fit import Result
from dpadambc.core.spending import class_name, public_numbers

# The assumption about the batches that the epsilon of a mechanism rests on. By name:
# few programs need graphs.
ASSUMPTIONS = {
    "dpadambc.PoissonGaussian": (
        "Each example takes part in each step independently, with the sampling"
        " probability. Batches of shuffled data are not drawn so."
    ),
    "dpadambc.TruncatedPoissonGaussian": (
        "Poisson sampling of a known number of examples; of a batch that is too large,"
        " a random part is kept."
    ),
    "dpadambc.FixedSizeGaussian": (
        "Each step draws a fresh uniform subset of a known number of examples."
    ),
    "dpadambc.ShuffledGaussian": (
        "Each epoch deals all examples into batches, a smaller one at the end included."
        " The order gets no credit: Poisson sampling spends far less."
    ),
    "dpadambc.RandomAllocationGaussian": (
        "In each epoch each example takes part in random steps of its own. Batches of"
        " shuffled data are not drawn so."
    ),
    "dpadambc.graphs.NodePoissonGaussian": (
        "Each root takes part in each step independently; a node is in at most"
        " max_terms terms of the sum."
    ),
    "dpadambc.graphs.NodeFixedSizeGaussian": (
        "Each step draws a fresh uniform subset of the roots; a node is in at most"
        " max_terms terms of the sum."
    ),
}

_DIFFERENCE = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "added or removed",
    NeighboringRelation.REPLACE_ONE: "replaced by another",
    NeighboringRelation.REPLACE_SPECIAL: "replaced by an empty one",
}


def rounded_up(epsilon: float) -> str:
    """Epsilon to three decimals, and never less than it is."""
    # Less the rounding of the product: 3.0 stays 3.0.
    in_all = 1_000 * epsilon * (1 - 1e-12)
    return f"{math.ceil(in_all) / 1_000:,g}" if math.isfinite(in_all) else "infinity"


def _states(opt_state: Any) -> Iterator[str]:
    """The kinds of state of the transformations in an optimizer."""
    if isinstance(opt_state, dict):
        opt_state = tuple(opt_state.values())
    if isinstance(opt_state, tuple) and opt_state:
        if hasattr(opt_state, "_fields"):
            yield type(opt_state).__name__
        for part in opt_state:
            yield from _states(part)


def of_result(result: Result) -> str:
    """A paragraph for a model card, of public numbers."""
    accounted: Any = result.mechanism.accounted_as
    sampler = class_name(type(accounted))
    numbers = public_numbers(result.mechanism)
    numbers = numbers.pop("inner_mechanism", {}) | numbers
    name = numbers.pop("mechanism")
    planned, relation = numbers.pop("iterations"), accounted.neighboring_relation
    del numbers["neighboring_relation"]
    listed = ", ".join(f"{field} {value}" for field, value in numbers.items())
    states = ", ".join(dict.fromkeys(_states(result.state.opt_state)))
    runs = len(result.spent.runs)
    counted = result.spent.runs[-1].steps
    ends = {
        "iterations": "",
        "budget": " The budget affords no more.",
        "callback": f" A callback stopped it, and epsilon counts {counted:,} steps.",
    }
    unit = (
        "one example: a row of the data, or all rows of a user where"
        " training.group_by_user made an example of them"
    )
    if hasattr(accounted, "max_terms"):
        unit = "one node of the graph, with its features and edges"
    others = f", of {runs} runs on the same people's data" if runs > 1 else ""
    text = (
        f"The model has epsilon {rounded_up(result.epsilon)} at delta"
        f" {result.target_delta:g}{others}. The unit of privacy is {unit}."
        f" Neighboring data sets differ by one that is {_DIFFERENCE[relation]}"
        f" ({relation.name}). Sampling:"
        f" {ASSUMPTIONS.get(sampler, f'batches are drawn by {sampler}.')}"
        f" The run took {result.iterations:,} of {planned:,} steps of {name}, with"
        f" {listed}.{ends[result.stopped_by]} The optimizer of the private gradient"
        f" keeps {states or 'no state, as plain SGD does'}."
    )
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)
