"""Clip each example's gradient, sum, divide by a public number."""

import warnings
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import optax

from dpadambc import _validate, leaves

NeighboringRelation = dp_accounting.NeighboringRelation

# By how many clipped examples two neighbouring batches differ.
_EXAMPLES_CHANGED = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: 1,
    NeighboringRelation.REPLACE_SPECIAL: 1,
    NeighboringRelation.REPLACE_ONE: 2,
}


def sensitivity(
    l2_clip_norm: float,
    *,
    normalize_by: float,
    neighboring_relation: NeighboringRelation,
) -> float:
    r"""The L2 sensitivity of a clipped, normalised sum.

    .. math:: \Delta = C / B
        \text{ (add or remove one; replace by zero)}, \qquad
        \Delta = 2 C / B \text{ (replace one)}

    Args:
      l2_clip_norm: C, the bound on one example's gradient norm.
      normalize_by: B, the public number that the sum is divided by.
      neighboring_relation: what two neighbouring datasets differ in.

    Returns:
      The largest L2 distance between the values of `clip_per_example` or
      `clipped_grad` on two neighbouring batches.

    Raises:
      TypeError: if `neighboring_relation` is not a `NeighboringRelation`.

    Example:
      >>> import dpadambc
      >>> relation = dpadambc.NeighboringRelation.REPLACE_ONE
      >>> dpadambc.sensitivity(1.0, normalize_by=4, neighboring_relation=relation)
      0.5
    """
    if not isinstance(neighboring_relation, NeighboringRelation):
        raise TypeError(
            "Expected neighboring_relation to be a dpadambc.NeighboringRelation, got"
            f" {neighboring_relation!r}."
        )
    return _EXAMPLES_CHANGED[neighboring_relation] * l2_clip_norm / normalize_by


def clip_weights(
    squared_norms: jax.Array,
    l2_clip_norm: jax.typing.ArrayLike,
    is_padding_example: jax.Array | None = None,
) -> jax.Array:
    """The factor min(1, C / norm) of each example, shape (batch,).

    Zero for padding examples and for those whose norm is not finite.
    """
    norms = jnp.sqrt(squared_norms)
    # The norm itself is rounded. Aiming a few units in the last place below C keeps
    # the clipped norm from exceeding it.
    target = l2_clip_norm * (1 - 8 * jnp.finfo(norms.dtype).eps)
    weights = jnp.where(norms <= target, 1, target / norms)
    takes_part = jnp.isfinite(norms)
    if is_padding_example is not None:
        takes_part &= ~is_padding_example
    return jnp.where(takes_part, weights, 0).astype(norms.dtype)


def check_padding(is_padding_example: Any, batch_size: int) -> None:
    """Raises unless the mask is bool, with one entry per example."""
    dtype = getattr(is_padding_example, "dtype", type(is_padding_example))
    if not hasattr(is_padding_example, "shape") or dtype != jnp.bool_:
        raise TypeError(
            "Expected is_padding_example to be a bool array, True where the example is"
            f" padding, got {dtype}."
        )
    if is_padding_example.shape != (batch_size,):
        raise ValueError(
            f"Expected is_padding_example of shape ({batch_size},), one entry per"
            f" example, got shape {is_padding_example.shape}."
        )


def _warn_of_parts(params: optax.Params) -> None:
    """Warns where `optax.masked` or `optax.multi_transform` hides some parameters."""
    is_hidden = lambda x: isinstance(x, optax.MaskedNode)
    if any(map(is_hidden, jax.tree.leaves(params, is_leaf=is_hidden))):
        warnings.warn(
            "clip_per_example sees a part of the parameters only, so its clip norm"
            " bounds that part. If other parts are trained too, their sensitivities add"
            " up to more than a mechanism of this clip norm accounts for. Clip all"
            " parameters together and divide them afterwards, as in"
            " optax.chain(clip_per_example, add_dp_noise, optax.multi_transform(...));"
            " to train a part alone, differentiate that part (argnums).",
            stacklevel=3,
        )


def _refuse_misspelt_mask(extra_args: dict[str, Any]) -> None:
    """Raises for an extra argument that can only be meant as the padding mask."""
    for name in extra_args:
        if "padding" in name:
            raise TypeError(
                f"Expected the padding mask as is_padding_example, got {name}. Without"
                " the mask, padding would be summed as if it were data."
            )


