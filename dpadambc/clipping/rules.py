"""Rules that take another fraction of each gradient than `Flat` does."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.clip import FLAT, ClipRule, Groups


@dataclasses.dataclass(frozen=True)
class Automatic(ClipRule):
    r"""AUTO-S, which scales every gradient to nearly C, however short it is.

    .. math:: w = C / (\lVert g \rVert + \gamma)

    So C only scales the learning rate, and has no effect on Adam and similar
    optimizers: there is one number fewer to choose. A short gradient counts as much as
    a long one, which biases the sum toward examples that are learned already; gamma
    reduces the weight of gradients much shorter than gamma. With gamma 0 it is
    normalization (AUTO-V), which does not converge where gradients of examples cancel.

    Args:
      gamma: a non-negative number in the unit of the gradient; 0.01 in the paper.

    Raises:
      ValueError: if gamma is negative or not finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import clipping
      >>> norms = jnp.array([0.0, 0.1, 10.0])
      >>> rule = clipping.Automatic(gamma=0.1)
      >>> print((norms * jax.vmap(lambda x: rule.weight(x, 1.0))(norms)).round(1))
      [0.  0.5 1. ]

    References:
      Bu et al., `Automatic Clipping: Differentially Private Deep Learning Made Easier
      and Stronger <https://arxiv.org/abs/2206.07136>`_, 2023
    """

    gamma: float = 0.01

    def __post_init__(self):
        validate.non_negative(gamma=self.gamma)

    def weight(self, norm: jax.Array, l2_clip_norm: jax.Array) -> jax.Array:
        """Returns C / (norm + gamma): see `ClipRule.weight`."""
        longer = norm + self.gamma
        return jnp.where(longer > 0, l2_clip_norm / longer, 0)


Labels = Any | Callable[[optax.Params], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class PerGroup(ClipRule):
    r"""Groups of parameters, each clipped to a bound of its own.

    .. math:: C_k = C \frac{s_k}{\sqrt{\sum_j s_j^2}}, \qquad
        \sqrt{\sum_k C_k^2} = C

    with :math:`s_k` = `shares`. One example moves the parts of the sum by at most
    :math:`C_k / B` each, and all of it by :math:`C / B`: the mechanism's clip norm is
    the joint one, so its sensitivity, noise and epsilon hold as they are. To have
    bounds :math:`C_k`, give them as shares, and the mechanism the root of the sum of
    their squares.

    It helps where one part of a model, such as a new head, has long gradients that
    would take all of C. The noise in every group is that of C, so a group with a small
    share drowns in it. Prefer a single bound if it works, since the groups' norms are
    seldom all large at once.

    Args:
      labels: a tree prefix of the parameters with a string for each leaf, or a function
        of the parameters that returns one: as in `optax.multi_transform`.
      shares: a positive number for each label; only their ratios matter.
      rule: the rule within each group.

    Raises:
      ValueError: if a share is not positive, or, when it is used, a label has no share
        or a share no parameter.
      TypeError: if `rule` is no `ClipRule`, or has groups itself.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import clipping
      >>> rule = clipping.PerGroup(
      ...     {"body": "body", "head": "head"}, {"body": 4.0, "head": 3.0})
      >>> params = {"body": jnp.zeros(2), "head": jnp.zeros(1)}
      >>> grads = dpadambc.as_per_example(
      ...     {"body": jnp.array([[30.0, 40.0]]), "head": jnp.array([[1.0]])})
      >>> clip = dpadambc.clip_per_example(5.0, normalize_by=1, clip_rule=rule)
      >>> clipped, _ = clip.update(grads, clip.init(params), params)
      >>> clipped = dpadambc.materialize(clipped)
      >>> print(clipped["body"].round(3), clipped["head"])
      [2.4 3.2] [1.]

    References:
      McMahan et al., `Learning Differentially Private Recurrent Language Models
      <https://arxiv.org/abs/1710.06963>`_, 2018, "per-layer clipping"
    """

    labels: Labels
    shares: Mapping[str, float]
    rule: ClipRule = FLAT

    def __post_init__(self):
        for name, share in self.shares.items():
            validate.positive(**{f"the share of {name}": share})
        is_rule = isinstance(self.rule, ClipRule)
        if not is_rule or isinstance(self.rule, PerGroup):
            raise TypeError(
                "Expected rule to be a ClipRule for one group, such as clipping.Flat(),"
                f" got {self.rule!r}."
            )
        object.__setattr__(self, "shares", dict(self.shares))

    @property
    def _identity(self) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(self.labels)
        return structure, tuple(leaves), tuple(sorted(self.shares.items())), self.rule

    def __eq__(self, other: object) -> bool:
        """Returns whether groups, shares and rule are the same."""
        return isinstance(other, PerGroup) and self._identity == other._identity

    def __hash__(self) -> int:
        """Hashes the numbers that `__eq__` compares."""
        return hash(self._identity)

    def weight(self, norm: jax.Array, l2_clip_norm: jax.Array) -> jax.Array:
        """Returns the factor of one group, with its bound: see `ClipRule.weight`."""
        return self.rule.weight(norm, l2_clip_norm)

    def groups(self, params: optax.Params) -> Groups:
        """Returns the groups by label: see `ClipRule.groups`."""
        labels = self.labels(params) if callable(self.labels) else self.labels
        try:
            of_leaves = jax.tree.leaves(jax.tree.broadcast(labels, params))
        except ValueError as error:
            raise ValueError(
                "Expected labels to be a tree prefix of the parameters, got a tree of"
                f" structure {jax.tree.structure(labels)} for parameters of structure"
                f" {jax.tree.structure(params)}."
            ) from error
        if set(of_leaves) != set(self.shares):
            raise ValueError(
                "Expected a share for each label and a parameter for each share, got"
                f" labels {sorted(map(str, set(of_leaves)))} and shares of"
                f" {sorted(self.shares)}."
            )
        total = sum(share**2 for share in self.shares.values()) ** 0.5
        return {
            name: (share / total, [i for i, x in enumerate(of_leaves) if x == name])
            for name, share in self.shares.items()
        }
