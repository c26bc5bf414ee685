"""Whether a gradient depends on rows of a table of nodes that it does not gather.

The mean of all features has each node in every term. So the rows that are no members'
are changed, and the gradient looked at: what is not a number in them is none in the
gradient then either; and where a count or a comparison stands between, other numbers
make another gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc._core import jaxprs
from dpadambc.graphs import _gathers

# What takes the place of the rows of a table; None leaves the table as it is.
Put = Callable[[Any], Any]


def are_used(
    traced: jex.ClosedJaxpr,
    params: Any,
    shared: Any,
    example: Any,
    members: np.ndarray,
) -> bool:
    """Whether rows that are no members' change the gradient of an example.

    Args:
      traced: the program of the loss: of the parameters, what all examples share, an
        example, and a key or none.
      params: to differentiate by.
      shared: what all examples share, tables of nodes among it.
      example: without the leading dimension of a batch.
      members: the places of its nodes in the tables.
    """
    rest = jax.tree.leaves(example)
    num_known = len(jax.tree.leaves((params, shared))) + len(rest)
    if len(traced.jaxpr.invars) > num_known:
        rest.append(jax.random.key(0))
    num_nodes = _gathers.num_nodes(traced.jaxpr)
    last = np.max(members)  # a member's row: its numbers may be places in a table
    row_of = lambda x: x[min(last, len(x) - 1)]

    def program(put: Put) -> Callable[..., Any]:
        """The gradient, with other rows in the tables that are constants of it."""
        change = lambda x: _with_others(x, put, members, num_nodes)
        loss = jex.jaxpr_as_fun(jaxprs.with_constants(traced, change))
        of = lambda w, x: loss(*jax.tree.leaves((w, x)), *rest)[0]
        return jax.jit(jax.grad(of))

    as_written = program(lambda x: None)
    constants = jaxprs.constants_in(traced)
    is_shared = not any(_is_table(x, num_nodes) for x in constants)

    def gradient(put: Put) -> list[np.ndarray]:
        """With other rows in all tables; one program, where they are all shared."""
        of = as_written if is_shared else program(put)
        change = lambda x: _with_others(x, put, members, num_nodes)
        grads = of(params, jax.tree.map(change, shared))
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(grads)]

    with jax.debug_nans(False):
        as_it_is = gradient(lambda x: None)
        lost = gradient(lambda x: jnp.nan if _is_float(x) else None)
        other = gradient(lambda x: row_of(x) * 2 + 1 if _is_float(x) else row_of(x))
    return any(
        np.isfinite(x).all() and not (np.isfinite(y).all() and _are_close(x, z))
        for x, y, z in zip(as_it_is, lost, other, strict=True)
    )


def _with_others(x: Any, put: Put, members: np.ndarray, num_nodes: set[int]) -> Any:
    """A table of nodes with other rows where no member is; what is none, as it is."""
    rows = put(x) if _is_table(x, num_nodes) else None
    if rows is None:
        return x
    is_kept = jnp.isin(jnp.arange(len(x)), members)
    return jnp.where(is_kept.reshape(-1, *(jnp.ndim(x) - 1) * [1]), x, rows)


def _is_table(x: Any, num_nodes: set[int]) -> bool:
    return jnp.ndim(x) > 0 and len(x) in num_nodes and _is_of_numbers(x)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _is_of_numbers(x: Any) -> bool:
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(jnp.result_type(x), kind) for kind in kinds)


def _are_close(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether they differ by rounding alone."""
    return bool(np.abs(x - y).max(initial=0) <= 1e-5 * np.abs(x).max(initial=0))
