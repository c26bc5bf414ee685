"""Whether a loss on a graph has as many terms of each node as are accounted for."""

import dataclasses
import itertools
import math
import warnings
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc.graphs import _gathers, _subgraphs
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _data, _other_rows


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
    gathers = _gathers.are_in(traced.jaxpr)
    _refuse_nodes(gathers, mechanism)
    _warn_of_gaps(gathers, data, mechanism)
    if not gathers or _data.is_source(data):
        return
    num_shared = len(jax.tree.leaves((params, shared)))
    several = kinds_of_nodes(traced, num_shared, data)
    _check_terms(several, mechanism)
    members = [x for kind in several for x in kind.members]
    if members and all(map(_data.is_here, jax.tree.leaves((params, shared, data)))):
        _warn_of_other_rows(traced, params, shared, data, members)


@dataclasses.dataclass
class Kind:
    """Nodes of one kind, as far as that can be told.

    Attributes:
      num_nodes: how many rows tables of them have.
      made_of: what tables of them are made of.
      members: the arrays of the data that they are gathered by.
    """

    num_nodes: set[int]
    made_of: set[int | str]
    members: list[np.ndarray]

    def is_of(self, other: "Kind") -> bool:
        """Whether both have tables of one length, or made of the same."""
        return bool(self.num_nodes & other.num_nodes or self.made_of & other.made_of)


def kinds_of_nodes(traced: jex.ClosedJaxpr, num_shared: int, data: Any) -> list[Kind]:
    """The kinds of nodes of a program, gathered by arrays of the data as they are."""
    own = dict(enumerate(jax.tree.leaves(data), start=num_shared))
    kinds: list[Kind] = []
    for call in sorted(set(_gathers.in_program(traced)), key=str):
        if call.members not in own or not _data.is_here(own[call.members]):
            continue
        members = np.asarray(own[call.members])
        new = Kind({call.num_nodes}, {*call.made_of}, [members])
        for known in [kind for kind in kinds if kind.is_of(new)]:
            kinds.remove(known)
            new.num_nodes |= known.num_nodes
            new.made_of |= known.made_of
            new.members += known.members
        kinds.append(new)
    return kinds


def without_members(traced: jex.ClosedJaxpr, num_shared: int, data: Any) -> Any:
    """The arrays of the data that a program gathers nothing by; all, if it does not."""
    members = {call.members for call in _gathers.in_program(traced)}
    if not members:
        return data
    leaves = enumerate(jax.tree.leaves(data), start=num_shared)
    return [x for place, x in leaves if place not in members]


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
    if not _gathers.are_in(traced.jaxpr):
        return
    if not is_public:
        raise ValueError(
            "Expected a NoisyScore without graphs.gather, got one with it: a node is in"
            " several rows, and would move the score by more than one. Score nodes that"
            " need no protection, by a PublicScore."
        )
    ours = kinds_of_nodes(traced, num_shared, scored)
    trained = kinds_of_nodes(loss, num_shared, data)
    common = [
        np.intersect1d(x[x >= 0], y[y >= 0])
        for own, other in itertools.product(ours, trained)
        if own.num_nodes & other.num_nodes
        for x, y in itertools.product(own.members, other.members)
    ]
    num_common = len(np.unique(np.concatenate([*common, []])))
    if num_common or not ours:
        got = f"{num_common} that are" if num_common else "members that may be"
        raise ValueError(
            "Expected a PublicScore that gathers nodes that need no protection, got"
            f" {got} in the subgraphs that are trained on. A prediction reads the"
            " features of neighbors, and the epsilon of a search does not cover it."
            " Make the subgraphs of the score of edges between public nodes alone; and"
            " features that are public need no graphs.gather: index them. Nodes of two"
            " tables of one length are taken for the same: give one a row of padding."
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


def _check_terms(kinds: list[Kind], mechanism: Mechanism) -> None:
    """Raises where a node is in more terms than the mechanism accounts for.

    Two kinds of edges are two arrays of members, and a node is in the terms of both.
    """
    allowed = getattr(mechanism, "max_terms", math.inf)
    for kind in kinds:
        most = _subgraphs.most_terms(*kind.members)
        if most > allowed:
            raise ValueError(
                f"Expected each node in at most {allowed} terms, the max_terms of this"
                f" {type(mechanism).__name__}, got one in {most}: its epsilon would not"
                " hold. Give max_terms=graphs.max_terms(max_memberships), which counts"
                " the node's own term too: K of all kinds of edges together, where"
                " there are several. Features that are public need no"
                " graphs.gather: index them, features[members]. Two kinds of nodes with"
                " tables of one length are taken for one: give one a row of padding."
            )


def _warn_of_other_rows(
    traced: jex.ClosedJaxpr,
    params: Any,
    shared: Any,
    data: Any,
    every: list[np.ndarray],
) -> None:
    """Warns where the mean of all features, or the like, is in the term of a root."""
    one = len(every[0]) // 2  # the first has the first node, and the last the last
    members = np.concatenate([x[one].ravel() for x in every])
    example = jax.tree.map(lambda x: jnp.asarray(x[one]), data)
    if _other_rows.are_used(traced, params, shared, example, members):
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
