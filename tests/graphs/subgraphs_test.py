"""Bounded subgraphs: the changes by one record, by brute force, and a slow twin."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc import graphs
from dpadambc.graphs.subgraphs import edge_hashes

K, DEGREE = 2, 4


def random_graph(seed):
    """Edges of up to 14 nodes, some with a hub, loops and repetitions among them."""
    rng = np.random.default_rng(seed)
    num_nodes, num_edges = rng.integers(1, 15), rng.integers(0, 60)
    senders, receivers = rng.integers(num_nodes, size=(2, num_edges))
    if seed % 2:
        receivers[: num_edges // 2] = 0
    if seed % 3 == 0:
        senders[num_edges // 2 :] = 0
    num_roots = rng.integers(1, num_nodes + 1)
    return senders, receivers, rng.permutation(num_nodes)[:num_roots]


def subgraphs_by_root(senders, receivers, roots, **kwargs):
    """The members of each root, as a dictionary."""
    options = {"max_memberships": K, "max_degree": DEGREE, "seed": 5} | kwargs
    if not len(roots):
        return {}
    members = graphs.subgraphs(senders, receivers, roots, **options).members
    return {int(row[0]): tuple(int(i) for i in row[row >= 0]) for row in members}


def without_record(graph, node):
    """The graph without the record of a node; others' lists still name it."""
    senders, receivers, roots = graph
    kept = senders != node
    return senders[kept], receivers[kept], roots[roots != node]


def terms_of(node, subgraphs):
    """The roots whose clipped term depends on the features or label of a node."""
    return {root for root, members in subgraphs.items() if node in members}


def changed_terms(before, after):
    return {root for root in before | after if before.get(root) != after.get(root)}


@pytest.mark.parametrize("seed", range(300))
def test_one_record_changes_at_most_the_terms_that_are_accounted_for(seed):
    graph = random_graph(seed)
    before = subgraphs_by_root(*graph)
    for node in range(15):
        assert len(terms_of(node, before)) <= graphs.max_terms(K)
        after = subgraphs_by_root(*without_record(graph, node))
        changed = changed_terms(before, after)
        assert len(changed) <= graphs.max_terms(K)
        # A subgraph that does not change with the record has not its features.
        assert changed == terms_of(node, before)


@pytest.mark.parametrize("seed", range(100))
def test_another_list_changes_at_most_twice_as_many_others(seed):
    senders, receivers, roots = random_graph(seed)
    before = subgraphs_by_root(senders, receivers, roots)
    rng = np.random.default_rng(seed)
    for node in np.unique(senders):
        other = np.where(senders == node, rng.permutation(receivers), receivers)
        changed = changed_terms(before, subgraphs_by_root(senders, other, roots))
        assert len(changed | {node}) <= 2 * K + 1


def published_subgraphs(senders, receivers, roots, coins):
    """The published sampler: an edge of a root by a coin that depends on the degree."""
    kept = {}
    for root in roots:
        mine = (senders == root) & np.isin(receivers, roots)
        prob = K / (2 * max(mine.sum(), 1))
        chosen = np.unique(receivers[mine & (coins < prob)])
        kept[int(root)] = (int(root), *chosen) if len(chosen) <= K else (int(root),)
    return kept


def test_the_published_sampler_exceeds_its_bound():
    """Negative control: it bounds the size of a subgraph, not who is in how many."""
    worst = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        # A hub that all others name.
        senders, receivers = np.arange(1, 40), np.zeros(39, int)
        coins = rng.random(39)
        before = published_subgraphs(senders, receivers, np.arange(40), coins)
        worst = max(worst, len(terms_of(0, before)))
    assert worst > 3 * graphs.max_terms(K)


def test_a_rule_that_fills_the_gap_is_unstable_where_a_hub_goes():
    """Negative control of the test: without its place in others' lists, a hub that goes
    lets all its neighbors choose anew."""
    leaves = np.arange(1, 31)
    senders = np.concatenate([leaves, leaves, leaves])
    receivers = np.concatenate([0 * leaves, leaves + 30, leaves + 60])
    graph = senders, receivers, np.arange(91)
    before = subgraphs_by_root(*graph)
    kept = receivers != 0
    after = subgraphs_by_root(senders[kept], receivers[kept], np.arange(1, 91))
    assert len(changed_terms(before, after)) > 3 * graphs.max_terms(K)
    stable = subgraphs_by_root(*without_record(graph, 0))
    assert len(changed_terms(before, stable)) <= graphs.max_terms(K)


def slow_subgraphs(senders, receivers, roots, seed):
    """The same, node by node."""
    order = lambda edge: edge_hashes(*(np.array([i]) for i in edge), seed)[0]
    edges = {(int(s), int(r)) for s, r in zip(senders, receivers, strict=True)}
    sent = set()
    for node in {s for s, _ in edges}:
        mine = [edge for edge in edges if edge[0] == node and edge[1] != node]
        sent |= set(sorted(mine, key=order)[:K])
    taken = {}
    for root in map(int, roots):
        offers = sorted((e for e in sent if e[1] == root), key=order)
        taken[root] = (root, *(s for s, _ in offers[:DEGREE]))
    return taken


