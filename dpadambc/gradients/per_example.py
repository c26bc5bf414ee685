"""Gradients of single examples."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dpadambc._core import explicit_mesh, shard_map, validate
from dpadambc.gradients import _collectives, _leaves
from dpadambc.gradients._factored import factored_outputs, isolated_outputs

Argnums = int | Sequence[int]


def _tuple(argnums: Argnums) -> tuple[int, ...]:
    several = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(several, Sequence) or not all(
        isinstance(i, int) for i in several
    ):
        raise TypeError(
            f"Expected argument numbers to be an int or several, got {argnums!r}. To"
            " train a part of an nnx.Module, split it, as in"
            " graphdef, trained, rest = nnx.split(model, nnx.LoRAParam, ...), and give"
            " the trained part as an argument of its own."
        )
    return tuple(several)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which positional arguments of a loss play which part."""

    argnums: Argnums
    batch_argnums: Argnums | None
    prng_argnum: int | None

    def __post_init__(self):
        for numbers in (self.argnums, self.batch_argnums):
            if numbers is not None:
                _tuple(numbers)

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The positions of the parameters."""
        return _tuple(self.argnums)

    def batched(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The positions that hold a batch: by default, all that are left over."""
        if self.batch_argnums is not None:
            return _tuple(self.batch_argnums)
        others = (*_tuple(self.argnums), self.prng_argnum)
        return tuple(i for i in range(len(args)) if i not in others)

    def check(self, args: Sequence[Any]) -> int:
        """The batch size; raises unless the arguments fit their parts."""
        parts = [*_tuple(self.argnums), *self.batched(args)]
        if self.prng_argnum is not None:
            parts.append(self.prng_argnum)
        if not all(0 <= i < len(args) for i in parts) or len({*parts}) != len(parts):
            raise ValueError(
                f"Expected argnums={self.argnums}, batch_argnums={self.batch_argnums}"
                f" and prng_argnum={self.prng_argnum} to name distinct arguments among"
                f" the {len(args)} given."
            )
        for i in _tuple(self.argnums):
            _check_parameters(args[i])
        if self.prng_argnum is not None:
            validate.typed_key(key=args[self.prng_argnum])
        return _batch_size([args[i] for i in self.batched(args)])


Method = Literal["factored", "vmap"]


def _on_each_device(fun: Callable[..., Any], parts: Arguments) -> Callable[..., Any]:
    """With gradients of its own for each device: see `_core.shard_map`."""

    def on_this_device(example_ids, *args):
        axes = shard_map.varying_axes([args[i] for i in parts.batched(args)])
        args = list(args)
        for i in parts.differentiated:
            args[i] = shard_map.varying(args[i], axes)
        return fun(example_ids, *args)

    return on_this_device


def batched_value_and_grad(
    loss_fn: Callable[..., Any], parts: Arguments, has_aux: bool, method: Method
) -> Callable[..., Any]:
    """A function of (example ids, *args) that maps over the ids and the batches."""
    validate.one_of(("factored", "vmap"), method=method)
    value_and_grad = jax.value_and_grad(
        _scalar_loss(loss_fn, has_aux), parts.argnums, has_aux
    )

    def one_example(example_id, *args):
        args = list(args)
        if parts.prng_argnum is not None:
            # Depends neither on the batch size nor on the padding.
            args[parts.prng_argnum] = jax.random.fold_in(
                args[parts.prng_argnum], example_id
            )
        return value_and_grad(*args)

    def over_examples(fun, example_ids, args):
        in_axes = [0 if i in parts.batched(args) else None for i in range(len(args))]
        return jax.vmap(fun, in_axes=(0, *in_axes))(example_ids, *args)

    batches = lambda args: [args[i] for i in parts.batched(args)]
    axes_of = lambda args: shard_map.varying_axes(batches(args))
    check_of = lambda args: functools.partial(
        _collectives.refuse, allowed=shard_map.axes_without_examples(batches(args))
    )

    def materialized(example_ids, *args):
        fun = isolated_outputs(one_example, check_of(args))
        output, gradients = over_examples(fun, example_ids, args)
        return output, _leaves.of_arrays(gradients, axes_of(args))

    def factored(example_ids, *args):
        traced, fun = {}, factored_outputs(one_example, check_of(args))

        def one_example_factored(*args):
            output, factored, *traced["static"] = fun(*args)
            return output, factored

        output, factored = over_examples(one_example_factored, example_ids, args)
        shapes, rules = traced["static"]
        shapes, structure = jax.tree.flatten(shapes)
        gradients = _leaves.sealed(factored, shapes, rules, axes_of(args))
        return output, structure.unflatten(gradients)

    return _on_each_device({"factored": factored, "vmap": materialized}[method], parts)


