"""Whether a loss on a graph has as many terms of each node as are accounted for."""

import itertools
import math
import warnings
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc._core import jaxprs
from dpadambc.graphs import _subgraphs
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _data


def check(
    traced: jex.ClosedJaxpr,
    params: Any,
    shared: tuple[Any, ...],
    data: Any,
    mechanism: Mechanism,
) -> None:
    """Raises or warns where one node is in more terms than the mechanism knows.

    Args:
      traced: the program of the loss: of the parameters, what all examples share, an
        example, and a key or none.
      params: to train.
      shared: what all examples share.
      data: of all examples.
      mechanism: that accounts for the terms.
    """
    gathers = _subgraphs.gathers(traced.jaxpr)
    _refuse_nodes(gathers, mechanism)
    _warn_of_gaps(gathers, data, mechanism)
    if not gathers or _data.is_source(data):
        return
    num_shared = len(jax.tree.leaves((params, shared)))
    by_table = members_by_table(traced, num_shared, data)
    _check_terms(by_table, mechanism)
    members = list(itertools.chain(*by_table.values()))
    if members and all(map(_data.is_here, jax.tree.leaves((params, shared, data)))):
        _warn_of_other_rows(traced, params, shared, data, members)


def members_by_table(
    traced: jex.ClosedJaxpr, num_shared: int, data: Any
) -> dict[int, list[np.ndarray]]:
    """The arrays of the data that a program gathers members by, as they are.

    By how many rows a table has: those with as many are of the same nodes.
    """
    own = dict(enumerate(jax.tree.leaves(data), start=num_shared))
    found: dict[int, list[np.ndarray]] = {}
    for place, num_nodes in sorted(_subgraphs.members_of(traced.jaxpr)):
        if place in own and _data.is_here(own[place]):
            found.setdefault(num_nodes, []).append(np.asarray(own[place]))
    return found


def check_score(
    loss: jex.ClosedJaxpr,
    traced: jex.ClosedJaxpr,
    num_shared: int,
    data: Any,
    scored: Any,
    *,
    is_public: bool,
) -> None:
    """Raises for a score that has of nodes what its epsilon does not cover.

    Args:
      loss: the program of the loss.
      traced: the program of the score of one example.
      num_shared: how many of the inputs of both are not of the example.
      data: that are trained on.
      scored: the examples of the score.
      is_public: whether the score is said to need no protection.
    """
    if not _subgraphs.gathers(traced.jaxpr):
        return
    if not is_public:
        raise ValueError(
            "Expected a NoisyScore without graphs.gather, got one with it: a node is in"
            " several rows, and would move the score by more than one. Score nodes that"
            " need no protection, by a PublicScore."
        )
    ours = members_by_table(traced, num_shared, scored)
    trained = members_by_table(loss, num_shared, data)
    common = [
        np.intersect1d(x[x >= 0], y[y >= 0])
        for size in ours.keys() & trained.keys()
        for x in ours[size]
        for y in trained[size]
    ]
    num_common = len(np.unique(np.concatenate([*common, []])))
    if num_common or not ours:
        got = f"{num_common} that are" if num_common else "members that may be"
        raise ValueError(
            "Expected a PublicScore that gathers nodes that need no protection, got"
            f" {got} in the subgraphs that are trained on. A prediction reads the"
            " features of neighbors, and the epsilon of a search does not cover it."
            " Make the subgraphs of the score of edges between public nodes alone; and"
            " features that are public need no graphs.gather: index them."
        )


def _refuse_nodes(gathers: bool, mechanism: Mechanism) -> None:
    """Raises for terms of a graph under the epsilon of one term."""
    if gathers and not hasattr(mechanism, "max_terms"):
        raise ValueError(
            "Expected a mechanism of nodes for a loss with graphs.gather, such as"
            " graphs.PoissonGaussian(max_terms=graphs.max_terms(max_memberships), ...),"
            f" got {type(mechanism).__name__}, whose epsilon is for one term of the"
            " sum: a node is in those of several roots. With max_terms=1 it is that of"
            " one term, for subgraphs that share no node. Features that are public need"
            " no graphs.gather: index them, features[members]."
        )


