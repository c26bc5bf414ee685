"""Whatever a page says is refused, is: each sentence has a program that runs.

What the pages show by examples of their own is left out.
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpadambc
from dpadambc import accounting, graphs, training

DOCS = pathlib.Path(__file__).parents[1] / "docs"
MECHANISM = dpadambc.PoissonGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    sampling_prob=0.5,
    iterations=4,
    normalize_by=4,
)
DATA = np.ones((8, 3), np.float32), np.ones(8, np.float32)
KEY = jax.random.key(0)
CHAIN = optax.chain(dpadambc.privatize(MECHANISM, key=KEY), optax.sgd(0.1))


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def fit(loss=loss_fn, params=None, data=DATA, mechanism=MECHANISM, **options):
    params = jnp.zeros(3) if params is None else params
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    given = {"key": KEY, "target_delta": 1e-2, "progress": False} | options
    return training.fit(loss, params, data, mechanism, optimizer, **given)


def gradients(mask=True):
    options = {"is_padding_example": jnp.zeros(8, bool)} if mask else {}
    return dpadambc.per_example_grad(loss_fn)(jnp.zeros(3), *DATA, **options)


def update(optimizer, updates, params=None):
    params = jnp.zeros(3) if params is None else params
    return optimizer.update(updates, optimizer.init(params), params)


class Tied(nnx.Module):
    """A table in two places."""

    def __init__(self):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.second = self.first

    def __call__(self, x):
        return self.second(self.first(x)).sum()


class Stream:
    """It has no random access."""

    def __iter__(self):
        yield from zip(*DATA, strict=True)


def a_clipped_sum():
    clip = dpadambc.clip_per_example(1.0, normalize_by=4)
    return update(clip, gradients())[0]


def a_stage_between():
    chain = optax.chain(
        dpadambc.clip_per_example(1.0, normalize_by=4),
        optax.scale(0.5),
        dpadambc.add_dp_noise(MECHANISM, key=KEY),
    )
    return update(chain, gradients())


def traced_numbers():
    """As in `optax.inject_hyperparams`, under `jax.jit`."""
    clip = optax.inject_hyperparams(dpadambc.clip_per_example)(1.0, normalize_by=4.0)
    chain = optax.chain(clip, dpadambc.add_dp_noise(MECHANISM, key=KEY))
    state, params = chain.init(jnp.zeros(3)), jnp.zeros(3)
    return jax.jit(chain.update)(gradients(), state, params)


def other_numbers():
    clip = dpadambc.clip_per_example(2.0, normalize_by=4)
    chain = optax.chain(clip, dpadambc.add_dp_noise(MECHANISM, key=KEY))
    return update(chain, gradients())


def a_batch_of_another_size():
    mechanism = dpadambc.FixedSizeGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_examples=8,
        batch_size=4,
        iterations=4,
        normalize_by=4,
    )
    return update(dpadambc.privatize(mechanism, key=KEY), gradients(mask=False))


def a_part_of_the_parameters():
    masked = optax.masked(
        dpadambc.privatize(MECHANISM, key=KEY), {"a": True, "b": False}
    )
    params = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    loss = lambda p, x, y: loss_fn(p["a"] + p["b"], x, y)
    mask = jnp.zeros(8, bool)
    grads = dpadambc.per_example_grad(loss)(params, *DATA, is_padding_example=mask)
    return update(masked, grads, params)


def one_noise_key():
    step = lambda scale: update(CHAIN, gradients(), scale * jnp.ones(3))[0]
    return jax.vmap(step)(jnp.arange(2.0))


def subgraphs(max_memberships):
    edges = np.random.default_rng(0).integers(0, 8, (2, 40))
    bounds = {"max_memberships": max_memberships, "max_degree": 4}
    return graphs.subgraphs(*edges, np.arange(8), **bounds)


def on_a_graph(mechanism, max_memberships=1):
    def loss(w, features, subgraph, label):
        return (graphs.gather(features, subgraph.members).sum(0) @ w - label) ** 2

    data = subgraphs(max_memberships), DATA[1]
    return fit(loss, data=data, mechanism=mechanism, frozen=DATA[0])


OF_NODES = graphs.NodePoissonGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    sampling_prob=0.5,
    iterations=4,
    normalize_by=4,
    max_terms=2,
)


def with_collective(w, x, y):
    return loss_fn(w, x, jax.lax.pmean(y, "batch"))


def checkpointed(folder, mechanism):
    checkpoints = training.Checkpoints(folder, every=2)
    return fit(mechanism=mechanism, checkpoints=checkpoints)


# The page, a part of its sentence, and what it speaks of.
REFUSED = [
    ("guides/pieces", "Averaged gradients", lambda: update(CHAIN, jnp.zeros(3))),
    (
        "guides/pieces",
        "a stage before the clip",
        lambda: update(optax.chain(optax.scale(2.0), CHAIN), gradients()),
    ),
    ("guides/pieces", "A stage between the clip and the noise", a_stage_between),
    (
        "guides/pieces",
        "plain arrays",
        lambda: update(dpadambc.add_dp_noise(MECHANISM, key=KEY), jnp.zeros(3)),
    ),
    ("guides/pieces", "numbers are traced", traced_numbers),
    ("guides/pieces", "not those of the mechanism", other_numbers),
    ("guides/pieces", "one of another size", a_batch_of_another_size),
    (
        "guides/pieces",
        "a step after the last",
        lambda: MECHANISM.sample_step(KEY, 4, num_examples=8),
    ),
    (
        "guides/pieces",
        "subgraphs under a mechanism that counts one term",
        lambda: on_a_graph(MECHANISM),
    ),
    ("guides/graphs", "refuses a mechanism of examples", lambda: on_a_graph(MECHANISM)),
    ("guides/graphs", "subgraphs of more terms", lambda: on_a_graph(OF_NODES, 3)),
    ("guides/settings", "refuses such a delta", lambda: plan(delta=1 / 60_000)),
    ("guides/runs", "`epochs=` and", lambda: fit(epochs=3)),
    ("guides/runs", "A data loader", lambda: fit(data=Stream())),
    ("guides/runs", "a list, which", lambda: fit(data=list(DATA))),
    ("guides/runs", "another number of arguments", lambda: fit(lambda w, x: w @ x)),
    (
        "guides/runs",
        "an optimizer that adds noise",
        lambda: fit(optimizer=dpadambc.dp_adam(0.1, MECHANISM, key=KEY)),
    ),
    ("guides/runs", "a loss with a collective", lambda: fit(with_collective)),
    ("recipes/sources", "`fit` refuses it", lambda: fit(data=Stream())),
    (
        "recipes/frameworks",
        "is refused: split the module",
        lambda: fit(lambda net, x, y: net(x), Tied()),
    ),
    (
        "recipes/frameworks",
        "another collection that no gradient trains are refused",
        lambda: fit(
            lambda v, x, y: loss_fn(v["params"]["w"], x, y),
            {"params": {"w": jnp.zeros(3)}, "batch_stats": {"mean": jnp.zeros(3)}},
        ),
    ),
    ("recipes/frozen", "`privatize` this is an error", a_part_of_the_parameters),
    ("recipes/many_runs", "under `jax.vmap` is an error", one_noise_key),
]


def plan(delta):
    return accounting.plan(
        target_epsilons=[1.0],
        target_delta=delta,
        batch_sizes=[64],
        epochs=1,
        num_examples=60_000,
    )


@pytest.mark.parametrize(
    ("page", "words", "program"),
    REFUSED,
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_a_page_says_is_refused(page, words, program):
    assert words in " ".join((DOCS / f"{page}.md").read_text().split())
    with pytest.raises((TypeError, ValueError, NameError)) as found:
        program()
    notes = " ".join([str(found.value), *getattr(found.value, "__notes__", ())])
    # And not one of Python's own; JAX prints the name of a seal.
    assert re.search(r"Expected|put \w+ first", notes), notes


def test_what_is_beside_them_trains():
    """Near misses: the same programs, as they should be."""
    assert fit().iterations == 4
    assert on_a_graph(OF_NODES).iterations == 4
    assert plan(delta=1e-6)
    update(CHAIN, gradients())


@pytest.mark.slow
def test_a_checkpoint_of_another_mechanism_is_refused(tmp_path):
    text = (DOCS / "guides/releases.md").read_text()
    assert "A checkpoint of another mechanism" in text
    checkpointed(tmp_path, MECHANISM)
    with pytest.raises(ValueError, match="Expected"):
        checkpointed(tmp_path, dataclasses.replace(MECHANISM, noise_multiplier=2.0))
