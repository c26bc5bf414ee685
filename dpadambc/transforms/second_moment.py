"""A second moment with the variance of the noise taken out, and its floor."""

import dataclasses

import jax
import jax.numpy as jnp

from dpadambc import theory
from dpadambc.core import validate


@dataclasses.dataclass(frozen=True)
class RelativeFloor:
    r"""A floor on the corrected second moment in units of what can be resolved.

    After t steps of noise of variance :math:`\Phi` alone, :math:`\hat v` spreads about
    :math:`\Phi` with the standard deviation `theory.second_moment_spread`: 141 % of
    :math:`\Phi` at the first step, 8 % at step 300 and 3 % in the limit, for
    b2 = 0.999. A corrected moment below that is no different from zero. The floor is
    `factor` times this resolution.

    Args:
      factor: positive.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> gradient = jnp.array([0.5, 0.2])
      >>> for factor in (1.0, 0.25):
      ...     adam_bc = dpadambc.scale_by_adam_bc(
      ...         0.3, variance_floor=dpadambc.RelativeFloor(factor))
      ...     updates, _ = adam_bc.update(gradient, adam_bc.init(gradient))
      ...     print(updates.round(2))
      [1.25 0.56]
      [1.25 1.12]
    """

    factor: float = 1.0

    def __post_init__(self):
        validate.positive(factor=self.factor)

    def variance(
        self,
        noise_variance: jax.typing.ArrayLike,
        b2: jax.typing.ArrayLike,
        count: jax.typing.ArrayLike,
    ) -> jax.Array:
        """The floor after `count` steps, for the average noise variance over them."""
        return self.factor * theory.second_moment_spread(noise_variance, b2, count)


def corrected_second_moment(
    nu_hat: jax.Array,
    noise_variance: jax.typing.ArrayLike,
    floor: jax.typing.ArrayLike,
) -> jax.Array:
    r"""What Adam's second moment would be without the noise, floored.

    .. math:: \max(\hat v - \hat \Phi, \gamma')

    Args:
      nu_hat: the bias-corrected second moment of the noised gradient, any shape.
      noise_variance: the bias-corrected average of the noise variance.
      floor: the least value returned.

    Returns:
      An array of the shape and dtype of `nu_hat`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.transforms import second_moment
      >>> print(second_moment.corrected_second_moment(jnp.array([1.5, 0.9]), 1.0, 0.1))
      [0.5 0.1]
    """
    return jnp.maximum(nu_hat - noise_variance, floor).astype(nu_hat.dtype)
