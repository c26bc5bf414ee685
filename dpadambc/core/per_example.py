"""Gradients of single examples, each of which sees its own example alone."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import keys, leaves, modules, validate
from dpadambc.core.arrays import invariant_axes, make_varying, varying_axes
from dpadambc.core.gradient import mask_examples, seal_gradients
from dpadambc.core.mesh import spec_of_examples, with_automatic_axes
from dpadambc.engine.forms import Full
from dpadambc.engine.transform import Method, factored_outputs

Argnums = int | Sequence[int]


def _tuple(argnums: Argnums) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The roles of the positional arguments of a loss.

    Attributes:
      argnums: the positions of the parameters.
      batch_argnums: the positions of the batches; by default all other arguments.
      prng_argnum: the position of the key, if any.
      wrt: the filter for the trained variables of modules of Flax NNX.
    """

    argnums: Argnums
    batch_argnums: Argnums | None
    prng_argnum: int | None
    wrt: Any = None

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The positions of the parameters."""
        return _tuple(self.argnums)

    def batched(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns the positions of the batches."""
        if self.batch_argnums is not None:
            return _tuple(self.batch_argnums)
        others = (*self.differentiated, self.prng_argnum)
        return tuple(i for i in range(len(args)) if i not in others)

    def batches(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments that are batches."""
        return [args[i] for i in self.batched(args)]

    def params(self, args: Sequence[Any]) -> Any:
        """Returns the parameters that `argnums` selects: one tree, or a tuple."""
        several = tuple(args[i] for i in self.differentiated)
        return several[0] if isinstance(self.argnums, int) else several

    def split(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Splits off the variables of the parameters that are not trained."""
        return modules.split_arguments(args, self.differentiated, self.wrt)

    def in_axes(self, args: Sequence[Any]) -> list[int | None]:
        """Returns `in_axes` for `jax.vmap`: axis 0 of batches."""
        return [0 if i in self.batched(args) else None for i in range(len(args))]

    def with_own_key(self, args: Sequence[Any]) -> list[Any]:
        """Replaces the key by the example's own key in one example's arguments."""
        args, place = list(args), self.prng_argnum
        if place is not None:
            args[place] = keys.of_example(args[place], self.batches(args))
        return args

    def check(self, args: Sequence[Any]) -> int:
        """Returns the batch size; raises unless the arguments fit their roles."""
        of_key = [] if self.prng_argnum is None else [self.prng_argnum]
        parts = [*self.differentiated, *self.batched(args), *of_key]
        if not all(0 <= i < len(args) for i in parts) or len({*parts}) != len(parts):
            raise ValueError(
                f"Expected argnums={self.argnums}, batch_argnums={self.batch_argnums}"
                f" and prng_argnum={self.prng_argnum} to differ and be < {len(args)}."
            )
        check_floating(self.params(self.split(args)[0]))
        others = {i: x for i, x in enumerate(args) if i not in self.differentiated}
        leaves.check(args=others)
        for i in of_key:
            validate.typed_key(key=args[i])
        sizes = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batches(args)):
            rows = jnp.shape(leaf)[0] if jnp.ndim(leaf) else "a scalar"
            sizes.setdefault(rows, f"batch{jax.tree_util.keystr(path)}")
        if not sizes:
            raise ValueError(
                "Expected a batch as an argument of loss_fn, which may not close over"
                " it, got none. Write def loss_fn(params, example), and call"
                " grad_fn(params, batch)."
            )
        if len(sizes) != 1 or "a scalar" in sizes:
            got = ", ".join(f"{rows} at {name}" for rows, name in sizes.items())
            raise ValueError(
                f"Expected a batch with one length of axis 0, got {got}."
                " Name a key by prng_argnum."
            )
        return next(iter(sizes))


def check_floating(params: Any) -> None:
    """Raises unless all leaves can be differentiated: arrays or Python numbers."""
    leaves.check(params=params)
    is_number = lambda x: isinstance(x, int | float | complex)
    array = lambda x: np.asarray(x) if is_number(x) else x
    validate.real_arrays(params=jax.tree.map(array, params))


def scalar_loss(
    loss_fn: Callable[..., Any], has_aux: bool, rest: Any, wrt: Any
) -> Callable[..., Any]:
    """Returns the loss as a function of the parts of `split`, and checks its output."""

    def checked(*args):
        # Copies, since nnx modules know the trace in which their containers were made.
        copies = jax.tree.map(lambda x: x, args)
        whole = modules.merge_arguments(copies, rest)
        before = modules.not_trained(whole, wrt)
        with leaves.explained_call(args):
            output = loss_fn(*whole)
        modules.refuse_written(before, modules.not_trained(whole, wrt))
        loss = output[0] if has_aux else output
        is_array = not isinstance(loss, tuple | dict | list)
        is_scalar = is_array and jnp.shape(loss) == ()
        if not is_scalar or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            got = f"shape {jnp.shape(loss)}" if is_array else type(loss).__name__
            raise ValueError(
                "Expected loss_fn to return a floating-point scalar, the loss of one"
                f" example without a batch axis, got {got}. Sum over the axes of the"
                " example; fit takes no (loss, aux), per_example_grad by has_aux=True."
            )
        return output

    return checked