@pytest.mark.parametrize("seed", range(60))
def test_the_rule_is_that_of_a_loop_over_nodes(seed):
    graph = random_graph(seed)
    assert subgraphs_by_root(*graph) == slow_subgraphs(*graph, seed=5)


def test_the_order_of_edges_and_the_names_of_others_do_not_matter():
    senders, receivers, roots = random_graph(4)
    before = subgraphs_by_root(senders, receivers, roots)
    shuffled = np.random.default_rng(0).permutation(len(senders))
    twice = np.concatenate([shuffled, shuffled])
    assert subgraphs_by_root(senders[twice], receivers[twice], roots) == before
    more = np.append(senders, 1_000), np.append(receivers, 1_001)
    assert subgraphs_by_root(*more, roots) == before


def test_the_hash_chooses_evenly_and_differently_for_each_seed():
    """Every node of a complete graph is in K subgraphs, of any other root as likely."""
    n, seeds = 20, 400
    senders, receivers = (x.ravel() for x in np.indices((n, n)))
    counts = np.zeros((n, n))
    for seed in range(seeds):
        found = graphs.subgraphs(
            senders, receivers, np.arange(n), max_memberships=K, max_degree=n, seed=seed
        )
        rows, columns = np.nonzero(~found.is_padding)
        np.add.at(counts, (found.members[rows, columns], rows), 1)
        assert (found.degrees.sum(), found.members.shape) == (n * K, (n, n + 1))
    off_diagonal = counts[~np.eye(n, dtype=bool)]
    expected = seeds * K / (n - 1)
    stddev = np.sqrt(expected * (1 - K / (n - 1)))
    assert np.abs(off_diagonal - expected).max() < 5 * stddev
    assert np.abs(off_diagonal.std() - stddev) < 0.2 * stddev


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_hub_of_50_000_edges_is_bounded(direction):
    leaves = np.arange(1, 50_001)
    hub = np.zeros_like(leaves)
    edges = (leaves, hub) if direction == "in" else (hub, leaves)
    found = graphs.subgraphs(*edges, np.arange(50_001), max_memberships=7, max_degree=9)
    is_hub = found.members == 0
    assert found.members.shape == (50_001, 10)
    assert is_hub[1:].sum() == (0 if direction == "in" else 7)
    assert found.degrees[0] == (9 if direction == "in" else 0)


def test_undirected_edges_are_in_both_lists_once():
    edges = graphs.undirected(np.array([3, 0, 1, 1]), np.array([0, 3, 1, 2]))
    assert [*zip(*edges, strict=True)] == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_a_root_without_edges_or_memberships_is_alone():
    none, loops, roots = np.array([], int), np.array([4, 2, 2]), np.array([4, 2])
    for edges in (none, loops):
        found = graphs.subgraphs(edges, edges, roots, max_memberships=3, max_degree=2)
        np.testing.assert_array_equal(found.members, [[4, -1, -1], [2, -1, -1]])
    for kwargs in ({"max_memberships": 0}, {"max_degree": 0}):
        found = subgraphs_by_root(*random_graph(8), **kwargs)
        assert all(members == (root,) for root, members in found.items())


def test_subgraphs_keep_their_number_of_terms_through_jax_and_pickle():
    found = graphs.subgraphs(*random_graph(4), max_memberships=K, max_degree=DEGREE)
    of_one = jax.jit(lambda found: jax.tree.map(lambda x: x[0], found))(found)
    for other in (jax.device_put(found), pickle.loads(pickle.dumps(found))):
        assert other.max_terms == of_one.max_terms == found.max_terms == K + 1
        np.testing.assert_array_equal(other.members, found.members)
    degrees = jax.vmap(lambda one: one.degrees)(found)
    np.testing.assert_array_equal(degrees, found.degrees)
    np.testing.assert_array_equal(of_one.is_padding, found.is_padding[0])


def test_subgraphs_of_other_terms_are_no_loop_of_one_program():
    """The number is static: two of them do not mix."""
    one, two = (graphs.Subgraphs(jnp.zeros((2, 3), int), n) for n in (1, 2))
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, one, two)
    jax.tree.map(jnp.add, one, one)


EDGE = np.array([0]), np.array([1])


@pytest.mark.parametrize(
    "edges, roots, kwargs, name",
    [
        (EDGE, [], {}, "root"),
        (EDGE, [1, 1], {}, "roots"),
        ((np.array([0]), np.array([1, 2])), [1], {}, "receivers"),
        ((np.array([0.5]), np.array([1])), [1], {}, "senders"),
        ((np.array([[0]]), np.array([1])), [1], {}, "senders"),
        ((np.array([-1]), np.array([1])), [1], {}, "senders"),
        (EDGE, [1], {"max_memberships": -1}, "max_memberships"),
        (EDGE, [1], {"max_degree": -1}, "max_degree"),
        (EDGE, [1], {"seed": -1}, "seed"),
    ],
)
def test_wrong_use_is_refused(edges, roots, kwargs, name):
    options = {"max_memberships": 1, "max_degree": 1} | kwargs
    with pytest.raises(ValueError, match=name):
        graphs.subgraphs(*edges, np.array(roots, int), **options)
