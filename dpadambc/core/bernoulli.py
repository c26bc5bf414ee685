"""Who is selected, each with one probability and independently, on the device."""

import jax
import jax.numpy as jnp
import numpy as np


def selection_bits(
    key: jax.Array, num_examples: int, sampling_prob: float
) -> tuple[jax.Array, jax.Array]:
    """One random word for each example, and whether it selects the example.

    Comparing 32-bit words selects with probability floor(q 2^32) / 2^32, at most q; a
    float32 uniform has 2^-23 steps, and would exceed a small q by far more.
    """
    bits = jax.random.bits(key, (num_examples,), jnp.uint32)
    threshold = int(float(sampling_prob) * 2**32)
    if threshold == 2**32:
        return bits, jnp.ones(num_examples, bool)
    return bits, bits < np.uint32(threshold)
