"""What the tables of losses share: how a model is written down."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The rule of a gradient that is no larger than its factors, or has none: its own array,
# named after the primitive that gives it, which releases of JAX may change.
PLAIN = "plain"
FALLBACK = "materialized"
# The rule of a product: which of its forms is the cheapest depends on the shapes.
CHEAPEST = "cheapest"

Draw = Callable[[np.random.Generator, int], Any]


class Model(NamedTuple):
    """A loss of `(params, *frozen, *example)`, with a key last where `with_key`."""

    loss_fn: Callable[..., Any]
    params: Callable[[np.random.Generator], Any]
    batch: tuple[Draw, ...]
    rules: dict[str, str]  # by path of the parameter
    frozen: Callable[[np.random.Generator], tuple] = lambda rng: ()
    has_aux: bool = False
    with_key: bool = False
    reference: Callable[..., Any] | None = None  # the loss in double precision
    tolerance: float = 1e-10


def normal(*shape, scale=1.0) -> Draw:
    return lambda rng, n: scale * rng.normal(size=(n, *shape))


def ids(low, high, *shape) -> Draw:
    return lambda rng, n: rng.integers(low, high, size=(n, *shape))


def weights(**shapes):
    """Shapes, or trees of them, to a function that draws normal numbers."""
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda rng: lambda shape: jnp.asarray(0.5 * rng.normal(size=shape))
    return lambda rng: jax.tree.map(draw(rng), shapes, is_leaf=is_shape)


def score(y):
    """A loss of an output, with a gradient unlike the output."""
    return jnp.sum(jnp.sin(y))


def of_x(loss_fn, x, rules, **shapes):
    """A model of one array x of this shape."""
    return Model(loss_fn, weights(**shapes), (normal(*x),), rules)


def both(model, **sizes):
    """A family at sizes where products stay factored, and where they are formed."""
    return {name: model(**size) for name, size in sizes.items()}


def w_only(loss_of_w, w, x, rule):
    """A model of one kernel, w."""
    return of_x(lambda p, x: loss_of_w(p["w"], x), x, {"w": rule}, w=w)
