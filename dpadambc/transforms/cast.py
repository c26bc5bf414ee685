"""Updates in the dtype of the parameters."""

import jax
import jax.numpy as jnp
import optax


def cast_to_params() -> optax.GradientTransformation:
    """Casts each update to the dtype of its parameter: the last stage of a chain."""

    def cast(updates, params):
        if params is None:
            return updates
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)

    return optax.stateless(cast)
