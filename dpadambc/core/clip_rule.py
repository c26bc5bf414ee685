r"""How much of each example's gradient is added up: the factor that clipping applies.

A rule gives a factor w of the norm of one example's gradient, and of the clip norm C.
The clip limits this factor to the range from zero to :math:`C / \lVert g \rVert`, and a
rule sees the norm of one example at a time. So no rule, not even one of your own,
changes how much one example can add, or epsilon: it changes only what the model learns.
This holds if the rule depends on public numbers alone. A rule that closes over
something computed from the data depends on all examples, and nothing can detect it.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

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
        r"""The factor of one example.

        Args:
          norm: of its gradient, shape (), not negative; it may be infinite or NaN, and
            what is returned then does not count.
          l2_clip_norm: C, shape ().

        Returns:
          The factor, shape (). It is limited to :math:`[0, C / \mathrm{norm}]`.
        """

    def groups(self, params: optax.Params) -> Groups:
        """The groups of parameters that are clipped each on their own.

        By name a share of C, and the leaves by their places among all leaves. The
        squares of the shares add up to one.
        """
        return {"all": (1.0, list(range(len(jax.tree.leaves(params)))))}


@dataclasses.dataclass(frozen=True)
class Flat(ClipRule):
    r"""Gradients longer than C are cut to C: the usual rule, and the default.

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
        """See `ClipRule.weight`."""
        return jnp.where(norm <= l2_clip_norm, 1, l2_clip_norm / norm)


FLAT = Flat()


def check_rule(clip_rule: Any) -> None:
    """Raises unless it is a rule."""
    if not isinstance(clip_rule, ClipRule):
        raise TypeError(
            "Expected clip_rule to be a dpadambc.clipping.ClipRule, such as"
            f" clipping.Automatic(), got {clip_rule!r}."
        )
