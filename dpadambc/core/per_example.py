"""Gradients of single examples."""

from collections.abc import Callable
from typing import Any

import jax

from dpadambc.core import explicit_mesh, leaves, validate
from dpadambc.core.batched import Argnums, Arguments, Method, batched_value_and_grad


def per_example_value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    method: Method = "factored",
) -> Callable[..., Any]:
    r"""Like `jax.value_and_grad`, for each example of a batch on its own.

    Args:
      fun: a function of one example, without a batch axis, that returns its loss,
        a scalar; with `has_aux`, a pair of the loss and any pytree. Each call sees one
        example. A collective in it, over an axis of `jax.shard_map` or `jax.vmap` along
        which examples differ, would mix them, and is refused. (Batch normalization of
        one example is constant, and gives a gradient of zero.)
      argnums: which positional arguments to differentiate: the parameters. To train a
        part of them, give it as an argument of its own.
      has_aux: whether `fun` returns auxiliary output.
      batch_argnums: which positional arguments are batches, pytrees whose arrays all
        have the examples along axis 0. By default all but those of `argnums` and
        `prng_argnum`. All examples share the others, which must be public. If one of
        them were the batch, it would be in the gradient of each example.
      prng_argnum: which positional argument is a PRNG key, if any. Each example is
        given its own, made of this one and of the numbers of the example, for dropout,
        say. It does not depend on the other examples, nor on the place in the batch, so
        the sensitivity holds for who knows the key. Examples of equal bits have equal
        keys. In place of one of kind "rbg" it is of JAX's default kind.
      method: "factored" keeps each gradient in the form in which reverse mode produces
        it, and materializes no gradient that is larger than its factors; see
        `PerExampleGradient` and `explain`. "vmap" materializes all of them, as arrays
        of shape (batch, \*parameter shape): the reference, equal up to rounding. A
        kernel that the loss computes from parameters, `w + a @ b` say, is no parameter:
        its gradient is formed on the way to theirs, where `x @ w + x @ a @ b` needs
        none.

    Returns:
      A function of the arguments of `fun`, in batches, and of
      `is_padding_example` (keyword; shape (batch,), bool), that returns
      `(values, gradients)`, with `has_aux` `((values, aux), gradients)`. Values have
      shape (batch,). Gradients have a `PerExampleGradient` for each parameter, or an
      array, zero for padding examples. Values and auxiliary output are *not private*,
      and are not masked. Inside `jax.shard_map` each device has the gradients of its
      own examples, which JAX would sum over the devices before they are clipped.

    Raises:
      ValueError: if the loss is not a scalar or has a collective, arrays disagree in
        batch size, or argument numbers overlap. All before anything is computed.
      TypeError: if parameters are not floating point, or the key is not a typed key.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> loss_fn = lambda w, x, y: (w @ x - y) ** 2
      >>> w, x, y = jnp.ones(2), jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.zeros(2)
      >>> values, grads = dpadambc.per_example_value_and_grad(loss_fn)(w, x, y)
      >>> print(values)
      [9. 1.]
      >>> print(dpadambc.materialize(grads))
      [[ 6. 12.]
       [ 0.  2.]]
    """
    parts = Arguments(argnums, batch_argnums, prng_argnum)
    all_examples = batched_value_and_grad(fun, parts, has_aux, method)

    def value_and_grad_fn(*args, is_padding_example: jax.Array | None = None):
        batch_size = parts.check(args)
        if is_padding_example is not None:
            validate.padding(is_padding_example, batch_size)

        def masked(is_padding_example, *args):
            output, gradients = all_examples(*args)
            if is_padding_example is not None:
                gradients = leaves.masked(gradients, is_padding_example)
            return output, gradients

        spec = explicit_mesh.split_as_examples([args[i] for i in parts.batched(args)])
        return explicit_mesh.automatic(masked, spec, is_padding_example, *args)

    return value_and_grad_fn


def per_example_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    method: Method = "factored",
) -> Callable[..., Any]:
    r"""Like `jax.grad`, for each example of a batch on its own.

    Args:
      fun: the loss of one example; see `per_example_value_and_grad`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      batch_argnums: which positional arguments are batches; by default all others.
      prng_argnum: which positional argument is a PRNG key, if any.
      method: "factored" or "vmap"; see `per_example_value_and_grad`.

    Returns:
      A function of the arguments of `fun`, in batches, and of
      `is_padding_example`, that returns the gradients, with `has_aux`
      `(gradients, aux)`: a `PerExampleGradient` for each parameter, or an array of
      shape (batch, \*parameter shape).

    Raises:
      ValueError: as `per_example_value_and_grad`.
      TypeError: as `per_example_value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> loss_fn = lambda params, example: params["w"] * example
      >>> grads = dpadambc.per_example_grad(loss_fn)({"w": 1.0}, jnp.arange(3.0))
      >>> print(grads["w"].materialize())
      [0. 1. 2.]
    """
    value_and_grad_fn = per_example_value_and_grad(
        fun,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        method=method,
    )

    def grad_fn(*args, is_padding_example: jax.Array | None = None):
        output, gradients = value_and_grad_fn(
            *args, is_padding_example=is_padding_example
        )
        return (gradients, output[1]) if has_aux else gradients

    return grad_fn
