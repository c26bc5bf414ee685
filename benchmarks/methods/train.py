"""Several private trainings of one method side by side, in one compiled program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpadambc
from benchmarks import experiment
from benchmarks.methods.methods import METHODS, Candidate
from benchmarks.methods.tasks import Task
from dpadambc import contrib

DAMPING = 0.1
NUM_PUBLIC = 256  # rows of noise, in the place of public examples


def _preconditioner(task: Task) -> contrib.KroneckerPreconditioner:
    """Of moments that noise has in a network that was not trained."""
    params_key, features_key, labels_key = jax.random.split(jax.random.key(0), 3)
    num_features, *_, num_classes = task.layer_sizes
    noise = jax.random.normal(features_key, (NUM_PUBLIC, num_features))
    labels = jax.random.randint(labels_key, (NUM_PUBLIC,), 0, num_classes)
    return contrib.kronecker_preconditioner(
        experiment.loss_fn,
        task.init(params_key),
        public_examples=(noise, labels),
        damping=DAMPING,
    )


@functools.partial(jax.jit, static_argnames=("name", "task", "mechanism"))
def accuracies(
    name: str,
    task: Task,
    mechanism: Any,
    keys: jax.Array,
    candidates: Candidate,
    train: experiment.Data,
    held_out: experiment.Data,
) -> jax.Array:
    """The accuracy of each run after its last step.

    Runs are on the batches of the first, and each has noise of its own. Epsilon is that
    of each run alone: runs with batches in common are not independent.

    Args:
      name: of `METHODS`.
      task: of `TASKS`.
      mechanism: of each run.
      keys: one for each run.
      candidates: of arrays with a number for each run.
      train: to train on.
      held_out: to score the end by.

    Returns:
      shape=(runs,).
    """
    loss_fn = experiment.loss_fn
    if METHODS[name].is_preconditioned:
        loss_fn = contrib.preconditioned(loss_fn, _preconditioner(task))
    sampling_key = jax.random.fold_in(keys[0], 1)

    def start(key, candidate):
        init_key, noise_key = jax.random.split(jax.random.fold_in(key, 0))
        tx = METHODS[name].make(candidate, mechanism, noise_key)
        params = task.init(init_key)
        return params, tx.init(params)

    def take_step(states, step):
        batch = mechanism.sample_step(
            sampling_key, step, num_examples=train.num_examples
        )
        examples = batch.gather(train)

        def one(key, candidate, params, opt_state):
            _, noise_key = jax.random.split(jax.random.fold_in(key, 0))
            tx = METHODS[name].make(candidate, mechanism, noise_key)
            in_units_of_c = lambda params, *example: (
                loss_fn(params, *example) / candidate["l2_clip_norm"]
            )
            updates, opt_state = tx.update(
                dpadambc.per_example_grad(in_units_of_c)(params, *examples),
                opt_state,
                params,
                is_padding_example=jnp.asarray(batch.is_padding_example),
            )
            return optax.apply_updates(params, updates), opt_state

        return jax.vmap(one)(keys, candidates, *states), None

    states = jax.vmap(start)(keys, candidates)
    (params, _), _ = jax.lax.scan(take_step, states, jnp.arange(mechanism.iterations))
    return jax.vmap(experiment.accuracy, (0, None))(params, held_out)
