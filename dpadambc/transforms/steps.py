"""Count the steps that epsilon is for."""

from typing import Any

import jax
import numpy as np

from dpadambc.core.noise import AddDPNoiseState


def steps_taken(state: Any) -> int:
    """How many steps the noise in a state was added in: for epsilon, after a loop.

    A loop that stopped early, or went on for one more epoch, has not taken the
    `iterations` of its mechanism. The stage that adds the noise counts them. A state
    that was kept, and gone back to, does not know of the steps taken from it before.
    Every batch that is drawn is a step, also one without examples: a loop that skips
    those takes as many steps as its data say, and no epsilon is known of it. Where
    gradients are summed over several small batches before the noise, as by
    `optax.MultiSteps`, a step is of all of them together: they must be parts of one
    batch of the mechanism.

    Args:
      state: of a chain that adds noise, with whatever there is around it: the state of
        the optimizer, or that of a training with the optimizer's in it.

    Returns:
      The number of steps, for `Mechanism.epsilon(target_delta, iterations=...)`.

    Raises:
      ValueError: if nothing in it adds noise, or if it is of several runs, with keys of
        their own or different numbers of steps.

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
    # An array, also in a variable of Flax, and of several states at once.
    counts = {int(n) for part in parts for n in np.ravel(part.noised_steps[...])}
    keys = {name for part in parts for name in _names(part.rng_key[...])}
    if not counts:
        raise ValueError(
            "Expected the state of an optimizer that adds noise, such as"
            " dpadambc.dp_adam, got one without noise."
        )
    if len(counts) > 1 or len(keys) > 1:
        raise ValueError(
            f"Expected the state of one run, got noise of {len(keys)} keys, in"
            f" {sorted(counts)} steps. Ask for each alone, and for the epsilon of all"
            " by dpadambc.accounting.compose, a list of (mechanism, steps)."
        )
    return counts.pop()


def _names(keys: jax.Array) -> list[bytes]:
    words = np.asarray(jax.random.key_data(keys))
    return [key.tobytes() for key in words.reshape(-1, words.shape[-1])]
