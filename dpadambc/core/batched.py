"""The gradients of a batch from the gradient of one example, and what is batched."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dpadambc.core import example_keys, leaves, shard_map, validate
from dpadambc.engine import collectives, factored_outputs, isolated_outputs

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

    def with_own_key(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of one example, with a key of its own where there is one."""
        args, place = list(args), self.prng_argnum
        if place is not None:
            example = [args[i] for i in self.batched(args)]
            args[place] = example_keys.key_of(args[place], example)
        return args

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
            check_parameters(args[i])
        if self.prng_argnum is not None:
            validate.typed_key(key=args[self.prng_argnum])
        return _batch_size([args[i] for i in self.batched(args)])


Method = Literal["factored", "vmap"]


def _on_each_device(fun: Callable[..., Any], parts: Arguments) -> Callable[..., Any]:
    """With gradients of its own for each device: see `_core.shard_map`."""

    def on_this_device(*args):
        axes = shard_map.varying_axes([args[i] for i in parts.batched(args)])
        args = list(args)
        for i in parts.differentiated:
            args[i] = shard_map.varying(args[i], axes)
        return fun(*args)

    return on_this_device


def batched_value_and_grad(
    loss_fn: Callable[..., Any], parts: Arguments, has_aux: bool, method: Method
) -> Callable[..., Any]:
    """A function of the arguments of the loss that maps over the batches."""
    validate.one_of(("factored", "vmap"), method=method)
    value_and_grad = jax.value_and_grad(
        scalar_loss(loss_fn, has_aux), parts.argnums, has_aux
    )

    def one_example(*args):
        return value_and_grad(*parts.with_own_key(args))

    def over_examples(fun, args):
        in_axes = [0 if i in parts.batched(args) else None for i in range(len(args))]
        return jax.vmap(fun, in_axes=in_axes)(*args)

    batches = lambda args: [args[i] for i in parts.batched(args)]
    axes_of = lambda args: shard_map.varying_axes(batches(args))
    check_of = lambda args: functools.partial(
        collectives.refuse, allowed=shard_map.axes_without_examples(batches(args))
    )

    def materialized(*args):
        fun = isolated_outputs(one_example, check_of(args))
        output, gradients = over_examples(fun, args)
        return output, leaves.of_arrays(gradients, axes_of(args))

    def factored(*args):
        traced, fun = {}, factored_outputs(one_example, check_of(args))

        def one_example_factored(*args):
            output, factored, *traced["static"] = fun(*args)
            return output, factored

        output, factored = over_examples(one_example_factored, args)
        shapes, rules = traced["static"]
        shapes, structure = jax.tree.flatten(shapes)
        gradients = leaves.sealed(factored, shapes, rules, axes_of(args))
        return output, structure.unflatten(gradients)

    return _on_each_device({"factored": factored, "vmap": materialized}[method], parts)


def check_parameters(params: Any) -> None:
    """Raises unless all of it can be trained."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if callable(leaf):
            raise TypeError(
                f"Expected parameters to be arrays, got {leaf!r} at params"
                f"{jax.tree_util.keystr(path)}. Of an Equinox module, train the arrays:"
                " params, static = eqx.partition(model, eqx.is_inexact_array), and"
                " eqx.combine(params, static) in the loss."
            )
        is_array = hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)
        got = jnp.result_type(leaf) if is_array else repr(leaf)
        if not is_array or not jnp.issubdtype(got, jnp.floating):
            raise TypeError(
                f"Expected floating-point parameters, got {got} at params"
                f"{jax.tree_util.keystr(path)}. Give what is not trained as another"
                " argument of loss_fn; of an nnx module graphdef, params, rest ="
                " nnx.split(model, nnx.Param, ...) tells them apart."
            )


def _batch_size(batches: Sequence[Any]) -> int:
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batches):
        if jnp.ndim(leaf) == 0:
            is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
            got = "a key" if is_key else "a scalar"
            advice = " Name the argument of a key by prng_argnum." if is_key else ""
            raise ValueError(
                "Expected every array of the batch to have examples along axis 0, got"
                f" {got} at batch{jax.tree_util.keystr(path)}.{advice}"
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


def scalar_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The loss with its output checked."""

    def checked(*args):
        try:
            output = _called(loss_fn, args)
        except Exception as error:
            if type(error).__name__ != "TraceContextError":  # of Flax
                error.add_note(_how_it_was_called(loss_fn, args))
                if "unbound axis name" in str(error):  # of JAX
                    error.add_note(_NO_AXIS)
                raise
            raise ValueError(
                "Expected loss_fn to be a function of its arguments, got one that"
                f" changes an nnx module from outside: {error}. Make the module in the"
                " loss with nnx.merge, dropout with a key that is an argument"
                " (nnx.Rngs(key)); batch normalization mixes the examples of a batch,"
                " so use group or layer normalization, or use_running_average=True."
                " Where only a count is changed, such as that of the keys for the"
                " zeros that an nnx.RNN begins with, merge a copy:"
                " nnx.merge(graphdef, params, rest, copy=True)."
            ) from error
        loss = output[0] if has_aux else output
        shape = jnp.shape(loss) if not isinstance(loss, tuple | dict | list) else None
        if shape != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            got = f"shape {shape}" if shape is not None else f"{type(loss).__name__}"
            raise ValueError(
                "Expected loss_fn to return the loss of one example, a floating-point"
                f" scalar, got {got}. It is called without the batch axis; a pair"
                " (loss, aux) needs has_aux=True, where there is one; fit and Step take"
                " the loss alone."
            )
        return output

    return checked


_NO_AXIS = (
    "The loss is of one example, and has no axis of the batch: an operation over it,"
    " such as batch normalization with an axis_name, mixes examples. Use group or layer"
    " normalization."
)


def _how_it_was_called(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    call = (
        "dpadambc called loss_fn with one example, without the batch axis:"
        f" loss_fn({', '.join(map(_described, args))})."
    )
    try:
        inspect.signature(loss_fn).bind(*args)
    except TypeError as error:
        return (
            f"{call} It does not take them: {error}. A loss takes the parameters, in"
            " fit what is frozen if anything is, and each array of the data, a"
            " dictionary as one argument, or what group_by_user returns by with_rows."
            " A random loss names its key by prng_argnum; in fit the key is a"
            " keyword-only parameter, loss_fn(params, x, *, key)."
        )
    except ValueError:  # it has no signature
        pass
    return (
        f"{call} To a model that wants a batch axis give x[None], and take [0] of what"
        " it returns. A random loss names its key by prng_argnum; in fit the key is a"
        " keyword-only parameter, loss_fn(params, x, *, key)."
    )


def _called(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a loss returns.

    An nnx module that is merged from arguments of several traces cannot be scanned:
    what `nnx.merge(..., copy=True)` would make, copies of this trace, are given then.
    """
    try:
        return loss_fn(*args)
    except ValueError as error:  # of Flax
        if "different trace level" not in str(error):
            raise
    return loss_fn(*jax.tree.map(lambda x: x, args))


_MOST_DESCRIBED = 6  # arrays by name


def _described(argument: Any) -> str:
    """An argument in a few words, such as float32[3]."""
    if hasattr(argument, "shape") and hasattr(argument, "dtype"):
        return f"{argument.dtype}{list(argument.shape)}"
    if isinstance(argument, dict) and len(argument) <= _MOST_DESCRIBED:
        several = (f"{name!r}: {_described(x)}" for name, x in argument.items())
        return f"{{{', '.join(several)}}}"
    return f"{type(argument).__name__} of {len(jax.tree.leaves(argument))} arrays"
