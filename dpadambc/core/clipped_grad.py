"""The clipped sum of the gradients of a batch, a few examples in memory at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.core import validate
from dpadambc.core.clip import (
    FLAT,
    ClipRule,
    Sums,
    check_rule,
    clip_numbers,
    clipped_sums,
    specs_of_sums,
)
from dpadambc.core.clipped_sum import close_sums
from dpadambc.core.mesh import spec_of_examples, with_automatic_axes
from dpadambc.core.microbatches import in_parts
from dpadambc.core.per_example import Argnums, Arguments, sealed_value_and_grad
from dpadambc.engine import rounding
from dpadambc.engine.transform import Method


def clipped_grad(
    loss_fn: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: float,
    normalize_by: float,
    microbatch_size: int | None = None,
    return_values: bool = False,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    method: Method = "factored",
    skip_padding: bool = False,
    clip_rule: ClipRule = FLAT,
    precision: rounding.Precision = None,
    wrt: Any = None,
) -> Callable[..., Any]:
    r"""Clips each example's gradient, sums, and divides by a constant; like `jax.grad`.

    The value is that of `per_example_grad` followed by `clip_per_example`, with the
    same guarantees, and with memory for `microbatch_size` examples only. Without
    `is_padding_example` every row of the batch counts as an example, padding too, and
    the noise of a mechanism whose batches are padded refuses the sum.

    Args:
      loss_fn: the loss of one example; see `per_example_grad`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      l2_clip_norm: C, the bound on one example's gradient norm.
      normalize_by: B, the public number that the sum is divided by. One that JAX
        traces is refused: it could depend on the batch, as its size does.
      microbatch_size: how many examples are in memory at once; all by default. It
        changes the result by rounding only, and need not divide the batch size. (With a
        key of JAX's kinds `rbg`, dropout depends on it too.)
      return_values: whether to return the values of the loss too.
      batch_argnums: which positional arguments are batches; by default all others.
      prng_argnum: which positional argument is a PRNG key, if any.
      method: "factored" or "vmap"; see `per_example_grad`.
      skip_padding: whether padding at the end of a batch is left out. The first
        `normalize_by` rows are computed at once, the others in parts, but for those
        that are padding alone, where values and rows of `aux` are zeros. Leave it off
        if a batch is sharded over several devices, since shards would move between
        them. Leave it off too if someone who can time a step must not learn the size of
        its batch.
      clip_rule: which share of each gradient is taken; see `clip_per_example`.
      precision: the precision of products in the clip; see `clip_per_example`.
      wrt: which variables of modules of Flax NNX; see `per_example_grad`.

    Returns:
      A function of the arguments of `loss_fn`, in batches, and `is_padding_example`. It
      returns a `ClippedSum` for each parameter, in at least float32, for
      `add_dp_noise`; with `has_aux` `(gradient, aux)`; with `return_values`
      `(values, gradient)`, or `((values, aux), gradient)`. Values and auxiliary output
      are per example and *not private*. `sensitivity` is the bound on the change by one
      example.

    Raises:
      ValueError: as `per_example_grad` and `clip_per_example`.
      TypeError: as these, and if JAX traces `normalize_by`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> grad_fn = dpadambc.clipped_grad(
      ...     lambda w, x: w @ x, l2_clip_norm=1.0, normalize_by=2, return_values=True)
      >>> values, gradient = grad_fn(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
      >>> print(values, [f"{x:.3f}" for x in gradient.value])
      [7.  0.5] ['0.300', '0.650']
    """
    numbers = l2_clip_norm, normalize_by = clip_numbers(l2_clip_norm, normalize_by)
    if isinstance(normalize_by, jax.Array):
        raise TypeError(
            "Expected normalize_by as a float, got one that JAX traces. Divide by a"
            " public number, not by the size of the batch."
        )
    check_rule(clip_rule)
    validate.precision(precision)

    def clip_fn(gradients, numbers, params, **masks):
        chosen = {"clip_rule": clip_rule, "precision": precision}
        return clipped_sums(gradients, params, *numbers, **chosen, **masks)

    parts = Arguments(argnums, batch_argnums, prng_argnum, wrt)
    all_at_once = values_and_sums(
        clip_fn,
        loss_fn,
        parts,
        has_aux,
        microbatch_size,
        method,
        expected_size=normalize_by if skip_padding else None,
    )

    def grad_fn(*args, is_padding_example: jax.Array | None = None):
        masks = {"is_padding_example": is_padding_example}
        output, sums = all_at_once(numbers, *args, **masks)
        is_masked = is_padding_example is not None
        gradient = close_sums(sums.gradient, *numbers, is_masked=is_masked)
        if return_values:
            return output, gradient
        return (gradient, output[1]) if has_aux else gradient

    return grad_fn


def values_and_sums(
    clip_fn: Callable[..., Sums],
    fun: Callable[..., Any],
    parts: Arguments,
    has_aux: bool,
    microbatch_size: int | None,
    method: Method = "factored",
    expected_size: float | None = None,
) -> Callable[..., Any]:
    """Returns a function that adds up the clipped sums of the microbatches of a batch.

    Args:
      clip_fn: computes `Sums` of per-example gradients, a state, parameters and a mask.
        The function that is returned takes this state first, and returns values and
        `Sums`.
      fun: the loss of one example.
      parts: the parts of its arguments.
      has_aux: whether it returns `(loss, aux)`.
      microbatch_size: how many examples are in memory at once.
      method: "factored" or "vmap".
      expected_size: the size of a batch without its padding; most padding behind it is
        skipped. By default all rows are examples. See `clipped_grad`.
    """
    if microbatch_size is not None:
        validate.count(least=1, microbatch_size=microbatch_size)
    all_examples = sealed_value_and_grad(fun, parts, has_aux, method)

    def batch_fn(state, *args, is_padding_example=None):
        batch_size, mask = parts.check(args), is_padding_example
        mask = jnp.zeros(batch_size, bool) if mask is None else mask
        validate.padding(mask, batch_size)
        args, rest = parts.split(args)

        def clip_all(state, rest, mask, *args):
            def clip_some(mask, *args):
                output, gradients = all_examples(rest, *args)
                params = parts.params(args)
                sums = clip_fn(gradients, state, params, is_padding_example=mask)
                return output, sums

            sizes = microbatch_size, expected_size
            return in_parts(clip_some, parts.batched(args), *sizes)(mask, *args)

        spec = spec_of_examples(parts.batches(args))
        specs = spec, specs_of_sums(parts.params(args))
        return with_automatic_axes(clip_all, specs, state, rest, mask, *args)

    return batch_fn
