"""A linear probe: one matrix on frozen features, trained privately, logits = W' x.

Where the norm of an example x is 1, that of its gradient is at most sqrt(2), and no
statistic of the private examples is needed to choose a clip norm.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks import experiment
from dpadambc import clipping, training

MOMENTUM = 0.9
CONTROL = "floor alone"
AUTOMATIC = "AUTO-S, DP-Adam"
NUM_EVALUATIONS = 20


class Candidate(NamedTuple):
    """What a trial draws; each optimizer takes what it has."""

    learning_rate: jax.typing.ArrayLike
    weight_decay: jax.typing.ArrayLike
    floor: jax.typing.ArrayLike  # the factor of a `RelativeFloor`


def _corrected(make: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def of(candidate, noise_stddev, **more):
        floor = dpadambc.RelativeFloor(candidate.floor)
        return make(
            candidate.learning_rate,
            noise_stddev,
            b2=experiment.B2,
            variance_floor=floor,
            **options,
            **more,
        )

    return of


# Of the private gradient, each made of a candidate and the level of the noise.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "DP-SGD": lambda candidate, _: optax.sgd(candidate.learning_rate, MOMENTUM),
    "DP-Adam": lambda candidate, _: optax.adam(
        candidate.learning_rate, b2=experiment.B2
    ),
    "DP-AdamBC": _corrected(dpadambc.adam_bc),
    "DP-AdamW": lambda candidate, _: optax.adamw(
        candidate.learning_rate, b2=experiment.B2, weight_decay=candidate.weight_decay
    ),
    "DP-AdamW-BC": lambda candidate, noise_stddev: _corrected(dpadambc.adamw_bc)(
        candidate, noise_stddev, weight_decay=candidate.weight_decay
    ),
    CONTROL: _corrected(dpadambc.adam_bc, correction=0.0),
}
OPTIMIZERS[AUTOMATIC] = OPTIMIZERS["DP-Adam"]
WITH_A_FLOOR = ("DP-AdamBC", "DP-AdamW-BC", CONTROL)


def with_rule_of(
    method: str, mechanism: dpadambc.PoissonGaussian
) -> dpadambc.PoissonGaussian:
    """The mechanism with the rule of clipping of a method, at the same epsilon."""
    if method != AUTOMATIC:
        return mechanism
    return dataclasses.replace(mechanism, clip_rule=clipping.Automatic())


class Data(NamedTuple):
    features: jax.Array  # shape=(num_examples, num_features), float32
    labels: jax.Array  # shape=(num_examples,), int32

    def take(self, indices: np.ndarray | slice) -> "Data":
        return Data(self.features[indices], self.labels[indices])


def loss_fn(weights: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights, label)


def accuracy(weights: Any, data: Data) -> jax.Array:
    """The share of examples that the matrix labels correctly."""
    return jnp.mean(jnp.argmax(data.features @ weights, -1) == data.labels)


class Trained(NamedTuple):
    """Of several runs, along axis 0."""

    weights: Any
    opt_state: Any
    curve: jax.Array  # shape=(runs, NUM_EVALUATIONS): accuracy on held-out examples


@functools.partial(jax.jit, static_argnames=("method", "mechanism", "num_classes"))
def train(
    method: str,
    mechanism: dpadambc.PoissonGaussian,
    num_classes: int,
    keys: jax.Array,
    candidates: Candidate,
    data: Data,
    held_out: Data,
) -> Trained:
    """Several runs side by side, on the batches of the first and each with its noise.

    The features of a batch are read once for all runs, which takes most of the time of
    one. Epsilon is that of each run alone: runs with batches in common are not
    independent, as those of a search that is accounted for must be.

    Args:
      method: of `OPTIMIZERS`.
      mechanism: of each run, with the flat rule.
      num_classes: how many logits there are.
      keys: one for each run.
      candidates: of arrays with one number for each run.
      data: to train on.
      held_out: to follow the runs by; nothing is chosen here.

    Raises:
      ValueError: if the steps are not as many between each two evaluations.
    """
    if mechanism.iterations % NUM_EVALUATIONS:
        raise ValueError(
            f"Expected a multiple of {NUM_EVALUATIONS} iterations, got"
            f" {mechanism.iterations}."
        )

    mechanism = with_rule_of(method, mechanism)

    def step_of(candidate):
        optimizer = OPTIMIZERS[method](candidate, mechanism.noise_stddev)
        return training.Step(loss_fn, mechanism, optimizer)

    def start(key, candidate):
        weights = jnp.zeros((data.features.shape[1], num_classes))
        return step_of(candidate).init(weights, key=key)

    def take_step(states, _):
        first = jax.tree.map(lambda x: x[0], states)
        batch = training.draw_batch(mechanism, first, len(data.labels))
        examples = batch.gather(data)

        def one(state, candidate):
            return step_of(candidate)(state, examples, batch.is_padding_example)[0]

        return jax.vmap(one)(states, candidates), None

    def advance(states, _):
        length = mechanism.iterations // NUM_EVALUATIONS
        states, _ = jax.lax.scan(take_step, states, length=length)
        return states, jax.vmap(accuracy, (0, None))(states.params, held_out)

    states = jax.vmap(start)(keys, candidates)
    states, curves = jax.lax.scan(advance, states, length=NUM_EVALUATIONS)
    return Trained(states.params, states.opt_state, curves.T)
