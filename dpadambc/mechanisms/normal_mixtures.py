r"""The privacy losses of two mixtures of normal distributions, on a grid, from above.

For a pair P, Q of densities whose loss :math:`L(x) = \ln P(x) / Q(x)` grows with x, the
outcomes with a loss between two neighbors of the grid are an interval of x. Its mass
under P and its mass under Q are both put on the two neighbors ("connecting the dots",
`Doroshenko et al. 2022 <https://arxiv.org/abs/2207.04380>`_): the likelihood ratio is
spread and keeps its mean, so that no hockey-stick divergence falls.

The masses come from the distribution functions, not from differences of divergences:
they are exact to rounding *of each mass*, far into the tails too.
"""

from typing import NamedTuple

import numpy as np
import scipy.special
from dp_accounting.pld import pld_pmf

# The mass of P beyond the grid: infinite loss above, the least loss below.
_TAIL = 1e-22
# The largest exponent: its exponential is finite.
_LARGEST_EXPONENT = 700.0
_NUM_KNOTS = 4_096


class NormalMixture(NamedTuple):
    """Normal distributions of deviation 1, each with its mean and its probability."""

    means: np.ndarray  # shape=(k,)
    probs: np.ndarray  # shape=(k,)

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Computes the log density, up to the constant that all mixtures have."""
        # SciPy overflows if the least probabilities are given as weights.
        exponents = self.means * (x[:, None] - self.means / 2) + np.log(self.probs)
        return np.asarray(scipy.special.logsumexp(exponents, axis=1)) - x**2 / 2

    def mean_of_component(self, x: np.ndarray) -> np.ndarray:
        """Computes the posterior mean of the component that x is from."""
        exponents = self.means * (x[:, None] - self.means / 2)
        weights = scipy.special.softmax(exponents + np.log(self.probs), axis=1)
        return weights @ self.means

    def masses(self, edges: np.ndarray) -> np.ndarray:
        """Computes the masses between edges, from the nearer tail of each."""
        centered = edges[:, None] - self.means
        from_left = np.diff(scipy.special.ndtr(centered), axis=0)
        from_right = -np.diff(scipy.special.ndtr(-centered), axis=0)
        is_left = centered[1:] < 0
        return np.where(is_left, from_left, from_right) @ self.probs

    def end(self, tail: float) -> float:
        """Finds a point beyond which the mass is at most this, and not much less."""
        beyond = lambda x: scipy.special.ndtr(self.means - x) @ self.probs
        low, high = self.means.max() - 40.0, self.means.max() + 40.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if beyond(middle) > tail else (low, middle)
        return high

    def mirrored(self) -> "NormalMixture":
        """Returns the law of -x."""
        return NormalMixture(-self.means, self.probs)


def mixture(means: np.ndarray, probs: np.ndarray) -> NormalMixture:
    """Makes the mixture of the components that are possible."""
    possible = probs > 0
    return NormalMixture(means[possible], probs[possible])


def _points_of_losses(
    upper: NormalMixture, lower: NormalMixture, losses: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Finds the points with these losses: by interpolation, then Newton's method."""
    loss = lambda x: upper.log_density(x) - lower.log_density(x)
    knots = np.linspace(ends[0], ends[1], _NUM_KNOTS)
    at_knots = np.maximum.accumulate(loss(knots))
    x = np.interp(losses, at_knots, knots)
    before = np.clip(np.searchsorted(at_knots, losses) - 1, 0, _NUM_KNOTS - 2)
    for _ in range(3):
        slope = upper.mean_of_component(x) - lower.mean_of_component(x)
        step = (loss(x) - losses) / np.maximum(slope, 1e-12)
        x = np.clip(x - step, knots[before], knots[before + 1])
    return np.maximum.accumulate(x)


def losses_on_grid(
    upper: NormalMixture, lower: NormalMixture, interval: float
) -> pld_pmf.PLDPmf:
    """Computes the losses of the first mixture against the second one.

    Args:
      upper: P, with means of at least zero.
      lower: Q, with means of at most zero, so that the loss grows with x.
      interval: the interval of the grid.

    Returns:
      The distribution of the losses under P, with every hockey-stick divergence from
      above.
    """
    ends = np.array([-upper.mirrored().end(_TAIL), upper.end(_TAIL)])
    first, last = upper.log_density(ends) - lower.log_density(ends)
    first, last = int(np.floor(first / interval)), int(np.ceil(last / interval))
    last = max(last, first + 1)
    losses = interval * np.arange(first, last + 1)
    edges = _points_of_losses(upper, lower, losses, ends)
    edges[[0, -1]] = ends
    p, q = upper.masses(edges), lower.masses(edges)
    # Solve p = a + b and q = a exp(-loss) + b exp(-loss - interval) for the masses a, b
    # of the two neighbors.
    exponents = np.minimum(losses[:-1], _LARGEST_EXPONENT)
    b = (p - q * np.exp(exponents)) / -np.expm1(-interval)
    b = np.where(losses[:-1] < _LARGEST_EXPONENT, np.clip(b, 0, p), p)
    probs = np.zeros(len(losses))
    probs[1:] += b
    probs[:-1] += p - b
    probs[0] += _TAIL
    return pld_pmf.DensePLDPmf(interval, first, probs, _TAIL, True)