def _common_batch_size(gradients: optax.Updates, params: optax.Params | None) -> int:
    """The batch size of all leaves; raises unless each leaf has one row per example."""
    if params is None:
        raise ValueError(
            "clip_per_example needs the parameters, to tell per-example gradients from"
            " averaged ones. Call update(gradients, state, params)."
        )
    sizes = {}
    parameters = dict(jax.tree_util.tree_leaves_with_path(params))
    paths = jax.tree_util.tree_leaves_with_path(gradients, is_leaf=leaves.is_factored)
    for path, leaf in paths:
        name = jax.tree_util.keystr(path) or "the gradient"
        if path not in parameters:
            raise ValueError(f"Expected gradients shaped like params, got {name} too.")
        expected = jnp.shape(parameters[path])
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"Expected {name} to be floating, got {leaf.dtype}.")
        is_array = not leaves.is_factored(leaf)
        if is_array and leaf.ndim == 0 or leaves.parameter_shape(leaf) != expected:
            raise ValueError(
                f"Expected {name} to hold one gradient per example, of shape"
                f" (batch, *{expected}), got shape {leaf.shape}. Gradients that are"
                " averaged over the batch cannot be clipped per example: make them"
                " with dpadambc.per_example_grad, or, if they are clipped and summed"
                " already, leave this stage out."
            )
        sizes.setdefault(leaves.batch_size(leaf), name)
    if len(sizes) > 1:
        listed = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(
            f"Expected all gradients to have the same batch size, but {listed}."
        )
    return next(iter(sizes))


def clip_per_example(
    l2_clip_norm: jax.typing.ArrayLike, *, normalize_by: jax.typing.ArrayLike
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each example's gradient, sums over examples and divides by a constant.

    .. math:: \bar g = \frac{1}{B} \sum_i g_i \min(1, C / \lVert g_i \rVert_2)

    with C = `l2_clip_norm` and B = `normalize_by`. The norm of an example is taken
    over the *whole* tree of gradients that reaches this stage. (Optax names the same
    bound `l2_norm_clip`.)

    `update` takes gradients as `per_example_grad` returns them, factored or with leaves
    of shape (batch, \*parameter shape), needs `params`, and accepts
    `is_padding_example`, shape (batch,), bool: True where an example is padding.
    It returns leaves of the parameter's shape, in at least float32. They stay in
    float32 for bfloat16 and float16 gradients because rounding the sum before the
    noise would let one example move it by more than the sensitivity.

    Guarantees:
      * On batches that differ by one example added or removed, or replaced by
        padding, the result moves by at most C / B in L2 norm; by at most 2 C / B if
        one example is replaced by another. `sensitivity` gives these numbers.
      * A padding example, and one whose norm is NaN, infinite or overflows float32,
        contributes exactly zero. So an empty batch, or one of padding alone, gives
        exactly zero.
      * B is the number given here, never the size of the batch, which is private
        under Poisson sampling.

      They hold up to the rounding of a float32 sum. Norms of factored gradients carry
      an allowance for rounding, which keeps what it hides below C / 1000 however the
      terms of a gradient cancel. For arrays C must be well above 1e-18, where squares
      of float32 numbers vanish. Inside `optax.masked` or
      `optax.multi_transform` the tree is that part of the parameters alone, and two
      clipped parts together move by the root of the sum of squares of theirs: `init`
      warns of it. Clip and add noise first, and divide the parameters after that.

    Args:
      l2_clip_norm: C, positive; infinity turns clipping off, and the guarantee too.
      normalize_by: B, positive: a public number, usually the expected batch size
        `sampling_prob * num_examples`, rounded.

    Returns:
      An Optax transformation; its state is empty.

    Raises:
      ValueError: if a number is not positive, `params` is missing, the leaves
        disagree in batch size, or the gradients are not per example.
      TypeError: if a leaf or the mask has the wrong dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> params = jnp.zeros(2)
      >>> per_example = jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])
      >>> clip = dpadambc.clip_per_example(1.0, normalize_by=2)
      >>> clipped, _ = clip.update(per_example, clip.init(params), params)
      >>> print([f"{x:.3f}" for x in clipped])
      ['0.300', '0.650']

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    _validate.positive_or_infinite(l2_clip_norm=l2_clip_norm)
    _validate.positive(normalize_by=normalize_by)

    def init_fn(params):
        _warn_of_parts(params)
        return optax.EmptyState()

    def update_fn(
        updates, state, params=None, *, is_padding_example=None, **extra_args
    ):
        _refuse_misspelt_mask(extra_args)
        if not leaves.flatten(updates):
            return updates, state
        batch_size = _common_batch_size(updates, params)
        if is_padding_example is not None:
            check_padding(is_padding_example, batch_size)
        norms = leaves.per_example_squared_norms(updates)
        weights = clip_weights(norms, l2_clip_norm, is_padding_example)
        are_finite = jnp.isfinite(norms).all()
        sums = leaves.weighted_sums(updates, weights / normalize_by, are_finite)
        return sums, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
