r"""A Gaussian step on a sample of fixed size, in which a record can change some terms.

Of N terms B are drawn, with or without replacement; one record can change T of them
(one, in ordinary training), by 2 C each. Let :math:`h_k` be the probability of drawing
k of those, and :math:`s_k = 2 k C / \sigma`. For :math:`\alpha \ge 1` no hockey-stick
divergence of the step exceeds

.. math:: D(\alpha) = \sup_t \; (1 - \alpha) h_0 \Phi(t)
    + \sum_{k \ge 1} h_k f_k(\min(t, x_k)), \qquad
    f_k(x) = \Phi(x + s_k) - \alpha \Phi(x),

with :math:`x_k = -s_k / 2 - \ln \alpha / s_k`, where :math:`f_k` is largest; and for
:math:`\alpha < 1` none exceeds :math:`1 - \alpha + \alpha D(1 / \alpha)`.

*Proof.* Draw B terms that are not affected, then put k affected ones in the places of
random k of them. By joint convexity all but k may be taken as known, and the sum of the
first draw as 0. Given k, the outputs of the neighbors are normal around u and v with
:math:`|u|, |v|, |u - v| \le 2 k C`, and the same where k = 0. Of an event let
:math:`\Phi(t)` be the probability under noise around 0, and :math:`\Phi(w)` that
around u. By the lemma of Neyman and Pearson :math:`w \le t + s_k`, and around v it has
at least :math:`\Phi(w - s_k)` and :math:`\Phi(t - s_k)`. So the contribution of k,
:math:`\Phi(w) - \alpha \Phi(\max(w, t) - s_k)` at most, grows with w up to t, and is
:math:`f_k(w - s_k)` beyond, at an argument of at most t: its largest value is
:math:`f_k(\min(t, x_k))`. (If fewer than B terms are not affected, :math:`h_0 = 0`, and
D is the mean of :math:`f_k(x_k)`, which is joint convexity alone.) Both orders of the
neighbors are alike; below 1,
:math:`H_\alpha(P \| Q) = 1 - \alpha + \alpha H_{1 / \alpha}(Q \| P)`.

D is a supremum of linear functions of :math:`\alpha`, and at 1 its slope
:math:`-h_0 \Phi(-s_1 / 2) - \sum_k h_k \Phi(-s_k / 2)` is at least
:math:`-(1 - D(1)) / 2`; so the whole is convex. It is then the profile of a pair of
distributions that dominates the step, and composes adaptively (`Zhu et al. 2022
<https://arxiv.org/abs/2106.08567>`_, proposition 8 and theorem 10).
"""

import dataclasses

import numpy as np
import scipy.special
import scipy.stats
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.core.clip import NeighboringRelation
from dpadambc.mechanisms.events import ReadableDpEvent
from dpadambc.mechanisms.profiles import losses_of_profile, of_any_sign, renyi_of_shifts

# The exponential of this loss is near the largest float.
_LARGEST_LOSS = 600.0
_ndtr = scipy.special.ndtr


@dataclasses.dataclass(frozen=True)
class ReplacedTermsDpEvent(ReadableDpEvent):
    """One step on a sample of fixed size, in which a record can change some terms.

    Only the accountants of `accounting` read it.

    Args:
      noise_multiplier: the standard deviation, in units of the change by all terms.
      probs: the probabilities of 0, 1, ... affected terms in the sample.
    """

    noise_multiplier: float
    probs: tuple[float, ...]
    neighboring_relation: NeighboringRelation | None = NeighboringRelation.REPLACE_ONE

    @property
    def _shifts(self) -> np.ndarray:
        """The change of the sum by each number of terms, in deviations of the noise."""
        most = len(self.probs) - 1
        return np.arange(most + 1) / (most * self.noise_multiplier)

    @property
    def rate(self) -> float:
        """The probability that the sample has an affected term."""
        return sum(self.probs[1:])

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Bounds delta at each epsilon, of any sign."""
        return of_any_sign(epsilons, self._positive_deltas, self._positive_deltas)

    def _positive_deltas(self, epsilons: np.ndarray) -> np.ndarray:
        h0, h, s = self.probs[0], np.array(self.probs[1:]), self._shifts[1:]
        h, s = h[h > 0], s[h > 0]
        t = _end_of_half_line(epsilons, h0, h, s)[:, None]
        x = np.minimum(t, -s / 2 - epsilons[:, None] / s)
        first = scipy.special.log_ndtr(x + s)
        second = epsilons[:, None] + scipy.special.log_ndtr(x)
        f = np.exp(first) * -np.expm1(np.minimum(second - first, 0))
        return np.maximum(-np.expm1(epsilons) * h0 * _ndtr(t[:, 0]) + f @ h, 0)

    def privacy_losses(self, interval: float) -> PrivacyLossDistribution:
        """The privacy losses of one step on a grid, from above."""
        losses = losses_of_profile(self.deltas, interval, _LARGEST_LOSS)
        return PrivacyLossDistribution(losses)

    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        r"""Bounds the divergence by joint convexity, as if the terms were known.

        .. math:: \frac{1}{\alpha - 1}
            \ln \sum_k h_k e^{\alpha (\alpha - 1) s_k^2 / 2}
        """
        return renyi_of_shifts(orders, self._shifts, np.array(self.probs))


def without_replacement(
    noise_multiplier: float, max_terms: int, batch_size: int, num_terms: int
) -> ReplacedTermsDpEvent:
    """Returns the event of one step on a uniform subset of terms."""
    most = min(max_terms, batch_size)
    counts = np.arange(most + 1)
    probs = scipy.stats.hypergeom.pmf(counts, num_terms, max_terms, batch_size)
    # The noise is in units of all terms; the sample has no more than `most`.
    in_units_of_most = noise_multiplier * max_terms / most
    return ReplacedTermsDpEvent(in_units_of_most, tuple(probs.tolist()))


def _end_of_half_line(
    epsilons: np.ndarray, h0: float, h: np.ndarray, s: np.ndarray
) -> np.ndarray:
    """Finds the t of the supremum, where the slope of the objective changes its sign.

    The slope, over the normal density at t, falls with t.
    """
    alpha = np.exp(epsilons)
    lows, highs = np.full_like(epsilons, -1e3), np.full_like(epsilons, 1e3)
    for _ in range(64):
        t = (lows + highs) / 2
        ratios = np.exp(np.minimum(-s * t[:, None] - s**2 / 2, _LARGEST_LOSS))
        slopes = (1 - alpha) * h0 + np.maximum(ratios - alpha[:, None], 0) @ h
        lows, highs = np.where(slopes > 0, t, lows), np.where(slopes > 0, highs, t)
    return (lows + highs) / 2
