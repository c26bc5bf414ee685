"""The number of noised steps in the state of an optimizer."""

from typing import Any

import jax
import numpy as np

from dpadambc.core.noise import AddDPNoiseState


def steps_taken(state: Any) -> int:
    """Counts the noised steps in a state, for the epsilon of a loop of your own.

    A loop that stops early, or goes on for another epoch, does not take the
    `iterations` of its mechanism. The stage that adds the noise counts the actual
    steps.

    The count has three limits. A state that was saved and restored does not count the
    steps that were taken after it was saved. A loop that skips empty batches takes
    a number of steps that depends on the data, and no epsilon is known for it. Where
    `optax.MultiSteps` sums small batches before the noise, they count as one step, and
    must be parts of one batch of the mechanism.

    Args:
      state: the state of a chain that adds noise, or any tree that contains it, such as
        a training state.

    Returns:
      The number of steps, for `Mechanism.epsilon(target_delta, iterations=...)`.

    Raises:
      ValueError: if no stage of the state adds noise, or if it is of several runs, with
        different keys or numbers of steps.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=10,
      ...     normalize_by=4)
      >>> optimizer = dpadambc.dp_adam(0.1, mechanism, key=jax.random.key(0))
      >>> params = jnp.ones(3)
      >>> state = optimizer.init(params)
      >>> grad_fn = dpadambc.per_example_grad(lambda w, x: (w @ x) ** 2)
      >>> for step in range(4):
      ...     batch = mechanism.sample_step(jax.random.key(1), step, num_examples=8)
      ...     grads = grad_fn(
      ...         params, batch.gather(jnp.ones((8, 3))),
      ...         is_padding_example=batch.is_padding_example)
      ...     updates, state = optimizer.update(grads, state, params)
      >>> taken = dpadambc.steps_taken(state)
      >>> taken, round(mechanism.epsilon(1e-5, iterations=taken), 2)
      (4, 6.68)
    """
    is_noise = lambda node: isinstance(node, AddDPNoiseState)
    parts = [x for x in jax.tree.leaves(state, is_leaf=is_noise) if is_noise(x)]
    # Index, for the variables of Flax; ravel, for runs that are stacked.
    counts = {int(n) for part in parts for n in np.ravel(part.noised_steps[...])}
    words = [np.asarray(part.key_data[...]) for part in parts]
    keys = {key.tobytes() for x in words for key in x.reshape(-1, x.shape[-1])}
    if not counts:
        raise ValueError(
            "Expected state of an optimizer that adds noise, such as dpadambc.dp_adam,"
            " got one without noise."
        )
    if len(counts) > 1 or len(keys) > 1:
        raise ValueError(
            f"Expected state of one run, got noise of {len(keys)} keys, in"
            f" {sorted(counts)} steps. Count each run alone, and compose them by"
            " dpadambc.accounting.compose."
        )
    return counts.pop()
