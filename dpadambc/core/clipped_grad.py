"""The clipped sum of the gradients of a batch, a few examples in memory at a time."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import clip as flat
from dpadambc.core import clipped_sum, validate
from dpadambc.core.arrays import spec_of_examples, with_automatic_axes
from dpadambc.core.clip import FLAT, ClipRule
from dpadambc.core.per_example import Argnums, Arguments, Method, batched_value_and_grad


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """A function that returns a clipped sum of gradients, with its sensitivity.

    Made by `clipped_grad` and `clipped_value_and_grad`.

    Attributes:
      fun: computes the clipped gradient.
      l2_clip_norm: C, the bound on the norm of one example's gradient.
      normalize_by: the public number that the clipped sum is divided by.
    """

    fun: Callable[..., Any]
    l2_clip_norm: float
    normalize_by: float

    def __call__(self, *args: Any, is_padding_example: jax.Array | None = None) -> Any:
        """Calls `fun`."""
        return self.fun(*args, is_padding_example=is_padding_example)

    def sensitivity(self, neighboring_relation: flat.NeighboringRelation) -> float:
        """The L2 sensitivity of the gradient returned; see `dpadambc.sensitivity`."""
        return flat.sensitivity(
            self.l2_clip_norm,
            normalize_by=self.normalize_by,
            neighboring_relation=neighboring_relation,
        )


def _extend(tree: Any, size: int) -> Any:
    """Every array repeated along axis 0, its last row over and over, up to `size`."""

    def extend(x: jax.Array) -> jax.Array:
        if x.shape[0] == size:  # an index would gather what lies on several devices
            return x
        return jnp.asarray(x)[jnp.minimum(jnp.arange(size), x.shape[0] - 1)]

    return jax.tree.map(extend, tree)


def _interleave(tree: Any, distance: int) -> Any:
    """Every array with neighbors along axis 0 that far apart."""

    def interleave(x: jax.Array) -> jax.Array:
        groups = jnp.asarray(x).reshape(distance, -1, *x.shape[1:])
        return groups.swapaxes(0, 1).reshape(x.shape)

    return jax.tree.map(interleave, tree)


def _in_microbatches(
    clipped_batch: Callable[..., Any],
    batched: Sequence[int],
    size: int,
    skip_padding: bool,
) -> Callable[..., Any]:
    """The same function of (padding, *args), `size` examples at a time."""

    def fun(is_padding_example, *args):
        batch_size = is_padding_example.shape[0]
        num = -(-batch_size // size)
        added = jnp.ones(num * size - batch_size, bool)
        is_padding_example = jnp.concatenate([is_padding_example, added])
        rows = [is_padding_example]
        rows += [_extend(args[i], num * size) for i in batched]
        num_real = None
        if skip_padding:
            # Optax takes every n-th row into one of n microbatches, so that arrays stay
            # where they are on several devices; here neighbors are to be together.
            rows = _interleave(rows, num)
            is_real = ~is_padding_example.reshape(num, size).all(1)
            num_real = jnp.max(jnp.where(is_real, jnp.arange(1, num + 1), 0))
        args = list(args)
        for i, arg in zip(batched, rows[1:], strict=True):
            args[i] = arg
        values, clipped = optax.microbatching.microbatch(
            clipped_batch,
            argnums=(0, *(1 + i for i in batched)),
            microbatch_size=size,
            accumulator=(
                optax.microbatching.AccumulationType.CONCAT,
                optax.microbatching.AccumulationType.SUM,
            ),
            num_real_microbatches=num_real,
        )(rows[0], *args)
        if skip_padding:
            values = _interleave(values, size)
        return jax.tree.map(lambda x: x[:batch_size], values), clipped

    return fun


def clipped_value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: float,
    normalize_by: float,
    microbatch_size: int | None = None,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    method: Method = "factored",
    skip_padding: bool = False,
    clip_rule: ClipRule = FLAT,
) -> ClippedGrad:
    """`clipped_grad` that returns the value of each example too.

    Args:
      fun: the loss of one example; see `per_example_value_and_grad`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      l2_clip_norm: see `clip_per_example`.
      normalize_by: see `clipped_grad`.
      microbatch_size: how many examples are in memory at once; all by default.
      batch_argnums: which positional arguments are batches; by default all others.
      prng_argnum: which positional argument is a PRNG key, if any.
      method: "factored" or "vmap"; see `per_example_value_and_grad`.
      skip_padding: see `clipped_grad`. Values of padding may be zeros then, and so may
        its auxiliary output.
      clip_rule: see `clip_per_example`.

    Returns:
      A function that returns `(values, gradient)`, with `has_aux`
      `((values, aux), gradient)`: values and auxiliary output per example and *not
      private*, the gradient clipped, summed and divided. See `clipped_grad`.

    Raises:
      ValueError: as `clipped_grad`.
      TypeError: as `clipped_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> loss_fn = lambda w, x: w * x
      >>> fun = dpadambc.clipped_value_and_grad(
      ...     loss_fn, l2_clip_norm=1.0, normalize_by=2, microbatch_size=1)
      >>> values, gradient = fun(1.0, jnp.array([0.5, 3.0]))
      >>> print(values, f"{gradient.value:.3f}")
      [0.5 3. ] 0.750
    """
    _refuse_array(normalize_by)
    # For what it refuses.
    flat.clip_per_example(l2_clip_norm, normalize_by=normalize_by, clip_rule=clip_rule)

    def clip_fn(gradients, numbers, params, **masks):
        return flat.clipped_sums(gradients, params, *numbers, clip_rule, **masks)

    value_and_clipped = values_and_sums(
        clip_fn,
        fun,
        Arguments(argnums, batch_argnums, prng_argnum),
        has_aux,
        microbatch_size=microbatch_size,
        method=method,
        skip_padding=skip_padding,
    )
    numbers = l2_clip_norm, normalize_by

    def value_and_grad_fn(*args, is_padding_example=None):
        output, sums = value_and_clipped(
            numbers, *args, is_padding_example=is_padding_example
        )
        return output, clipped_sum.closed(sums.gradient, *numbers)

    return ClippedGrad(value_and_grad_fn, l2_clip_norm, normalize_by)


def _refuse_array(normalize_by: float) -> None:
    """Raises for what may be of a batch, such as the sum of its mask."""
    if isinstance(normalize_by, jax.Array):
        raise TypeError(
            "Expected normalize_by to be a number of Python, fixed before a batch is"
            f" drawn, got an array, {normalize_by!r}. Divided by what tells of the"
            " batch, such as its size, the sum has no bound on its sensitivity. If the"
            " array is public, give float(normalize_by)."
        )


def values_and_sums(
    clip_fn: Callable[..., flat.Sums],
    fun: Callable[..., Any],
    parts: Arguments,
    has_aux: bool,
    *,
    microbatch_size: int | None,
    method: Method = "factored",
    skip_padding: bool = False,
) -> Callable[..., Any]:
    """Values of a batch, and the sum over microbatches of what a clip makes of them.

    Args:
      clip_fn: of per-example gradients, a state, parameters and a mask. The function
        that is returned takes this state first, and returns values and `Sums`.
      fun: the loss of one example.
      parts: what its arguments are.
      has_aux: whether it returns `(loss, aux)`.
      microbatch_size: how many examples are in memory at once.
      method: "factored" or "vmap".
      skip_padding: see `clipped_grad`.
    """
    if microbatch_size is not None:
        validate.count(least=1, microbatch_size=microbatch_size)
    all_examples = batched_value_and_grad(fun, parts, has_aux, method)

    def params_of(args):
        several = tuple(args[i] for i in parts.differentiated)
        return several[0] if isinstance(parts.argnums, int) else several

    def clipped_batch(state, is_padding_example, *args):
        output, gradients = all_examples(*args)
        sums = clip_fn(
            gradients, state, params_of(args), is_padding_example=is_padding_example
        )
        return output, sums

    def value_and_clipped(state, *args, is_padding_example=None):
        batch_size = parts.check(args)
        if is_padding_example is None:
            is_padding_example = jnp.zeros(batch_size, bool)
        validate.padding(is_padding_example, batch_size)

        def clip_all(state, *args):
            clip_some = functools.partial(clipped_batch, state)
            if microbatch_size is not None and microbatch_size < batch_size:
                clip_some = _in_microbatches(
                    clip_some, batched, microbatch_size, skip_padding
                )
            return clip_some(*args)

        batched = parts.batched(args)
        specs = (
            spec_of_examples([args[i] for i in batched]),
            flat.split_as(params_of(args)),
        )
        return with_automatic_axes(clip_all, specs, state, is_padding_example, *args)

    return value_and_clipped


def clipped_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: float,
    normalize_by: float,
    microbatch_size: int | None = None,
    batch_argnums: Argnums | None = None,
    prng_argnum: int | None = None,
    method: Method = "factored",
    skip_padding: bool = False,
    clip_rule: ClipRule = FLAT,
) -> ClippedGrad:
    r"""Like `jax.grad` of a batch, but clipped per example: sum, divided by a constant.

    The value is that of `per_example_grad` followed by `clip_per_example`, with the
    same guarantees, and with memory for `microbatch_size` examples only. It knows no
    mechanism, so it cannot require `is_padding_example`. Without the mask every row of
    the batch counts as an example, padding too.

    Args:
      fun: the loss of one example; see `per_example_value_and_grad`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      l2_clip_norm: C, the bound on one example's gradient norm.
      normalize_by: B, the public number that the sum is divided by. An array is
        refused: it could depend on the batch, as its size does.
      microbatch_size: how many examples are in memory at once; all by default. It
        changes the result by rounding only, and need not divide the batch size. (With a
        key of JAX's kinds `rbg`, dropout depends on it too.)
      batch_argnums: which positional arguments are batches; by default all others.
      prng_argnum: which positional argument is a PRNG key, if any.
      method: "factored" or "vmap"; see `per_example_value_and_grad`.
      skip_padding: whether microbatches of padding alone, at the end of a batch, are
        left out. A Poisson batch of 256 is padded by half its size, one of 8,192 by a
        twelfth, and padding takes as long as examples otherwise. It changes the result
        by rounding, as microbatches do. Leave it off if a batch is sharded over several
        devices, since the shards would move between them. Leave it off too if someone
        who can time a step must not learn the size of its batch. Rows of `aux` that are
        left out are zeros.
      clip_rule: which share of each gradient is taken; see `clip_per_example`.

    Returns:
      A function of the arguments of `fun`, in batches, and of
      `is_padding_example`, that returns a `ClippedSum` for each parameter, in at least
      float32, for `add_dp_noise`; with `has_aux` `(gradient, aux)`. Its method
      `sensitivity(neighboring_relation)` is the bound on what one example can change.

    Raises:
      ValueError: as `per_example_value_and_grad` and `clip_per_example`.
      TypeError: as these, and if `normalize_by` is an array.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> loss_fn = lambda w, x: w @ x
      >>> fun = dpadambc.clipped_grad(
      ...     loss_fn, l2_clip_norm=1.0, normalize_by=2, microbatch_size=1)
      >>> gradient = fun(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
      >>> print([f"{x:.3f}" for x in gradient.value])
      ['0.300', '0.650']
      >>> fun.sensitivity(dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE)
      0.5
    """
    clipped = clipped_value_and_grad(
        fun,
        argnums,
        has_aux,
        l2_clip_norm=l2_clip_norm,
        normalize_by=normalize_by,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        method=method,
        skip_padding=skip_padding,
        clip_rule=clip_rule,
    )

    def grad_fn(*args, is_padding_example=None):
        output, gradient = clipped(*args, is_padding_example=is_padding_example)
        return (gradient, output[1]) if has_aux else gradient

    return ClippedGrad(grad_fn, l2_clip_norm, normalize_by)
