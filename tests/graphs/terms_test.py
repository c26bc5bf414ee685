"""A node is in no more terms of the sum than its mechanism accounts for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc import graphs
from tests.attacks import (
    BATCH,
    MECHANISM,
    PARAMS,
    C,
    X,
    clipped_grad,
    distance,
    fit,
    linear,
    one_replaced,
    square,
)

pytestmark = pytest.mark.guarantee
NODES = jnp.arange(BATCH)
WITH_FIRST = jnp.stack([NODES, 0 * NODES], 1)
WITH_GAP = jnp.stack([NODES, 0 * NODES - 1], 1)
WITH_NEXT = jnp.stack([NODES, (NODES + 1) % BATCH], 1)


def of_nodes(max_terms):
    fields = dataclasses.fields(MECHANISM)
    numbers = {field.name: getattr(MECHANISM, field.name) for field in fields}
    return graphs.NodePoissonGaussian(max_terms=max_terms, **numbers)


def gathered(w, members):
    return square(w, graphs.gather(X, members).sum(0))


def refused(**options):
    with pytest.raises(ValueError, match="max_terms"):
        fit(**options)


def test_a15_subgraphs_are_refused_with_a_mechanism_of_examples():
    in_cond = lambda w, i: jax.lax.cond(w[0] > 2, gathered, jax.jit(gathered), w, i)
    turns = lambda i: jax.lax.while_loop(
        lambda n: n < jnp.minimum(jnp.abs(graphs.gather(X, i)).sum(), 3),
        *(lambda n: n + 1, 0),
    )
    in_while = lambda w, i: square(w, turns(i) * jnp.ones(len(w)))
    for loss in (gathered, jax.checkpoint(gathered), in_cond, in_while):
        refused(loss_fn=loss, data=(WITH_FIRST,))
    fit(loss_fn=gathered, data=(WITH_FIRST,), mechanism=of_nodes(BATCH))
    assert of_nodes(BATCH).sensitivity > 100 * MECHANISM.sensitivity
    # Public features, of which no node is protected: an index, and no gather.
    fit(loss_fn=lambda w, i: square(w, X[i].sum(0)), data=(WITH_FIRST,))


class OfRoots:
    """A source of subgraphs, one root each."""

    def __init__(self, subgraphs):
        self.subgraphs = subgraphs

    def __len__(self):
        return len(self.subgraphs.members)

    def __getitem__(self, index):
        return (jax.tree.map(lambda x: x[index], self.subgraphs),)


def bounded(max_memberships):
    """Each root with the next one, or alone."""
    edges = map(np.asarray, (NODES, (NODES + 1) % BATCH, NODES))
    return graphs.subgraphs(*edges, max_memberships=max_memberships, max_degree=2)


GATHER = lambda w, of: gathered(w, of.members)
INDEX = lambda w, of: square(w, X[of.members].sum(0))


def test_a15_subgraphs_of_more_terms_than_are_accounted_for_are_refused():
    """By their type: of arrays and of a source, gathered or not."""
    found = bounded(2)
    for data in ((found,), OfRoots(found)):
        refused(loss_fn=GATHER, data=data, mechanism=of_nodes(2))
        refused(loss_fn=INDEX, data=data)
        fit(loss_fn=GATHER, data=data, mechanism=of_nodes(3))
    replaced = dataclasses.replace(found, max_terms=5)  # nodes that get another list
    refused(loss_fn=GATHER, data=(replaced,), mechanism=of_nodes(4))
    # Nor are subgraphs of fewer, or arrays of members, of which the caller knows.
    fit(loss_fn=GATHER, data=(found,), mechanism=of_nodes(4))
    fit(loss_fn=INDEX, data=(bounded(0),))
    fit(loss_fn=lambda w, i: square(w, X[i].sum(0)), data=(found.members,))


def test_a15_terms_of_two_kinds_of_edges_add_up():
    """If they are of the same roots, the second says so by one term less."""
    one, other = bounded(2), bounded(1)
    loss = lambda w, i, j: INDEX(w, i) + INDEX(w, j)
    refused(loss_fn=loss, data=(one, other), mechanism=of_nodes(4))
    fit(loss_fn=loss, data=(one, other), mechanism=of_nodes(5))
    other = dataclasses.replace(other, max_terms=1)
    fit(loss_fn=loss, data=(one, other), mechanism=of_nodes(4))


def moved_by(features, members, low, high):
    """How far the clipped sum of the terms of others moves with the table."""
    total = lambda table: clipped_grad(lambda w, i: linear(w, features(table, i)))(
        PARAMS, members
    )
    return distance(total(low), total(high))


def last(value):
    return X.at[-1].set(value)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "moves"), [(1.0, True), (0.0, False)])
def test_a15_the_mean_of_all_features_moved_all_terms(whole, moves):
    """Negative control: the last node is in two terms, which are left out."""
    features = lambda table, i: graphs.gather(table, i).sum(0) + whole * table.mean(0)
    moved = moved_by(features, WITH_NEXT[1:-2], last(1e6), last(-1e6))
    assert moved > 10 * C if moves else moved == 0


@pytest.mark.slow
def test_a15_an_index_moved_all_terms():
    """Negative control: an index of -1 is the last node."""
    for take, moves in ((lambda table, i: table[i], True), (graphs.gather, False)):
        features = lambda table, i, take=take: take(table, i).sum(0)
        moved = moved_by(features, WITH_GAP[:-1], last(1e3), last(-1e3))
        assert moved > 10 * C if moves else moved == 0


def test_a15_one_node_moved_all_terms():
    """Negative control: node 0 is in all terms."""
    features = lambda table, i: graphs.gather(table, i).sum(0)
    tables = one_replaced(1e3), one_replaced(-1e3)
    assert moved_by(features, WITH_FIRST[1:], *tables) > 10 * C
