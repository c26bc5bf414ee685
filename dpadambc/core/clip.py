r"""Clip each example's gradient, sum, divide by a public number.

The factor of an example is a function of the norm of its gradient and of C, a
`ClipRule`, and is limited to the range from zero to :math:`C / \lVert g \rVert`. So no
rule of public numbers changes the contribution of one example to the sum, or epsilon:
it changes only the model. A rule that closes over something computed from the data
depends on all examples, and nothing can detect it.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from dpadambc.core import validate
from dpadambc.core.arrays import shard_map_axes, varying_axes
from dpadambc.core.clipped_sum import close_sums
from dpadambc.core.gradient import (
    SEAL_DTYPE,
    PerExampleGradient,
    closed_leaves,
    is_per_example,
    per_example_leaves,
    per_example_squared_norms,
    seals_agree,
    weighted_sums,
)
from dpadambc.core.mesh import specs_of, with_automatic_axes
from dpadambc.engine import rounding

NeighboringRelation = dp_accounting.NeighboringRelation

Groups = Mapping[str, tuple[float, list[int]]]


class ClipRule(abc.ABC):
    r"""The factor of an example's gradient, as a function of its norm alone.

    Subclasses are frozen dataclasses, so that they are equal where their numbers are.

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import clipping
      >>> @dataclasses.dataclass(frozen=True)
      ... class LeaveOutLong(clipping.ClipRule):
      ...     def weight(self, norm, l2_clip_norm):
      ...         return jnp.where(norm <= l2_clip_norm, 1, 0)
      >>> clip = dpadambc.clip_per_example(
      ...     1.0, normalize_by=1, clip_rule=LeaveOutLong())
      >>> grads = dpadambc.as_per_example(jnp.array([[0.5], [9.0]]))
      >>> params = jnp.zeros(1)
      >>> clip.update(grads, clip.init(params), params)[0].value.item()
      0.5
    """

    @abc.abstractmethod
    def weight(self, norm: jax.Array, l2_clip_norm: jax.Array) -> jax.Array:
        r"""Returns the factor of one example.

        Args:
          norm: the norm of its gradient, shape (), not negative; if it is infinite or
            NaN, the factor does not count.
          l2_clip_norm: C, shape ().

        Returns:
          The factor, shape (). It is limited to :math:`[0, C / \mathrm{norm}]`.
        """

    def groups(self, params: optax.Params) -> Groups:
        """Returns the groups of parameters, each of which is clipped on its own.

        Maps a name to its share of C and to the indices of its leaves among all leaves.
        The squares of the shares add up to one.
        """
        return {"all": (1.0, list(range(len(jax.tree.leaves(params)))))}


@dataclasses.dataclass(frozen=True)
class Flat(ClipRule):
    r"""The default rule, which scales gradients longer than C to norm C.

    .. math:: w = \min(1, C / \lVert g \rVert)

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import clipping
      >>> norms = jnp.array([0.5, 2.0])
      >>> print(jax.vmap(lambda x: clipping.Flat().weight(x, 1.0))(norms))
      [1.  0.5]

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """

    def weight(self, norm: jax.Array, l2_clip_norm: jax.Array) -> jax.Array:
        """Returns min(1, C / norm): see `ClipRule.weight`."""
        return jnp.where(norm <= l2_clip_norm, 1, l2_clip_norm / norm)


FLAT = Flat()


def clip_numbers(
    l2_clip_norm: jax.typing.ArrayLike, normalize_by: jax.typing.ArrayLike
) -> tuple[Any, Any]:
    """Checks C and B, and returns Python numbers in place of concrete arrays."""
    validate.positive_or_infinite(l2_clip_norm=l2_clip_norm)
    validate.positive(normalize_by=normalize_by)
    read = validate.python_number
    return read(l2_clip_norm=l2_clip_norm), read(normalize_by=normalize_by)


def check_rule(clip_rule: Any) -> None:
    """Raises unless it is a `ClipRule`."""
    if not isinstance(clip_rule, ClipRule):
        raise TypeError(f"Expected clip_rule as a ClipRule, got {type(clip_rule)}.")


def _clip_weights(
    squared_norms: jax.Array,
    l2_clip_norm: jax.typing.ArrayLike,
    left_out: jax.Array,
    clip_rule: ClipRule,
    size: int,
) -> jax.Array:
    """Returns the factor of each example, at most C / norm, shape (batch,).

    Zero for examples in `left_out`. `size` is the number of coordinates.
    """
    norms = jnp.sqrt(squared_norms)
    finfo = jnp.finfo(norms.dtype)
    # The norm itself is rounded. Aiming a few units in the last place below C keeps
    # the clipped norm from exceeding it.
    target = jnp.asarray(l2_clip_norm * (1 - 8 * finfo.eps), norms.dtype)
    # A rule may also lengthen the part of a gradient that underflows in its norm. A
    # thousandth of C is reserved for it.
    unseen = 1e3 * unseen_norm(size, norms.dtype)
    # `vmap` gives the rule one norm at a time, so that no rule can mix examples. The
    # clip to `limit` keeps every rule within the bound.
    weights = jax.vmap(clip_rule.weight, (0, None))(norms, target)
    limit = target / jnp.maximum(norms, unseen)
    weights = jnp.clip(weights, 0, limit).astype(norms.dtype)
    return jnp.where(jnp.isfinite(weights) & ~left_out, weights, 0)


def unseen_norm(size: int, dtype: Any) -> float:
    """Bounds the norm of a gradient whose computed norm is zero.

    Squares of coordinates below the root of `tiny` vanish from its norm.
    """
    return math.sqrt(size * float(jnp.finfo(dtype).tiny))


class Sums(NamedTuple):
    """Sums over the examples of a batch; those of several batches add up.

    Attributes:
      gradient: the sum of the clipped gradients, divided by B.
      aux: sums of other numbers of each example, for `contrib`.
    """

    gradient: optax.Updates
    aux: Any = ()


def specs_of_sums(params: Any) -> Any:
    """Returns the partition of each part of `Sums` on a mesh."""
    return Sums(specs_of(params), PartitionSpec())


class Factors(NamedTuple):
    """The factor of each example's gradient in the sum; *not private*.

    Attributes:
      weights: the factors, for each group of parameters. shape=(batch,)
      squared_norms: the squared norms of the gradients, for each group. shape=(batch,)
      are_finite: whether all norms of an example are finite. shape=(batch,)
    """

    weights: dict[str, jax.Array]
    squared_norms: dict[str, jax.Array]
    are_finite: jax.Array


def checked_groups(clip_rule: ClipRule, params: optax.Params) -> Groups:
    """Returns the groups of a rule; raises unless they bound the gradient by C."""
    groups = clip_rule.groups(params)
    places = sorted(i for _, several in groups.values() for i in several)
    squares = sum(share**2 for share, _ in groups.values())
    if places != [*range(len(jax.tree.leaves(params)))] or not squares <= 1 + 1e-9:
        raise ValueError(
            "Expected clip_rule to have each parameter in one group, with shares whose"
            f" squares add up to one, got {groups}."
        )
    return groups


def factors(
    updates: optax.Updates,
    params: optax.Params,
    l2_clip_norm: jax.typing.ArrayLike,
    is_padding_example: jax.Array | None = None,
    clip_rule: ClipRule = FLAT,
    precision: rounding.Precision = None,
) -> Factors:
    """Computes the `Factors`: zero for padding, and where a norm is not finite."""
    groups, leaves = checked_groups(clip_rule, params), per_example_leaves(updates)
    members: dict[str, Any] = {
        name: [leaves[i] for i in places] for name, (_, places) in groups.items()
    }
    norms = {
        name: per_example_squared_norms(group, precision)
        for name, group in members.items()
    }
    are_finite = jnp.stack([jnp.isfinite(x) for x in norms.values()]).all(0)
    left_out = ~are_finite
    if is_padding_example is not None:
        left_out |= is_padding_example
    weights = {}
    for name, (share, _) in groups.items():
        size = sum(math.prod(leaf.shape) for leaf in members[name])
        weights[name] = _clip_weights(
            norms[name], l2_clip_norm * share, left_out, clip_rule, size
        )
    return Factors(weights, norms, are_finite)


def weighted_sum(
    updates: optax.Updates,
    params: optax.Params,
    found: Factors,
    normalize_by: jax.typing.ArrayLike,
    clip_rule: ClipRule = FLAT,
    precision: rounding.Precision = None,
) -> optax.Updates:
    """Sums over examples each gradient times its factor, divided by a number.

    The factors must have been computed at the same precision.
    """
    leaves, structure = jax.tree.flatten(updates, is_leaf=is_per_example)
    is_intact, are_finite = seals_agree(updates), found.are_finite.all()
    sums: dict[int, jax.Array] = {}
    for name, (_, places) in checked_groups(clip_rule, params).items():
        own = jnp.where(is_intact, found.weights[name], jnp.nan) / normalize_by
        several: Any = weighted_sums(
            [leaves[i] for i in places], own, are_finite, precision
        )
        sums.update(zip(places, several, strict=True))
    return structure.unflatten([sums[i] for i in range(len(leaves))])


def refuse_parts(params: optax.Params) -> None:
    """Raises inside `optax.masked` and `optax.multi_transform`, which hide parameters.

    The other parameters would have no noise, and two parts that are clipped separately
    move by more than one clip norm.
    """
    is_hidden = lambda x: isinstance(x, optax.MaskedNode)
    if any(map(is_hidden, jax.tree.leaves(params, is_leaf=is_hidden))):
        raise ValueError("Expected all params. Put optax.masked behind the noise.")


def check_parameters(params: optax.Params, clip_rule: ClipRule) -> None:
    """Raises for a part of the parameters, and for groups that do not fit them."""
    refuse_parts(params)
    checked_groups(clip_rule, params)


def check_gradients(
    updates: optax.Updates, params: optax.Params | None, **extra_args: Any
) -> bool:
    """Checks per-example gradients, and returns False for a tree without leaves."""
    mask = extra_args.pop("is_padding_example", None)
    if misspelt := [name for name in extra_args if "padding" in name]:
        raise TypeError(f"Expected is_padding_example as the mask, got {misspelt}.")
    if params is None:
        raise ValueError("Expected params: call update(gradients, state, params).")
    leaves = closed_leaves(updates, PerExampleGradient, params)
    sizes = {leaf.batch_size for leaf in leaves}
    if len(sizes) > 1:
        raise ValueError(f"Expected gradients of one batch size, got {sorted(sizes)}.")
    together = max((leaf.num_together for leaf in leaves), default=0)
    if together > len(leaves):
        raise ValueError(
            f"Expected gradients of all {together} parameters, got {len(leaves)}. To"
            " train a part, differentiate it alone."
        )
    if leaves and mask is not None:
        validate.padding(mask, *sizes)
    for leaf in leaves:
        _check_seal(leaf)
    return bool(leaves)


def _check_seal(leaf: PerExampleGradient) -> None:
    """Raises unless the seal is intact: the device's examples, whole parameters."""
    if getattr(leaf.seal, "dtype", None) != SEAL_DTYPE:
        raise TypeError(f"Expected gradients as they were sealed, got {leaf} changed.")
    varying = set(varying_axes(leaf.seal))
    combined = set(leaf.axes) & shard_map_axes() - varying
    if wrong := combined | set(varying_axes(leaf.sealed)) - varying:
        raise ValueError(
            "Expected gradients of whole parameters and the device's own examples, got"
            f" {leaf} combined or split along {sorted(wrong)}. Sum behind the clip."
        )


