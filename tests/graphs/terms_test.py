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
    return dpadambc.graphs.PoissonGaussian(max_terms=max_terms, **numbers)


def test_a15_subgraphs_are_refused_with_a_mechanism_of_examples():
    members = jnp.stack([jnp.arange(BATCH), jnp.zeros(BATCH, int)], 1)
    gathered = lambda w, i: square(w, dpadambc.graphs.gather(X, i).sum(0))
    inside = jax.checkpoint(gathered)
    for loss in (gathered, inside):
        with pytest.raises(ValueError, match="Expected a mechanism of nodes.*max_term"):
            fit(loss_fn=loss, data=(members,))
    fit(loss_fn=gathered, data=(members,), mechanism=of_nodes(BATCH))
    assert of_nodes(BATCH).sensitivity > 100 * MECHANISM.sensitivity


def ring(**changes):
    """Each node sends to the next: K is 1, and a node is in two terms."""
    senders = np.arange(BATCH)
    edges = dict(senders=senders, receivers=(senders + 1) % BATCH, roots=senders)
    numbers = dict(max_memberships=1, max_degree=2)
    return dpadambc.graphs.subgraphs(**edges | numbers | changes)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a15_a_node_in_more_terms_than_are_accounted_for_is_refused(wrap):
    """By type: `Subgraphs` carry in how many terms a node is."""
    graph = ring()
    gathered = lambda w, i: dpadambc.graphs.gather(X, i.members).sum(0)
    loss = wrap(lambda w, i: square(w, gathered(w, i)))
    assert graph.max_terms == 2
    with pytest.raises(ValueError, match="at most 1 terms.*got 2"):
        fit(loss_fn=loss, data=(graph,), mechanism=of_nodes(1))
    fit(loss_fn=loss, data=(graph,), mechanism=of_nodes(2))


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
