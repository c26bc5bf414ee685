"""A recommender without parameters of users: films have them, users have ratings.

A film has a bias and a vector. How many stars a user gives to one film is predicted of
what the user gives to the others, by the bias of each: the mean of what is left over is
the user's level, and the mean of the vectors, times what is left over then, the taste.
So the parameters are noised, shared and public in the end, and what is a user's own
stays with the user.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.movielens import data

MIDDLE = 3.0  # stars
OTHERS = 3.0  # as many ratings as expected are added to those of a user


def init(key: jax.Array, width: int) -> dict[str, jax.Array]:
    """Films alike but for small vectors; with a width of 0, of biases alone."""
    vectors = 0.1 * jax.random.normal(key, (data.NUM_FILMS, width))
    return {"biases": jnp.zeros(data.NUM_FILMS), "vectors": vectors}


def predictions(
    params: Any, films: jax.Array, stars: jax.Array, is_padding: jax.Array
) -> jax.Array:
    """Of each rating of one user, from the others; shape (rows,)."""
    is_there, biases = ~is_padding, params["biases"][films]
    vectors = params["vectors"][films]

    def of_others(x: jax.Array) -> jax.Array:
        """The mean of all other rows, shape (rows, ...)."""
        total = jnp.sum(jnp.where(is_there[:, None], x, 0), axis=0, keepdims=True)
        return (total - x) / (is_there.sum() - 1 + OTHERS)

    left_over = (stars - MIDDLE - biases)[:, None]
    level = of_others(left_over)
    taste = of_others(left_over * vectors) - level * of_others(vectors)
    return MIDDLE + biases + level[:, 0] + jnp.sum(taste * vectors, axis=1)


def loss_fn(params: Any, *user: jax.Array) -> jax.Array:
    """The mean squared error of one user."""
    _, stars, is_padding = user
    errors = jnp.where(is_padding, 0, predictions(params, *user) - stars)
    return jnp.sum(errors**2) / jnp.sum(~is_padding)
