r"""What noise that is correlated over steps, or changes its level, does to moments.

The noise of step t is a filter of independent draws,

.. math:: n_t = \sum_{j < t} d_j z_{t-j}, \qquad z_i \sim \mathcal{N}(0, \Phi_i)

with public coefficients d: those of a correlated mechanism, or the impulse response of
a filter of the private gradient. :math:`\Phi_i` may change by the step, as it does
where the clip norm moves. Its covariances are, for :math:`k \ge 0`,

.. math:: R_{t, t+k} = \mathbb{E}[n_t n_{t+k}] = \sum_{j < t} d_j d_{j+k} \Phi_{t-j}

Bias. :math:`\mathbb{E} (g_t + n_t)^2 = g_t^2 + R_{t,t}` for a fixed gradient, so
:math:`\hat v` exceeds the clean moment by the same average of the variances
:math:`R_{t,t}`, whatever the correlation: `second_moment_bias` of
`correlated_noise_variances`. (A gradient in training depends on the noise of earlier
steps. With independent noise the cross term :math:`2 g_t n_t` has mean zero all the
same; with correlated noise it need not, and the bias is exact only as far as the
gradient does not follow the noise.)

Spread. Of jointly normal noise, by Isserlis' theorem,
:math:`\mathrm{Cov}(n_s^2, n_t^2) = 2 R_{s,t}^2` and :math:`\mathrm{Cov}(n_s^2, n_t) =
0`, so that with the weights w of :math:`\hat v`

.. math::
  \mathrm{Var}\, \hat v
    = \sum_{s,t} w_s w_t (2 R_{s,t}^2 + 4 g_s g_t R_{s,t})

The first term has squares: correlation of either sign widens the spread under noise
alone, and never narrows it.
"""

import jax
import jax.numpy as jnp

from benchmarks.theory._decay import Number


def _vector(x: jax.typing.ArrayLike, name: str) -> jax.Array:
    x = jnp.asarray(x, float)
    if x.ndim != 1 or not x.size:
        raise ValueError(
            f"Expected {name} to be a sequence of numbers, got shape {x.shape}."
        )
    return x


def _filtered(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    return jnp.convolve(x, coefficients, precision="highest")[: x.size]


def correlated_noise_variances(
    coefficients: jax.typing.ArrayLike, noise_variances: jax.typing.ArrayLike
) -> jax.Array:
    r"""The variance of correlated noise at each step.

    .. math:: R_{t,t} = \sum_{j < t} d_j^2 \Phi_{t-j}

    `second_moment_bias` of it is what the noise adds to :math:`\hat v`. The standard
    deviation that a correction is to be given at step t is its root.

    Args:
      coefficients: :math:`d_0, d_1, \ldots`, shape (lags,).
      noise_variances: :math:`\Phi_i` of the independent draws, shape (steps,).

    Returns:
      The variances, shape (steps,), in the unit of the squared gradient.

    Raises:
      ValueError: if either is no sequence.

    Example:
      >>> import jax.numpy as jnp
      >>> from benchmarks import theory
      >>> print(theory.correlated_noise_variances([1.0, -0.5], jnp.array([1, 1, 4])))
      [1.   1.25 4.25]
    """
    coefficients = _vector(coefficients, "coefficients")
    noise_variances = _vector(noise_variances, "noise_variances")
    return _filtered(noise_variances, jnp.square(coefficients))


def correlated_second_moment_spread(
    coefficients: jax.typing.ArrayLike,
    noise_variances: jax.typing.ArrayLike,
    b2: Number = 0.999,
    gradient: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
    r"""The standard deviation of :math:`\hat v` due to correlated noise, after a run.

    .. math::
      \sqrt{\sum_{s,t} w_s w_t (2 R_{s,t}^2 + 4 g_s g_t R_{s,t})},
      \qquad w_t = b_2^{T-t} (1 - b_2) / (1 - b_2^T)

    Exact for gradients that do not depend on the noise: this module's docstring has
    the proof. With one coefficient, :math:`d_0 = 1`, and constant noise it is
    `second_moment_spread`. For noise that an average of decay :math:`\rho` has passed,
    it is in the limit :math:`\sqrt{(1 + b_2 \rho^2) / (1 - b_2 \rho^2)}` times that of
    independent noise of the same variance: 3.1 times for 0.9. A `RelativeFloor` is in
    units of the latter: multiply its factor by this ratio.

    Time is that of as many convolutions as there are coefficients, memory that of one.

    Args:
      coefficients: :math:`d_0, d_1, \ldots`, shape (lags,).
      noise_variances: :math:`\Phi_i` of the independent draws, shape (steps,).
      b2: decay rate of the second moment.
      gradient: the clean gradient of every step, a number or of shape (steps,).

    Returns:
      The standard deviation after the last step, in the unit of the squared gradient.

    Raises:
      ValueError: if coefficients or variances are no sequence.

    Example:
      >>> import jax.numpy as jnp
      >>> from benchmarks import theory
      >>> from dpadambc.contrib import filtering
      >>> spread = theory.correlated_second_moment_spread
      >>> filtered = spread(filtering.impulse_response([0.1], [1, -0.9], 100),
      ...                   jnp.ones(10_000))
      >>> independent = theory.second_moment_spread(0.1 / 1.9)
      >>> print(f"{filtered / independent:.1f}")
      3.1
    """
    d = _vector(coefficients, "coefficients")
    phi = _vector(noise_variances, "noise_variances")
    steps, lags = phi.size, min(d.size, phi.size)
    # In units of the largest, whose square may be less than float32 can hold.
    unit = jnp.max(phi)
    unit = jnp.where(unit > 0, unit, 1)
    phi, g = phi / unit, jnp.broadcast_to(gradient, steps) / jnp.sqrt(unit)
    w = jnp.power(b2, jnp.arange(steps - 1, -1, -1, dtype=float))
    w = w / jnp.sum(w)
    later = lambda x, k: jax.lax.dynamic_slice_in_dim(
        jnp.concatenate([x, jnp.zeros_like(x)]), k, x.size
    )

    def of_lag(k):
        covariances = _filtered(phi, d * later(d, k))
        squares = 2 * jnp.square(covariances) + 4 * g * later(g, k) * covariances
        return jnp.where(k > 0, 2, 1) * jnp.sum(w * later(w, k) * squares)

    return unit * jnp.sqrt(jnp.sum(jax.lax.map(of_lag, jnp.arange(lags))))
