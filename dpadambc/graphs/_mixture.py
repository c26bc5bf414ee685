r"""Accounting of a Gaussian step in which one node can move the sum by several terms.

A node is in several clipped terms, of which a random number is sampled. Given that
number the sum moves by at most a known shift s, so the step is a Gaussian with a random
shift, s with probability p(s). dp-accounting has no event of which this is a case: its
mixture of Gaussians is for terms that appear or vanish, where here they *change*, and
are there on both sides.

*Theorem.* Let the neighbors' outputs be mixtures over what is sampled, with normal
components that are the same where nothing affected is sampled, of probability p(0),
that differ by at most s otherwise, and that differ by at most s from those with nothing
affected sampled. Then for :math:`\varepsilon \ge 0`

.. math:: \delta(\varepsilon) \le \sum_{s > 0} p(s) \, \delta_s(\varepsilon'), \qquad
    e^{\varepsilon'} = 1 + \frac{e^\varepsilon - 1}{1 - p(0)}

with :math:`\delta_s` of a Gaussian that moves by s, in both directions.

*Proof.* Advanced joint convexity (`Balle et al. 2018
<https://arxiv.org/abs/1807.01647>`_, theorem 2) splits off the common component: the
divergence is at most 1 - p(0) times that, at :math:`\varepsilon'`, of the rest of the
one side from a mixture of that component with the rest of the other. By convexity in
the second argument it is at most the larger of the two divergences, and by joint
convexity, pairing the samples, each of them is at most the mean of
:math:`\delta_s(\varepsilon')` over s given s > 0.

For :math:`\varepsilon < 0` the profile follows from exchanging the neighbors. The
whole is convex in :math:`e^\varepsilon`, so it is the profile of some pair of
distributions, and composes (`Zhu et al. 2022 <https://arxiv.org/abs/2106.08567>`_).
With one term it is that of the Poisson-subsampled Gaussian, in both directions at once.
"""

import dataclasses

import numpy as np
import scipy.special
from dp_accounting import pld
from dp_accounting.pld import pld_pmf

from dpadambc.clipping.flat import NeighboringRelation
from dpadambc.mechanisms import accounting

# The profile is cut where it falls below this, or at a loss whose exponential is near
# the largest number; the rest counts as infinite loss.
_TAIL = 1e-18
_LARGEST_LOSS = 600.0


@dataclasses.dataclass(frozen=True)
class ShiftMixtureDpEvent(accounting.ReadableDpEvent):
    """A Gaussian step whose sum one node moves by a random shift.

    The accountants of `mechanisms.accounting` read it, and no others.

    Args:
      noise_multiplier: the standard deviation, in units of the largest shift.
      shifts: from 0 to 1, in units of the largest; the first one is 0.
      probs: their probabilities.
      neighboring_relation: what the shifts are of; None for any.
    """

    noise_multiplier: float
    shifts: tuple[float, ...]
    probs: tuple[float, ...]
    neighboring_relation: NeighboringRelation | None = None

    @property
    def rate(self) -> float:
        """The probability that anything moves."""
        return 1 - self.probs[0]

    def privacy_losses(
        self, interval: float
    ) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
        """The privacy losses of one step on a grid, from above."""
        return pld.privacy_loss_distribution.PrivacyLossDistribution(
            _pmf(self, interval)
        )

    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        r"""By joint convexity alone.

        .. math:: \frac{1}{\alpha - 1}
            \ln \sum_s p(s) e^{\alpha (\alpha - 1) s^2 / 2 \sigma^2}
        """
        shifts = np.array(self.shifts) / self.noise_multiplier
        exponents = orders[:, None] * (orders[:, None] - 1) * shifts**2 / 2
        total = scipy.special.logsumexp(exponents, b=self.probs, axis=1)
        return np.maximum(total, 0) / (orders - 1)


def _gaussian_deltas(epsilons: np.ndarray, shift: float) -> np.ndarray:
    """Delta of a Gaussian that moves by so many standard deviations."""
    log_ndtr = scipy.special.log_ndtr
    first = log_ndtr(shift / 2 - epsilons / shift)
    second = epsilons + log_ndtr(-shift / 2 - epsilons / shift)
    return np.exp(first) * -np.expm1(np.minimum(second - first, 0))


def deltas(event: ShiftMixtureDpEvent, epsilons: np.ndarray) -> np.ndarray:
    """The bound on delta at each epsilon, of any sign."""
    absolute = np.abs(epsilons)
    affected = 1 - event.probs[0]
    inner = np.log1p(np.expm1(absolute) / affected)
    positive = np.zeros_like(absolute)
    for shift, prob in zip(event.shifts[1:], event.probs[1:], strict=True):
        positive += prob * _gaussian_deltas(inner, shift / event.noise_multiplier)
    exchanged = -np.expm1(-absolute) + np.exp(-absolute) * positive
    return np.where(epsilons >= 0, positive, exchanged)


def _pmf(event: ShiftMixtureDpEvent, interval: float) -> pld_pmf.PLDPmf:
    """The privacy losses of one step on a grid, from above."""
    last = 10 * interval
    while last < _LARGEST_LOSS and deltas(event, np.array([last]))[0] > _TAIL:
        last = min(1.25 * last, _LARGEST_LOSS)
    size = int(np.ceil(last / interval))
    grid = np.arange(-size, size + 1)
    profile = np.clip(deltas(event, grid * interval), 0, 1)
    # Rounding may break the order; what is larger is the bound.
    profile = np.maximum.accumulate(profile[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -size, size, profile
    )
