"""Transforms a function that returns gradients to one that returns their factors."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from dpadambc.engine import collectives, evaluate
from dpadambc.engine.forms import Dense

Method = Literal["factored", "vmap"]


def factored_outputs(
    fun: Callable[..., tuple[Any, Any]],
    allowed_axes: frozenset[str],
    *,
    method: Method = "factored",
    takes_cheaper: bool = True,
) -> Callable[..., Any]:
    """Returns the function with the gradients of its output in factored form.

    Args:
      fun: a function of arrays that returns `(output, gradients)`.
      allowed_axes: the axes over which it may have collectives.
      method: "vmap" runs the equations of JAX's own program, and its gradients are
        arrays. Under `jax.vmap` a NaN stays in its row; see `isolation`.
      takes_cheaper: whether a gradient no larger than its factors is materialized.

    Returns:
      A function of the same arguments that returns `(output, factored, shapes, rules)`:
      a `Gradient` for each leaf, the tree of their shapes, and the rule of each, which
      depends on the shapes of one example.

    Raises:
      ValueError: while tracing, if the program may mix examples; see `collectives`.
    """

    def factored(*args):
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        collectives.refuse(closed.jaxpr, allowed_axes)
        output, gradients = shapes
        num_outputs = len(jax.tree.leaves(output))
        lazy = [
            method == "factored" and i >= num_outputs
            for i in range(len(closed.out_avals))
        ]
        values = evaluate.evaluate(closed, jax.tree.leaves(args), lazy)
        found = values[num_outputs:]
        if method == "vmap":
            found = [Dense(x, x.shape, "array") for x in found]
        elif takes_cheaper:
            found = [grad.cheaper_form() for grad in found]
        output = jax.tree.unflatten(jax.tree.structure(output), values[:num_outputs])
        return output, found, gradients, [grad.rule for grad in found]

    return factored
