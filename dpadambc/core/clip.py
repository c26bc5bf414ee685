"""Clip each example's gradient, sum, divide by a public number."""

import math
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from dpadambc.core import clipped_sum as _clipped_sum
from dpadambc.core import explicit_mesh, seal, untouched, validate
from dpadambc.core import leaves as _leaves
from dpadambc.core.clip_rule import FLAT, ClipRule, Groups, check_rule

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
    clip_rule: ClipRule = FLAT,
    size: int = 1,
) -> jax.Array:
    """The factor of each example, at most C / norm, shape (batch,).

    Zero for padding examples and for those whose norm is not finite. `size` is the
    number of coordinates.
    """
    norms = jnp.sqrt(squared_norms)
    finfo = jnp.finfo(norms.dtype)
    # The norm itself is rounded. Aiming a few units in the last place below C keeps
    # the clipped norm from exceeding it.
    target = jnp.asarray(l2_clip_norm * (1 - 8 * finfo.eps), norms.dtype)
    # What a rule makes long may be longer by what the norm does not see. A thousandth
    # of C is left for it.
    unseen = 1e3 * _unseen(size, norms.dtype)
    # Of one norm at a time, so that no rule can mix examples; and limited, so that none
    # can exceed the bound.
    weights = jax.vmap(clip_rule.weight, (0, None))(norms, target)
    limit = target / jnp.maximum(norms, unseen)
    weights = jnp.clip(weights, 0, limit).astype(norms.dtype)
    takes_part = jnp.isfinite(norms) & jnp.isfinite(weights)
    if is_padding_example is not None:
        takes_part &= ~is_padding_example
    return jnp.where(takes_part, weights, 0)


def _unseen(size: int, dtype: Any) -> float:
    """How long a gradient may be that seems to be zero.

    Squares of coordinates below the root of `tiny` vanish from its norm.
    """
    return math.sqrt(size * float(jnp.finfo(dtype).tiny))


def _longest(squared_norms: jax.Array, weights: jax.Array, size: int) -> jax.Array:
    """What the norms of clipped gradients are at most, with what rounding hides."""
    norms = jnp.sqrt(squared_norms)
    rounding = 16 * jnp.finfo(norms.dtype).eps
    longest = weights * (norms * (1 + rounding) + _unseen(size, norms.dtype))
    return jnp.where(weights > 0, longest, 0)  # where it is not finite, too


def _of_gradients(clip_rule: ClipRule, params: Any, updates: optax.Updates) -> Groups:
    """The groups by the places of the gradients, of which some may be missing."""
    is_leaf = _leaves.is_per_example
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_leaf)
    places = {path: i for i, (path, _) in enumerate(found)}
    known = {
        name: (share, [places[paths[i]] for i in several if paths[i] in places])
        for name, (share, several) in clip_rule.groups(params).items()
    }
    return {name: group for name, group in known.items() if group[1]}


class Sums(NamedTuple):
    """Sums over the examples of a batch: those of several batches add up.

    Attributes:
      gradient: of the clipped gradients, divided.
      beside: of other numbers of each example, where `contrib` has them.
    """

    gradient: optax.Updates
    beside: Any = ()


def split_as(params: Any) -> Any:
    """How each part of `Sums` is split on a mesh."""
    return Sums(explicit_mesh.split_as(params), PartitionSpec())


class Factors(NamedTuple):
    """How much of each example's gradient is added up; *not private*.

    Attributes:
      weights: the factor of each example, for each group of parameters. shape=(batch,)
      longest: bounds on the norms of the clipped parts, for each group. shape=(batch,)
      norm: of the whole gradient. shape=(batch,)
      takes_part: False for padding, and where a norm is not finite. shape=(batch,)
      are_finite: whether all norms of an example are. shape=(batch,)
    """

    weights: dict[str, jax.Array]
    longest: dict[str, jax.Array]
    norm: jax.Array
    takes_part: jax.Array
    are_finite: jax.Array


def _members(updates: optax.Updates, groups: Groups) -> dict[str, Any]:
    """The gradients of each group."""
    leaves = _leaves.flatten(updates)
    return {name: [leaves[i] for i in places] for name, (_, places) in groups.items()}


def factors(
    updates: optax.Updates,
    params: optax.Params,
    l2_clip_norm: jax.typing.ArrayLike,
    is_padding_example: jax.Array | None = None,
    clip_rule: ClipRule = FLAT,
) -> Factors:
    """The `Factors` of a batch at a bound: zero for padding, and where not finite."""
    groups = _of_gradients(clip_rule, params, updates)
    members = _members(updates, groups)
    norms = {
        name: _leaves.per_example_squared_norms(several)
        for name, several in members.items()
    }
    are_finite = jnp.stack([jnp.isfinite(x) for x in norms.values()]).all(0)
    takes_part = are_finite
    if is_padding_example is not None:
        takes_part &= ~is_padding_example
    weights, longest = {}, {}
    for name, (share, _) in groups.items():
        size = sum(math.prod(leaf.shape) for leaf in members[name])
        weights[name] = _clip_weights(
            norms[name], l2_clip_norm * share, ~takes_part, clip_rule, size
        )
        longest[name] = _longest(norms[name], weights[name], size)
    norm = jnp.sqrt(sum(norms.values()))
    return Factors(weights, longest, norm, takes_part, are_finite)


