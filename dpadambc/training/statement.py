"""The statement of a run's epsilon in words: its unit and its assumptions."""

import math
import textwrap
from collections.abc import Iterator
from typing import Any

from dpadambc.core.clip import NeighboringRelation
from dpadambc.core.fit import Result
from dpadambc.core.spending import class_name, public_numbers

# The assumption about batches behind the epsilon of each mechanism. The keys are names,
# since few programs import graphs.
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
    """Rounds epsilon up to three decimals."""
    # Subtract the rounding of the product, so that 3.0 stays 3.0.
    in_all = 1_000 * epsilon * (1 - 1e-12)
    return f"{math.ceil(in_all) / 1_000:,g}" if math.isfinite(in_all) else "infinity"


def _states(opt_state: Any) -> Iterator[str]:
    """Yields the names of the state classes in an optimizer's state."""
    if isinstance(opt_state, dict):
        opt_state = tuple(opt_state.values())
    if isinstance(opt_state, tuple) and opt_state:
        if hasattr(opt_state, "_fields"):
            yield type(opt_state).__name__
        for part in opt_state:
            yield from _states(part)


def _guarantee(mechanism: Any, epsilon: float, delta: float, others: str = "") -> str:
    """States epsilon with its unit of privacy and its assumption on sampling."""
    accounted = mechanism.accounted_as
    sampler, relation = class_name(type(accounted)), accounted.neighboring_relation
    unit = (
        "one example: a row of the data, or all rows of a user where"
        " training.group_by_user made an example of them"
    )
    if hasattr(accounted, "max_terms"):
        unit = "one node of the graph, with its features and edges"
    return (
        f"The model has epsilon {rounded_up(epsilon)} at delta {delta:g}{others}. The"
        f" unit of privacy is {unit}. Neighboring data sets differ by one that is"
        f" {_DIFFERENCE[relation]} ({relation.name}). Sampling:"
        f" {ASSUMPTIONS.get(sampler, f'batches are drawn by {sampler}.')}"
    )


def _steps(mechanism: Any) -> str:
    """Lists the steps of a mechanism, with its public numbers."""
    numbers = public_numbers(mechanism)
    numbers = numbers.pop("inner_mechanism", {}) | numbers
    name, steps = numbers.pop("mechanism"), numbers.pop("iterations")
    del numbers["neighboring_relation"]
    listed = ", ".join(f"{field} {value}" for field, value in numbers.items())
    return f"{steps:,} steps of {name}, with {listed}"


def _filled(text: str) -> str:
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


def of_result(result: Result) -> str:
    """Writes a paragraph for a model card, of public numbers."""
    states = ", ".join(dict.fromkeys(_states(result.state.opt_state)))
    runs, counted = len(result.spent.runs), result.spent.runs[-1].steps
    ends = {
        "iterations": "",
        "budget": " The budget affords no more.",
        "callback": f" A callback stopped it, and epsilon counts {counted:,} steps.",
    }
    others = f", of {runs} runs on the same people's data" if runs > 1 else ""
    cost = result.mechanism, result.epsilon, result.target_delta
    return _filled(
        f"{_guarantee(*cost, others)} The run took {result.iterations:,} of"
        f" {_steps(result.mechanism)}.{ends[result.stopped_by]} The optimizer of the"
        f" private gradient keeps {states or 'no state, as plain SGD does'}."
    )


def of_search(found: Any) -> str:
    """Writes the paragraph for the best model of a search."""
    return _filled(
        f"{_guarantee(found.mechanism, found.epsilon, found.target_delta)} It is the"
        f" best of a search, by trials={found.trials!r}, whose choice epsilon covers,"
        f" with {'none' if found.all_trials is None else 'all'} of the other models."
        " Each trial took"
        f" {_steps(found.mechanism)}; one alone has epsilon"
        f" {rounded_up(found.cost.of_one_trial)}."
    )