def _check_terms(by_table: dict[int, list[np.ndarray]], mechanism: Mechanism) -> None:
    """Raises where a node is in more terms than the mechanism accounts for.

    Two kinds of edges are two arrays of members, and a node is in the terms of both.
    """
    allowed = getattr(mechanism, "max_terms", math.inf)
    for members in by_table.values():
        most = _subgraphs.most_terms(*members)
        if most > allowed:
            raise ValueError(
                f"Expected each node in at most {allowed} terms, the max_terms of this"
                f" {type(mechanism).__name__}, got one in {most}: its epsilon would not"
                " hold. Give max_terms=graphs.max_terms(max_memberships), which counts"
                " the node's own term too: K of all kinds of edges together, where"
                " there are several. Features that are public need no"
                " graphs.gather: index them, features[members]."
            )


def _warn_of_other_rows(
    traced: jex.ClosedJaxpr,
    params: Any,
    shared: Any,
    data: Any,
    every: list[np.ndarray],
) -> None:
    """Warns where rows of a table that are no members' are in a gradient all the same.

    The mean of all features has each node in every term. What is not a number in those
    rows is none in the gradient then either.
    """
    one = len(every[0]) // 2  # the first has the first node, and the last the last
    members = np.concatenate([x[one].ravel() for x in every])
    num_nodes = _subgraphs.num_nodes(traced.jaxpr)
    example = jax.tree.map(lambda x: jnp.asarray(x[one]), data)
    rest = jax.tree.leaves(example)
    num_inputs = len(traced.jaxpr.invars)
    if num_inputs > len(jax.tree.leaves((params, shared))) + len(rest):
        rest.append(jax.random.key(0))

    def without_others(x):
        is_table = jnp.ndim(x) and len(x) in num_nodes
        if not is_table or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        is_kept = jnp.isin(jnp.arange(len(x)), members)
        return jnp.where(is_kept.reshape(-1, *(jnp.ndim(x) - 1) * [1]), x, jnp.nan)

    def are_finite(change):
        """Whether the gradients are, with the tables changed."""
        loss = jex.jaxpr_as_fun(jaxprs.with_constants(traced, change))
        of = lambda w, x: loss(*jax.tree.leaves((w, jax.tree.map(change, x))), *rest)[0]
        grads = jax.jit(jax.grad(of))(params, shared)
        return np.array([jnp.isfinite(x).all() for x in jax.tree.leaves(grads)])

    with jax.debug_nans(False):
        is_lost = ~are_finite(without_others)
        if is_lost.any():  # or it was none before: to know that costs another program
            is_lost &= are_finite(lambda x: x)
    if is_lost.any():
        warnings.warn(
            "Expected a loss that has of a table of nodes what graphs.gather takes, got"
            " one whose gradient depends on rows that are no members of its subgraph,"
            " such as through the mean of all features. Every node is in every term"
            " then, and max_terms is for the members alone: epsilon does not hold. What"
            " is public of the table compute before, and give it as another array.",
            stacklevel=6,  # of the call of fit
        )


def _warn_of_gaps(gathers: bool, data: Any, mechanism: Mechanism) -> None:
    """Warns where -1 may have taken the last node of a graph for every gap."""
    max_terms = getattr(mechanism, "max_terms", None)
    if gathers or max_terms is None or _data.is_source(data):
        return
    has_gaps = lambda x: (
        jnp.ndim(x) > 1
        and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        and _data.is_here(x)
        and np.min(np.asarray(x), initial=0) < 0
    )
    if any(map(has_gaps, jax.tree.leaves(data))):
        warnings.warn(
            "Expected graphs.gather(features, members) in the loss, got members with"
            " -1 where there is none, and no gather. features[members] takes the last"
            " node for each -1, so that it is in the terms of all roots with a gap, and"
            f" not in the {max_terms} that its epsilon is for.",
            stacklevel=6,  # of the call of fit
        )