def clipped_sums(
    updates: optax.Updates,
    params: Any,
    l2_clip_norm: jax.typing.ArrayLike,
    normalize_by: jax.typing.ArrayLike,
    clip_rule: ClipRule = FLAT,
    precision: rounding.Precision = None,
    **extra_args: Any,
) -> Sums:
    """Returns the clipped sum as arrays: see `clip_per_example`."""
    mask = extra_args.get("is_padding_example")
    if not check_gradients(updates, params, **extra_args):
        return Sums(updates)

    # On a mesh with Explicit axes, arrays have to be arguments to be used inside.
    def clip_and_sum(l2_clip_norm, normalize_by, updates, mask):
        chosen = clip_rule, precision
        found = factors(updates, params, l2_clip_norm, mask, *chosen)
        return Sums(weighted_sum(updates, params, found, normalize_by, *chosen))

    args = l2_clip_norm, normalize_by, updates, mask
    return with_automatic_axes(clip_and_sum, specs_of_sums(params), *args)


def clip_per_example(
    l2_clip_norm: jax.typing.ArrayLike,
    *,
    normalize_by: jax.typing.ArrayLike,
    clip_rule: ClipRule = FLAT,
    precision: rounding.Precision = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each example's gradient, sums over examples and divides by a constant.

    .. math:: \bar g = \frac{1}{B} \sum_i g_i \min(1, C / \lVert g_i \rVert_2)

    with C = `l2_clip_norm` and B = `normalize_by`. The norm of an example is taken
    over the *whole* tree of gradients that reaches this stage.

    `update` takes gradients of `per_example_grad` or `as_per_example`, needs `params`,
    and accepts `is_padding_example`, shape (batch,), bool: True where an example is
    padding. Chain it first: a stage before it is refused. It returns a `ClippedSum` for
    each parameter, in at least float32, which `add_dp_noise` opens. Rows that are not
    of the same examples in all parameters, or of one example twice, give NaN.

    Guarantees:
      * On batches that differ by one example added or removed, or replaced by
        padding, the result moves by at most C / B in L2 norm; by at most 2 C / B if
        one example is replaced by another. `sensitivity` gives these numbers.
      * A padding example, and one whose norm is NaN, infinite or overflows float32,
        contributes exactly zero.
      * B is the number given here, never the size of the batch, which is private
        under Poisson sampling.

      They hold up to the rounding of a float32 sum over examples, where products round
      too. Norms of factored gradients carry an allowance for the sums of one example:
      1e-7 of C in an MLP, 4e-4 in a transformer. C must be well above 1e-18.

    Args:
      l2_clip_norm: C, positive; infinity turns clipping off, and the guarantee too. A
        number that JAX traces is taken, and refused before the noise of a mechanism.
      normalize_by: B, positive: a public number, usually the expected batch size
        `sampling_prob * num_examples`, rounded. Traced, the same as C.
      clip_rule: which share of each gradient is taken, at most C / norm, such as
        `clipping.Automatic()`; by default min(1, C / norm).
      precision: the precision of products on a GPU or TPU. By default it is TF32 or
        bfloat16, and a bound on their rounding is added to the norm, .2 to 3 % of C.
        `jax.lax.Precision.HIGHEST` rounds nothing, and a `DotAlgorithmPreset` names
        another. `jax.default_matmul_precision` sets it too. CPUs multiply in full.

    Returns:
      An Optax transformation; its state is empty.

    Raises:
      ValueError: if a number is not positive, `params` is missing, the leaves
        disagree in batch size, or are a part of those that were taken together.
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
    numbers = clip_numbers(l2_clip_norm, normalize_by)
    check_rule(clip_rule)
    validate.precision(precision)

    def init_fn(params):
        check_parameters(params, clip_rule)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        chosen = {"clip_rule": clip_rule, "precision": precision}
        sums = clipped_sums(updates, params, *numbers, **chosen, **extra_args)
        is_masked = extra_args.get("is_padding_example") is not None or all(
            leaf.is_masked for leaf in per_example_leaves(updates)
        )
        return close_sums(sums.gradient, *numbers, is_masked=is_masked), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
