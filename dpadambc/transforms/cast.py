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


def descent(
    learning_rate: optax.ScalarOrSchedule, *stages: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Chains stages, the learning rate, and the cast to the dtypes of parameters."""
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(*stages, rate, cast_to_params())
