"""Steps of jax_privacy 2.0.0, as its documentation writes them, for the audit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, clipping, noise_addition

from dpadambc import audit
from tests.audit import zoo

C, B = zoo.C, zoo.B


def pipeline(
    dtype: Any = jnp.float32,
    noise_dtype: Any = None,
    truncated_batch_size: int | None = None,
    **options: Any,
) -> audit.Pipeline:
    """Its clipped gradient, its privatizer, its Poisson batches, and Adam."""
    params = jax.tree.map(lambda x: x.astype(dtype), zoo.PARAMS)
    gradient = clipping.clipped_grad(
        zoo.loss_fn,
        l2_clip_norm=C,
        normalize_by=B,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        **options,
    )
    optimizer = optax.adam(1e-3)

    def privatizer(key):
        return noise_addition.gaussian_privatizer(
            stddev=zoo.NOISE, prng_key=key, dtype=noise_dtype
        )

    def init(key):
        return key, params, privatizer(key).init(params), optimizer.init(params)

    def step(state, x, y, is_padding_example=None):
        key, params, noise_state, opt_state = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        x, y = x.astype(dtype), y.astype(dtype)
        clipped = gradient(params, x, y, is_padding_example=mask)
        private, noise_state = privatizer(key).update(clipped, noise_state, params)
        updates, opt_state = optimizer.update(private, opt_state, params)
        return key, optax.apply_updates(params, updates), noise_state, opt_state

    def loader(seed):
        sampling = batch_selection.CyclicPoissonSampling(
            sampling_prob=zoo.MECHANISM.sampling_prob,
            iterations=zoo.MECHANISM.iterations,
            truncated_batch_size=truncated_batch_size,
        )
        return map(np.asarray, sampling.batch_iterator(zoo.NUM_EXAMPLES, rng=seed))

    return dataclasses.replace(
        zoo.of_sum(),
        init=init,
        step=step,
        loader=loader,
        make_optimizer=lambda key: optax.chain(privatizer(key), optimizer),
    )


STEPS = {
    "as documented": lambda: pipeline(),
    "in microbatches": lambda: pipeline(microbatch_size=4),
    "without nan_safe": lambda: pipeline(nan_safe=False),
    "parameters in bfloat16": lambda: pipeline(jnp.bfloat16),
    "parameters in bfloat16, noise in float32": lambda: pipeline(
        jnp.bfloat16, jnp.float32
    ),
    "batches cut to 105": lambda: pipeline(truncated_batch_size=105),
}
