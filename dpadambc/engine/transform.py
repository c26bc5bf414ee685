"""From a function that returns gradients to one that returns their factors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex

from dpadambc.engine import evaluate

Check = Callable[[jex.Jaxpr], None]  # raises for a program that it does not allow


def factored_outputs(
    fun: Callable[..., tuple[Any, Any]], check: Check, *, settles: bool = True
) -> Callable[..., Any]:
    """The function with the second part of its output, gradients, in factored form.

    Args:
      fun: a function of arrays that returns `(output, gradients)`.
      check: is shown the program before it runs.
      settles: whether a gradient no larger than its factors is formed.

    Returns:
      A function of the same arguments that returns `(output, factored, shapes, rules)`:
      a `Gradient` for each leaf, the tree of their shapes, and the rule of each, which
      depends on the shapes of one example.
    """

    def factored(*args):
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        check(closed.jaxpr)
        output, gradients = shapes
        num_outputs = len(jax.tree.leaves(output))
        lazy = [i >= num_outputs for i in range(len(closed.out_avals))]
        values = evaluate.evaluate(closed, jax.tree.leaves(args), lazy)
        settled = values[num_outputs:]
        if settles:
            settled = [grad.settled() for grad in settled]
        output = jax.tree.unflatten(jax.tree.structure(output), values[:num_outputs])
        return output, settled, gradients, [grad.rule for grad in settled]

    return factored


def isolated_outputs(fun: Callable[..., Any], check: Check) -> Callable[..., Any]:
    """The same function, computed as JAX computes it, with examples kept apart.

    Under `jax.vmap`, a NaN stays in the row where it arose; see `isolation`. `check` is
    shown the program before it runs.
    """

    def isolated(*args):
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        check(closed.jaxpr)
        leaves, structure = jax.tree.flatten(shapes)
        arrays = [False] * len(leaves)
        values = evaluate.evaluate(closed, jax.tree.leaves(args), arrays)
        return structure.unflatten(values)

    return isolated
