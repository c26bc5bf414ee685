"""A node is in no more terms of the sum than its mechanism accounts for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
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


def of_nodes(max_terms):
    numbers = {
        f.name: getattr(MECHANISM, f.name) for f in dataclasses.fields(MECHANISM)
    }
    return dpadambc.graphs.NodePoissonGaussian(max_terms=max_terms, **numbers)


def test_a15_subgraphs_are_refused_with_a_mechanism_of_examples():
    members = jnp.stack([jnp.arange(BATCH), jnp.zeros(BATCH, int)], 1)
    gathered = lambda w, i: square(w, dpadambc.graphs.gather(X, i).sum(0))
    in_cond = lambda w, i: jax.lax.cond(w[0] > 2, gathered, jax.jit(gathered), w, i)
    turns = lambda i: jax.lax.while_loop(
        lambda n: n < jnp.minimum(jnp.abs(dpadambc.graphs.gather(X, i)).sum(), 3),
        *(lambda n: n + 1, 0),
    )
    in_while = lambda w, i: square(w, turns(i) * jnp.ones(len(w)))
    for loss in (gathered, jax.checkpoint(gathered), in_cond, in_while):
        with pytest.raises(ValueError, match="Expected a mechanism of nodes.*max_term"):
            fit(loss_fn=loss, data=(members,))
    fit(loss_fn=gathered, data=(members,), mechanism=of_nodes(BATCH))
    assert of_nodes(BATCH).sensitivity > 100 * MECHANISM.sensitivity
    # Public features, of which no node is protected: an index, and no gather.
    fit(loss_fn=lambda w, i: square(w, X[i].sum(0)), data=(members,))


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
    nodes = np.arange(BATCH)
    return dpadambc.graphs.subgraphs(
        *(nodes, (nodes + 1) % BATCH, nodes),
        max_memberships=max_memberships,
        max_degree=2,
    )


def test_a15_subgraphs_of_more_terms_than_are_accounted_for_are_refused():
    """By their type: of arrays and of a source, gathered or not."""
    found = bounded(2)
    gather = lambda w, of: square(w, dpadambc.graphs.gather(X, of.members).sum(0))
    indexed = lambda w, of: square(w, X[of.members].sum(0))
    for data in ((found,), OfRoots(found)):
        with pytest.raises(ValueError, match="at most 2 terms.*, got 3. Give it max_t"):
            fit(loss_fn=gather, data=data, mechanism=of_nodes(2))
        with pytest.raises(ValueError, match="at most 1 terms in all, which this Pois"):
            fit(loss_fn=indexed, data=data)
    replaced = dataclasses.replace(found, max_terms=5)  # nodes that get another list
    with pytest.raises(ValueError, match="at most 4 terms.*, got 5"):
        fit(loss_fn=gather, data=(replaced,), mechanism=of_nodes(4))


def test_a15_subgraphs_of_as_many_terms_are_not_refused():
    """Nor those of fewer, nor arrays of members, of which the caller knows."""
    found = bounded(2)
    gather = lambda w, of: square(w, dpadambc.graphs.gather(X, of.members).sum(0))
    for data, terms in (((found,), 3), ((found,), 4), (OfRoots(found), 3)):
        fit(loss_fn=gather, data=data, mechanism=of_nodes(terms))
    indexed = lambda w, of: square(w, X[of.members].sum(0))
    fit(loss_fn=indexed, data=(bounded(0),))
    fit(loss_fn=lambda w, i: square(w, X[i].sum(0)), data=(found.members,))


def test_a15_terms_of_two_kinds_of_edges_add_up():
    """Where they are of the same roots, the second says so by one term less."""
    one, other = bounded(2), bounded(1)
    loss = lambda w, i, j: square(w, X[i.members].sum(0) + X[j.members].sum(0))
    with pytest.raises(ValueError, match="max_terms"):
        fit(loss_fn=loss, data=(one, other), mechanism=of_nodes(4))
    fit(loss_fn=loss, data=(one, other), mechanism=of_nodes(5))
    other = dataclasses.replace(other, max_terms=1)
    fit(loss_fn=loss, data=(one, other), mechanism=of_nodes(4))


WITH_GAPS = jnp.stack([jnp.arange(BATCH), jnp.full(BATCH, -1)], 1)


OF_NEXT = jnp.stack([jnp.arange(BATCH), (jnp.arange(BATCH) + 1) % BATCH], 1)


@pytest.mark.slow
def test_a15_what_the_mean_of_all_features_did():
    """Negative control: the last node is in two terms, and moves all."""
    gather = dpadambc.graphs.gather

    def total(table, whole):
        features = lambda i: gather(table, i).sum(0) + whole * table.mean(0)
        loss = lambda w, i: linear(w, features(i))
        return clipped_grad(loss)(PARAMS, OF_NEXT[1:-2])

    moved = lambda whole: distance(
        *(total(X.at[-1].set(x), whole) for x in (1e6, -1e6))
    )
    assert moved(whole=1.0) > 10 * C
    assert moved(whole=0.0) == 0


@pytest.mark.slow
def test_a15_what_an_index_did():
    """Negative control: the last node is in all terms."""

    def total(take, last):
        features = X.at[-1].set(last)
        loss = lambda w, i: linear(w, take(features, i).sum(0))
        return clipped_grad(loss)(PARAMS, WITH_GAPS[:-1])

    moved = lambda take: distance(total(take, 1e3), total(take, -1e3))
    assert moved(lambda features, i: features[i]) > 10 * C
    assert moved(dpadambc.graphs.gather) == 0


def test_a15_what_one_node_did():
    """Negative control: node 0 is in all terms."""
    members = jnp.stack([jnp.arange(BATCH), jnp.zeros(BATCH, int)], 1)

    def total(features):
        loss = lambda w, i: linear(w, dpadambc.graphs.gather(features, i).sum(0))
        return clipped_grad(loss)(PARAMS, members[1:])

    assert distance(total(one_replaced(1e3)), total(one_replaced(-1e3))) > 10 * C
