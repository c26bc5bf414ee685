"""Per-sample adaptive clipping, a rule of one paper."""

import dataclasses

import jax

from dpadambc.core import validate
from dpadambc.core.clip import ClipRule


@dataclasses.dataclass(frozen=True)
class PerSampleAdaptive(ClipRule):
    r"""DP-PSAC: like `Automatic`, but it lengthens very short gradients less.

    .. math:: w = C / \Bigl(\lVert g \rVert
        + \frac{r}{\lVert g \rVert + r}\Bigr)

    A gradient much shorter than r is scaled by C, one much longer to the length C. The
    formula was checked against two public implementations, one of which names line 5 of
    the paper's Algorithm 1 as its source, and not against the text.

    Args:
      r: a positive number in the unit of the gradient.

    Raises:
      ValueError: if r is not positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> norms = jnp.array([0.0, 0.1, 10.0])
      >>> rule = contrib.PerSampleAdaptive(r=0.1)
      >>> print((norms * jax.vmap(lambda x: rule.weight(x, 1.0))(norms)).round(1))
      [0.  0.2 1. ]

    References:
      Xia et al., `Differentially Private Learning with Per-Sample Adaptive Clipping
      <https://arxiv.org/abs/2212.00328>`_, 2023
    """

    r: float = 0.1

    def __post_init__(self):
        validate.positive(r=self.r)

    def weight(self, norm: jax.Array, l2_clip_norm: jax.Array) -> jax.Array:
        """Returns C / (norm + r / (norm + r)): see `ClipRule.weight`."""
        return l2_clip_norm / (norm + self.r / (norm + self.r))
