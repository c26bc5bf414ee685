"""What the chains have in common: their beginning and their end."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import noise_level, precision, validate
from dpadambc.core.mechanism import Mechanism, check_mechanism
from dpadambc.core.privatize import privatize

Mask = Any | Callable[[optax.Params], Any]


def private_chain(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    key: jax.Array,
    *stages: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The private gradient, then the stages, then the step."""
    private = privatize(mechanism, key=key)
    return optax.chain(private, *stages, *stepping(learning_rate))


def stepping(
    learning_rate: optax.ScalarOrSchedule,
) -> tuple[optax.GradientTransformation, ...]:
    """The learning rate, and updates in the dtype of the parameters."""

    def cast(updates, params):
        if params is None:
            return updates
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)

    return optax.scale_by_learning_rate(learning_rate), optax.stateless(cast)


def scale_by_adam(
    b1, b2, eps, eps_root, nesterov, mu_dtype
) -> optax.GradientTransformation:
    """Optax's, with its arguments checked and its moments in at least float32."""
    validate.decay(b1=b1)
    validate.decay(b2=b2)
    validate.non_negative(eps=eps)
    validate.non_negative(eps_root=eps_root)
    validate.floating(mu_dtype=mu_dtype)
    adam = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    return _with_first_moment_in(mu_dtype, precision.with_wide_state(adam))


def _with_first_moment_in(
    mu_dtype: jax.typing.DTypeLike | None, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    """With the first moment in a dtype between steps; Optax would round b1 to it."""
    if mu_dtype is None:
        return adam

    def narrow(state):
        return state._replace(mu=optax.tree.cast(state.mu, mu_dtype))

    def init_fn(params):
        return narrow(adam.init(params))

    def update_fn(updates, state, params=None):
        wide = state._replace(mu=optax.tree.cast_like(state.mu, state.nu))
        updates, state = adam.update(updates, wide, params)
        return updates, narrow(state)

    return optax.GradientTransformation(init_fn, update_fn)


def level(mechanism: Mechanism) -> noise_level.NoiseStddev:
    """Of the noise that the mechanism adds."""
    check_mechanism(mechanism)
    return mechanism.noise_stddev
