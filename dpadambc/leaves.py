"""The operations that a per-example gradient answers, and nothing else.

Clipping needs two things of a per-example gradient: the squared norm of each example,
and the weighted sum over examples. Whatever form a leaf has, the rest of the library
reaches it through the functions of this file alone. A leaf is a `PerExampleGradient`,
or an array of shape (batch, ...), one gradient per row.
"""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import optax

from dpadambc.factored import interface, terms


@interface.pytree(data_fields=("term",))
class PerExampleGradient:
    """The gradients of one parameter, one for each example, in factored form.

    A pytree node: it crosses `jax.jit`, `jax.lax.scan`, donation and sharding. Its
    arrays are factors of the gradients, not gradients: arithmetic on them with
    `jax.tree.map` is not arithmetic on the gradients. `clip_per_example`,
    `per_example_norms` and `materialize` are what it is for.
    """

    term: interface.Term  # its arrays have the examples along axis 0
    shape: tuple[int, ...]  # of the parameter, and of one example's gradient
    dtype: Any
    rule: str  # how the norms are computed; see `dpadambc.explain`

    @property
    def batch_size(self) -> int:
        """The number of examples."""
        return jax.tree.leaves(self.term)[0].shape[0]

    def materialize(self) -> jax.Array:
        r"""The gradients, shape (batch, \*shape): as large as what is avoided here."""
        return jax.vmap(type(self.term).dense)(self.term).astype(self.dtype)

    def __repr__(self) -> str:
        return (
            f"PerExampleGradient(batch_size={self.batch_size}, shape={self.shape},"
            f" dtype={self.dtype}, rule={self.rule!r})"
        )


NO_GRADIENT = terms.Full.rule
MATERIALIZED = "materialised"

Leaf = jax.Array | PerExampleGradient


def is_factored(leaf: Any) -> TypeGuard[PerExampleGradient]:
    """Whether a node of a tree is a `PerExampleGradient`."""
    return isinstance(leaf, PerExampleGradient)


def flatten(gradients: optax.Updates) -> list[Leaf]:
    """The leaves of a tree, factored ones whole."""
    return jax.tree.leaves(gradients, is_leaf=is_factored)


def batch_size(leaf: Leaf) -> int:
    """The number of examples."""
    return leaf.batch_size if isinstance(leaf, PerExampleGradient) else leaf.shape[0]


def parameter_shape(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the parameter, and of one example's gradient."""
    return leaf.shape if isinstance(leaf, PerExampleGradient) else leaf.shape[1:]


def masked(leaf: Leaf, keep: jax.Array) -> Leaf:
    """Zero for the examples that are not kept, whatever it held."""
    blank = lambda x: jnp.where(keep.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
    return jax.tree.map(blank, leaf)


def masked_all(gradients: optax.Updates, keep: jax.Array) -> optax.Updates:
    """`masked` of every leaf."""
    return jax.tree.map(lambda leaf: masked(leaf, keep), gradients, is_leaf=is_factored)


def materialize(gradients: optax.Updates) -> optax.Updates:
    r"""The gradients as arrays of shape (batch, \*parameter shape).

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> grads = dpadambc.per_example_grad(lambda w, x: w * x)(1.0, jnp.arange(3.0))
      >>> print(dpadambc.materialize(grads))
      [0. 1. 2.]
    """
    form = lambda leaf: leaf.materialize() if is_factored(leaf) else leaf
    return jax.tree.map(form, gradients, is_leaf=is_factored)


def _term(leaf: Leaf) -> interface.Term:
    if isinstance(leaf, PerExampleGradient):
        return leaf.term
    return terms.Dense(leaf, leaf.shape[1:], "array")


def squared_norms(leaf: Leaf) -> jax.Array:
    """The squared L2 norm of each example, shape (batch,), at least float32."""
    term = _term(leaf)
    return jax.vmap(type(term).squared_norm)(term)


def per_example_squared_norms(gradients: optax.Updates) -> jax.Array:
    """The squared norm of each example over the whole tree, shape (batch,)."""
    return functools.reduce(jnp.add, map(squared_norms, flatten(gradients)))


def per_example_norms(gradients: optax.Updates) -> jax.Array:
    """The L2 norm of each example's gradient over the whole tree, shape (batch,).

    As `clip_per_example` sees it: in at least float32, and in factored form with an
    allowance for rounding, so that it is never less than the true norm. These norms
    are *not private*.

    Args:
      gradients: what `per_example_grad` returns.

    Returns:
      The norms, in at least float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])
      >>> grads = dpadambc.per_example_grad(lambda w, x: w @ x)(jnp.zeros(2), x)
      >>> print(dpadambc.per_example_norms(grads))
      [5. 1.]
    """
    return jnp.sqrt(per_example_squared_norms(gradients))


def weighted_sums(
    gradients: optax.Updates, weights: jax.Array, are_finite: jax.Array
) -> optax.Updates:
    """The sum over examples of weight times gradient, in the dtype of the weights.

    An example of weight zero contributes exactly zero, whatever it holds: NaN too.

    Args:
      gradients: a tree of per-example gradients.
      weights: shape (batch,).
      are_finite: shape (), bool: whether the norms of all examples are finite. Only
        then is a weight of zero enough; else the examples are blanked first.
    """
    leaves, structure = jax.tree.flatten(gradients, is_leaf=is_factored)
    terms_of = _blanked([_term(leaf) for leaf in leaves], weights != 0, are_finite)
    sums = [term.weighted_sum(weights).astype(weights.dtype) for term in terms_of]
    return structure.unflatten(sums)


def _blanked(leaves: list[interface.Term], keep: jax.Array, skip: jax.Array):
    """Zero for the examples that are not kept, in place, unless it is to be skipped.

    A loop of one step or none, since a loop works in place. `jax.lax.cond` would hold
    a second copy of all that the gradients hold, made or not.
    """
    distinct = {id(x): x for term in leaves for x in term.unscaled()}
    _, clean = jax.lax.while_loop(
        lambda state: ~state[0],
        lambda state: (~state[0], [masked(x, keep) for x in state[1]]),
        (skip, list(distinct.values())),
    )
    by_id = dict(zip(distinct, clean, strict=True))
    return jax.tree.map(lambda x: by_id.get(id(x), x), leaves)