def sealed_value_and_grad(
    loss_fn: Callable[..., Any], parts: Arguments, has_aux: bool, method: Method
) -> Callable[..., Any]:
    """Returns a function for values and sealed gradients, of the parts of `split`."""
    if method not in ("factored", "vmap"):
        raise ValueError(f"Expected method 'factored' or 'vmap', got {method!r}.")

    def all_examples(rest, *args):
        loss = scalar_loss(loss_fn, has_aux, rest, parts.wrt)
        value_and_grad = jax.value_and_grad(loss, parts.argnums, has_aux)
        one_example = lambda *args: value_and_grad(*parts.with_own_key(args))
        batches = parts.batches(args)
        axes, allowed = varying_axes(batches), invariant_axes(batches)
        gradient_of = factored_outputs(one_example, allowed, method=method)
        static = {}

        def factored(*args):
            output, gradients, *static["shapes, rules"] = gradient_of(*args)
            return output, gradients

        args = list(args)
        for i in parts.differentiated:  # otherwise JAX sums gradients over devices
            args[i] = make_varying(args[i], axes)
        output, gradients = jax.vmap(factored, in_axes=parts.in_axes(args))(*args)
        shapes, rules = static["shapes, rules"]
        if {*rules} == {Full.rule}:
            raise ValueError(
                "Expected loss_fn to depend on params, got no gradient for any of them."
                " Compute it from its argument, not from a model that it closes over."
            )
        shapes, structure = jax.tree.flatten(shapes)
        sealed = seal_gradients(gradients, shapes, rules, axes)
        return output, structure.unflatten(sealed)

    return all_examples


def per_example_grad(
    loss_fn: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    return_values: bool = False,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    method: Method = "factored",
    wrt: Any = None,
) -> Callable[..., Any]:
    r"""Differentiates a loss like `jax.grad`, for each example of a batch on its own.

    Args:
      loss_fn: a function of one example, without a batch axis, that returns its loss,
        a scalar; with `has_aux`, a pair of the loss and any pytree. Each call sees one
        example. A collective in it, over an axis of `jax.shard_map` or `jax.vmap` along
        which examples differ, would mix them, and is refused. (Batch normalization of
        one example is constant, and gives a gradient of zero.)
      argnums: which positional arguments to differentiate: the parameters. To train a
        part of them, give it as an argument of its own. A module of Flax NNX is
        differentiated as `nnx.grad` does it, with respect to its `nnx.Param` alone.
      has_aux: whether `loss_fn` returns auxiliary output.
      return_values: whether to return the values of the loss too.
      batch_argnums: which positional arguments are batches, pytrees whose arrays all
        have the examples along axis 0. By default all but those of `argnums` and
        `prng_argnum`. All examples share the others, which must be public.
      prng_argnum: which positional argument is a PRNG key, if any. Each example is
        given a key of its own for dropout, say, made of this one and of the numbers of
        the example. It depends on no other example and on no place in the batch, so
        the sensitivity holds even if the key is known. Examples of equal bits have
        equal keys.
      method: "factored" keeps each gradient in the form in which reverse mode produces
        it, and materializes no gradient that is larger than its factors; see
        `explain`. "vmap" materializes all of them: the reference, equal up to rounding.
        A kernel that the loss computes from parameters, `w + a @ b` say, is no
        parameter: its gradient is materialized, where `x @ w + x @ a @ b` needs none.
      wrt: which variables of modules of Flax NNX, a filter as for `nnx.grad`;
        `nnx.Param` by default. All examples share the others, which must be public.

    Returns:
      A function of the arguments of `loss_fn`, in batches, and of `is_padding_example`
      (keyword; shape (batch,), bool). It returns a `PerExampleGradient` for each
      parameter, zero for padding, in an `nnx.State` of a module; with `has_aux`
      `(gradients, aux)`; with `return_values` `(values, gradients)`, or
      `((values, aux), gradients)`. Values and auxiliary output are *not private*, and
      are not masked. Inside `jax.shard_map` each device has the gradients of its own
      examples.

    Raises:
      ValueError: if the loss is not a scalar or has a collective, arrays disagree in
        batch size, or argument numbers overlap. All before anything is computed.
      TypeError: if parameters are not floating point, or the key is not a typed key.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> loss_fn = lambda w, x, y: (w @ x - y) ** 2
      >>> w, x, y = jnp.ones(2), jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.zeros(2)
      >>> print(dpadambc.per_example_grad(loss_fn)(w, x, y).materialize())
      [[ 6. 12.]
       [ 0.  2.]]
    """
    parts = Arguments(argnums, batch_argnums, prng_argnum, wrt)
    all_examples = sealed_value_and_grad(loss_fn, parts, has_aux, method)

    def grad_fn(*args, is_padding_example: jax.Array | None = None):
        batch_size, mask = parts.check(args), is_padding_example
        if mask is not None:
            validate.padding(mask, batch_size)

        args, rest = parts.split(args)

        def masked(mask, rest, *args):
            output, gradients = all_examples(rest, *args)
            return output, mask_examples(gradients, mask)

        spec = spec_of_examples(parts.batches(args))
        output, gradients = with_automatic_axes(masked, spec, mask, rest, *args)
        if return_values:
            return output, gradients
        return (gradients, output[1]) if has_aux else gradients

    return grad_fn