def weighted_sum(
    updates: optax.Updates,
    params: optax.Params,
    found: Factors,
    normalize_by: jax.typing.ArrayLike,
    clip_rule: ClipRule = FLAT,
) -> optax.Updates:
    """The sum over examples, each times its factor, divided by a number."""
    groups = _of_gradients(clip_rule, params, updates)
    members, leaves = _members(updates, groups), _leaves.flatten(updates)
    whole = is_whole(updates)
    sums: dict[int, jax.Array] = {}
    for name, (_, places) in groups.items():
        own = jnp.where(whole, found.weights[name], jnp.nan) / normalize_by
        several: Any = _leaves.weighted_sums(members[name], own, found.are_finite.all())
        sums.update(zip(places, several, strict=True))
    structure = jax.tree.structure(updates, is_leaf=_leaves.is_per_example)
    return structure.unflatten([sums[i] for i in range(len(leaves))])


def is_whole(updates: optax.Updates) -> jax.Array:
    """Whether no row of the gradients has come another way than through an index."""
    return seal.are_whole([leaf.seal for leaf in _leaves.flatten(updates)])


def check_gradients(
    updates: optax.Updates,
    params: optax.Params | None,
    *,
    is_padding_example: jax.Array | None = None,
    **extra_args: Any,
) -> bool:
    """Raises unless these are gradients of single examples; False if there is none."""
    found = untouched.leaves_of(updates, params)
    if not found:
        return False
    untouched.refuse_misspelt_mask(extra_args)
    untouched.refuse_some_gradients(found)
    if is_padding_example is not None:
        validate.padding(is_padding_example, found[0].batch_size)
    return True


def check_parameters(params: optax.Params, clip_rule: ClipRule) -> None:
    """Raises for a part of the parameters, and where the groups of a rule do not fit."""
    untouched.refuse_parts(params)
    clip_rule.groups(params)


def clipped_sums(
    updates: optax.Updates,
    params: optax.Params | None,
    l2_clip_norm: jax.typing.ArrayLike,
    normalize_by: jax.typing.ArrayLike,
    clip_rule: ClipRule = FLAT,
    *,
    is_padding_example: jax.Array | None = None,
    **extra_args: Any,
) -> Sums:
    """The clipped sum of per-example gradients, as arrays: see `clip_per_example`."""
    if not check_gradients(
        updates, params, is_padding_example=is_padding_example, **extra_args
    ):
        return Sums(updates)

    # The numbers are arguments wherever they are used, as arrays are on Explicit meshes.
    def clip_and_sum(l2_clip_norm, normalize_by, updates, is_padding_example):
        found = factors(updates, params, l2_clip_norm, is_padding_example, clip_rule)
        return Sums(weighted_sum(updates, params, found, normalize_by, clip_rule))

    return explicit_mesh.automatic(
        clip_and_sum,
        split_as(params),
        l2_clip_norm,
        normalize_by,
        updates,
        is_padding_example,
    )


def clip_per_example(
    l2_clip_norm: jax.typing.ArrayLike,
    *,
    normalize_by: jax.typing.ArrayLike,
    clip_rule: ClipRule = FLAT,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each example's gradient, sums over examples and divides by a constant.

    .. math:: \bar g = \frac{1}{B} \sum_i g_i \min(1, C / \lVert g_i \rVert_2)

    with C = `l2_clip_norm` and B = `normalize_by`. The norm of an example is taken
    over the *whole* tree of gradients that reaches this stage. (Optax names the same
    bound `l2_norm_clip`.)

    `update` takes gradients as `per_example_grad` or `as_per_example` returns them,
    needs `params`, and accepts `is_padding_example`, shape (batch,), bool: True where
    an example is padding. Chain it first: its bound would not cover a stage before it,
    so such a stage is refused. It returns a `ClippedSum` for each parameter, which
    `add_dp_noise` opens, in at least float32. It stays in float32 for bfloat16 and
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
      of float32 numbers vanish. A part of the parameters, inside `optax.masked` or
      `optax.multi_transform`, is refused, since two parts that are clipped apart move
      by more. Clip and add noise first, and divide the parameters after that.

    Args:
      l2_clip_norm: C, positive; infinity turns clipping off, and the guarantee too.
      normalize_by: B, positive: a public number, usually the expected batch size
        `sampling_prob * num_examples`, rounded.
      clip_rule: which share of each gradient is taken, such as `clipping.Automatic()`;
        by default min(1, C / norm) as above. No rule of public numbers changes the
        guarantees: it is given one norm at a time, and can take no more than C / norm.

    Returns:
      An Optax transformation; its state is empty.

    Raises:
      ValueError: if a number is not positive, `params` is missing, the leaves
        disagree in batch size, the gradients are not per example, or are a part of
        those that were taken together.
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
      >>> print([f"{x:.3f}" for x in clipped.value])
      ['0.300', '0.650']

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    validate.positive_or_infinite(l2_clip_norm=l2_clip_norm)
    validate.positive(normalize_by=normalize_by)
    check_rule(clip_rule)

    def init_fn(params):
        check_parameters(params, clip_rule)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        sums = clipped_sums(
            updates, params, l2_clip_norm, normalize_by, clip_rule, **extra_args
        )
        return _clipped_sum.closed(sums.gradient, l2_clip_norm, normalize_by), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
