r"""Accounting of a Gaussian step in which one node can move the sum by several terms.

A node is in several clipped terms, of which a random number is sampled. Given that
number the sum moves by at most a known shift s, so the step is a Gaussian with a random
shift, s with probability p(s). dp-accounting has no event of which this is a case: its
mixture of Gaussians is for terms that appear or vanish, where here they *change*, and
are there on both sides.

*Theorem.* Let the neighbours' outputs be mixtures over what is sampled, with normal
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

For :math:`\varepsilon < 0` the profile follows from exchanging the neighbours. The
whole is convex in :math:`e^\varepsilon`, so it is the profile of some pair of
distributions, and composes (`Zhu et al. 2022 <https://arxiv.org/abs/2106.08567>`_).
With one term it is that of the Poisson-subsampled Gaussian, in both directions at once.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import dp_accounting
import numpy as np
import scipy.special
from dp_accounting import pld, rdp
from dp_accounting.pld import pld_pmf

_ORDERS = np.concatenate(
    [np.arange(1.05, 10, 0.05), np.arange(10, 64), 2.0 ** np.arange(6, 11)]
)

# The profile is cut where it falls below this, or at a loss whose exponential is near
# the largest number; the rest counts as infinite loss.
_TAIL = 1e-18
_LARGEST_LOSS = 600.0


@dataclasses.dataclass(frozen=True)
class ShiftMixtureDpEvent(dp_accounting.DpEvent):
    """A Gaussian step whose sum one node moves by a random shift.

    It is read by this library's accounting only.

    Args:
      noise_multiplier: the standard deviation, in units of the largest shift.
      shifts: from 0 to 1, in units of the largest; the first one is 0.
      probs: their probabilities.
    """

    noise_multiplier: float
    shifts: tuple[float, ...]
    probs: tuple[float, ...]


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


def rdp_bound(event: ShiftMixtureDpEvent, orders: np.ndarray) -> np.ndarray:
    r"""The Rényi divergence, by joint convexity alone.

    .. math:: \frac{1}{\alpha - 1}
        \ln \sum_s p(s) e^{\alpha (\alpha - 1) s^2 / 2 \sigma^2}
    """
    shifts = np.array(event.shifts) / event.noise_multiplier
    exponents = orders[:, None] * (orders[:, None] - 1) * shifts**2 / 2
    total = scipy.special.logsumexp(exponents, b=event.probs, axis=1)
    return np.maximum(total, 0) / (orders - 1)


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


def parts(event: dp_accounting.DpEvent) -> list[tuple[ShiftMixtureDpEvent, int]] | None:
    """What a composition is made of, and how often; None if of anything else."""
    if isinstance(event, ShiftMixtureDpEvent):
        return [(event, 1)]
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        inner = parts(event.event)
        return inner and [(part, n * event.count) for part, n in inner]
    if isinstance(event, dp_accounting.ComposedDpEvent):
        several = [parts(inner) for inner in event.events]
        if several and all(several):
            return [part for each in several for part in each or ()]
    return None


Parts = Iterable[tuple[ShiftMixtureDpEvent, int]]


def pld_epsilon(composition: Parts, target_delta: float, interval: float) -> float:
    """Epsilon by privacy loss distributions on a grid of losses."""
    total = pld.privacy_loss_distribution.identity(interval)
    for event, count in composition:
        if event.noise_multiplier == 0:
            return np.inf
        if event.probs[0] < 1:
            step = pld.privacy_loss_distribution.PrivacyLossDistribution(
                _pmf(event, interval)
            )
            # Where the grid holds hardly any mass, bounds on its tails overflow.
            with np.errstate(over="ignore", divide="ignore"):
                total = total.compose(step.self_compose(count))
    return float(total.get_epsilon_for_delta(target_delta))


def rdp_epsilon(composition: Parts, target_delta: float) -> float:
    """Epsilon by Rényi divergences."""
    total: Sequence[float] | np.ndarray = np.zeros_like(_ORDERS)
    for event, count in composition:
        if event.noise_multiplier == 0:
            return np.inf
        total = total + count * rdp_bound(event, _ORDERS)
    epsilon, _ = rdp.compute_epsilon(list(_ORDERS), list(total), target_delta)
    return float(epsilon)