def _check_parameters(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if callable(leaf):
            raise TypeError(
                f"Expected parameters to be arrays, got {leaf!r} at params"
                f"{jax.tree_util.keystr(path)}. Of an Equinox module, train the arrays:"
                " params, static = eqx.partition(model, eqx.is_inexact_array), and"
                " eqx.combine(params, static) in the loss."
            )
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"Expected floating-point parameters, got {dtype} at params"
                f"{jax.tree_util.keystr(path)}. Give what is not trained as another"
                " argument of loss_fn."
            )


def _batch_size(batches: Sequence[Any]) -> int:
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batches):
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                "Expected every array of the batch to have examples along axis 0, got"
                f" a scalar at batch{jax.tree_util.keystr(path)}."
            )
        sizes.setdefault(jnp.shape(leaf)[0], jax.tree_util.keystr(path))
    if len(sizes) != 1:
        found = ", ".join(f"{n} at batch{name}" for n, name in sizes.items())
        raise ValueError(
            "Expected every array of the batch to have the same number of examples"
            f" along axis 0, got {found or 'no arrays'}. Name the arguments that are"
            " not batches by leaving them out of batch_argnums."
        )
    return next(iter(sizes))


def _scalar_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The loss with its output checked."""

    def checked(*args):
        try:
            output = loss_fn(*args)
        except Exception as error:
            if type(error).__name__ != "TraceContextError":  # of Flax
                raise
            raise ValueError(
                "Expected loss_fn to be a function of its arguments, got one that"
                f" changes an nnx module from outside: {error}. Make the module in the"
                " loss with nnx.merge, dropout with a key that is an argument"
                " (nnx.Rngs(key)); batch normalization mixes the examples of a batch,"
                " so use group or layer normalization, or use_running_average=True."
            ) from error
        loss = output[0] if has_aux else output
        shape = jnp.shape(loss) if not isinstance(loss, tuple | dict | list) else None
        if shape != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            got = f"shape {shape}" if shape is not None else f"{type(loss).__name__}"
            raise ValueError(
                "Expected loss_fn to return the loss of one example, a floating-point"
                f" scalar, got {got}. It is called without the batch axis; a pair"
                " (loss, aux) needs has_aux=True."
            )
        return output

    return checked


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
        `prng_argnum`. Any others are shared by all examples, and must be public: a
        batch that is given so would be in the gradient of each example.
      prng_argnum: which positional argument is a PRNG key, if any. Example i is given
        `jax.random.fold_in(key, i)`: dropout, say, differs between examples.
      method: "factored" keeps each gradient in the form in which reverse mode produces
        it, and forms no gradient that is larger than its factors; see
        `PerExampleGradient` and `explain`. "vmap" forms all of them, arrays of shape
        (batch, \*parameter shape): the reference, equal up to rounding. A kernel that
        the loss computes from parameters, `w + a @ b` say, is no parameter: its
        gradient is formed on the way to theirs, where `x @ w + x @ a @ b` needs none.

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
            output, gradients = all_examples(jnp.arange(batch_size), *args)
            if is_padding_example is not None:
                gradients = _leaves.masked(gradients, is_padding_example)
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
