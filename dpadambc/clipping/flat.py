"""Clip each example's gradient, sum, divide by a public number."""

import warnings

import dp_accounting
import jax
import jax.numpy as jnp
import optax

from dpadambc._core import explicit_mesh, validate
from dpadambc.clipping import _untouched
from dpadambc.gradients import _leaves, _seal

NeighboringRelation = dp_accounting.NeighboringRelation

# By how many clipped examples two neighboring batches differ.
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
    r"""The L2 sensitivity of a clipped, normalized sum.

    .. math:: \Delta = C / B
        \text{ (add or remove one; replace by zero)}, \qquad
        \Delta = 2 C / B \text{ (replace one)}

    Args:
      l2_clip_norm: C, the bound on one example's gradient norm.
      normalize_by: B, the public number that the sum is divided by.
      neighboring_relation: what two neighboring datasets differ in.

    Returns:
      The largest L2 distance between the values of `clip_per_example` or
      `clipped_grad` on two neighboring batches.

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


def _clip_weights(
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


def _warn_of_parts(params: optax.Params) -> None:
    if validate.sees_a_part(params):
        warnings.warn(
            "clip_per_example sees a part of the parameters only, so its clip norm"
            " bounds that part. If other parts are trained too, their sensitivities add"
            " up to more than a mechanism of this clip norm accounts for. Clip all"
            " parameters together and divide them afterwards, as in"
            " optax.chain(clip_per_example, add_dp_noise, optax.multi_transform(...));"
            " to train a part alone, differentiate that part (argnums).",
            stacklevel=3,
        )


def clip_per_example(
    l2_clip_norm: jax.typing.ArrayLike, *, normalize_by: jax.typing.ArrayLike
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each example's gradient, sums over examples and divides by a constant.

    .. math:: \bar g = \frac{1}{B} \sum_i g_i \min(1, C / \lVert g_i \rVert_2)

    with C = `l2_clip_norm` and B = `normalize_by`. The norm of an example is taken
    over the *whole* tree of gradients that reaches this stage. (Optax names the same
    bound `l2_norm_clip`.)

    `update` takes gradients as `per_example_grad` or `as_per_example` returns them,
    needs `params`, and accepts `is_padding_example`, shape (batch,), bool: True where
    an example is padding. It comes first: what was done to the gradients before it
    would not be covered by its bound, and is refused. It returns leaves of the
    parameter's shape, in at least float32. They stay in float32 for bfloat16 and
    float16 gradients because rounding the sum before the noise would let one example
    move it by more than the sensitivity.

    Gradients that were summed over devices first, or whose parameters' rows are no
    longer those of the same examples, give NaN where that cannot be told while tracing.

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
      parts of a gradient cancel. For arrays C must be well above 1e-18, where squares
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
      TypeError: if a leaf is a bare array or its seal is broken, the mask has the wrong
        dtype, or another argument looks like a mask.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> params = jnp.zeros(2)
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])
      >>> per_example = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> clip = dpadambc.clip_per_example(1.0, normalize_by=2)
      >>> clipped, _ = clip.update(per_example, clip.init(params), params)
      >>> print([f"{x:.3f}" for x in clipped])
      ['0.300', '0.650']

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    validate.positive_or_infinite(l2_clip_norm=l2_clip_norm)
    validate.positive(normalize_by=normalize_by)

    def init_fn(params):
        _warn_of_parts(params)
        return optax.EmptyState()

    def update_fn(
        updates, state, params=None, *, is_padding_example=None, **extra_args
    ):
        found = _untouched.leaves_of(updates, params)
        if not found:
            return updates, state
        _untouched.refuse_misspelt_mask(extra_args, found[0].batch_size)
        if is_padding_example is not None:
            validate.padding(is_padding_example, found[0].batch_size)

        def clipped_sum(updates, is_padding_example):
            norms = _leaves.per_example_squared_norms(updates)
            weights = _clip_weights(norms, l2_clip_norm, is_padding_example)
            are_finite = jnp.isfinite(norms).all()
            # What has come this far in another way than through an index ends here.
            whole = _seal.are_whole([leaf.seal for leaf in _leaves.flatten(updates)])
            weights = jnp.where(whole, weights, jnp.nan)
            return _leaves.weighted_sums(updates, weights / normalize_by, are_finite)

        specs = explicit_mesh.split_as(params)
        return explicit_mesh.automatic(
            clipped_sum, specs, updates, is_padding_example
        ), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
