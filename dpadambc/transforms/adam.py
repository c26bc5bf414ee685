"""Optax's Adam, with moments in at least float32."""

from typing import Any

import optax

from dpadambc.core import validate
from dpadambc.transforms import dtypes
from dpadambc.transforms.second_moment import Number


def scale_by_adam(
    b1: Number, b2: Number, eps: Number, eps_root: Number, nesterov: bool, mu_dtype: Any
) -> optax.GradientTransformation:
    """Makes `optax.scale_by_adam` for private gradients, with wide moments.

    The moments are in at least float32, and the first is stored in `mu_dtype` between
    steps. Optax would round b1 to that dtype: 0.999 in bfloat16 is 1.
    """
    dtypes.check_decay(b1=b1)
    dtypes.check_decay(b2=b2)
    validate.non_negative(eps=eps)
    validate.non_negative(eps_root=eps_root)
    dtypes.check_floating_dtype(mu_dtype=mu_dtype)
    adam = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    adam = dtypes.with_wide_state(adam)

    narrow = lambda state: state._replace(mu=optax.tree.cast(state.mu, mu_dtype))

    def init_fn(params):
        return narrow(adam.init(params))

    def update_fn(updates, state, params=None):
        wide = state._replace(mu=optax.tree.cast_like(state.mu, state.nu))
        updates, state = adam.update(updates, wide, params)
        return updates, narrow(state)

    return optax.GradientTransformation(init_fn, update_fn)
