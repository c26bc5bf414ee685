r"""Accounting of truncated Poisson sampling: too large a sample is cut to a part.

Each of n examples is drawn with probability q. If more than B are drawn, a uniform
subset of B takes part. Neighbors differ in the contribution of one example, the last,
to the sum: a vector of norm at most C, or nothing. The set of participants has the same
law for both. Let K of the others be drawn; K is binomial. Let :math:`s = C / \sigma`.

*Theorem.* Where K < B - 1, the example takes part with probability q, as by Poisson
sampling. The rest of the probability, K of at least B - 1, has three parts:

.. math:: h = q P(K = B - 1) + \sum_{k \ge B} P(K = k) \frac{q B}{k + 1}, \quad
    a = (1 - q) P(K = B - 1), \quad
    b = \sum_{k \ge B} P(K = k) (1 - \frac{q B}{k + 1}).

For every :math:`\alpha \ge 0` the hockey-stick divergence of a step is at most
:math:`P(K < B - 1)` times that of Poisson sampling, and

.. math:: D(\alpha) = \sup_{|t - t'| \le s} (1 - \alpha) (a \Phi(t) + b \Phi(t'))
    + h (\Phi(t + u) - \alpha \Phi(t - v)),

where :math:`(u, v)` is (s, 0) of the example against nothing, (0, s) of nothing against
it, and (s, s) of an example against another.

*Proof.* Where the example takes part, min(K, B - 1) others do. Call them R. Where it
does not and K < B, let R be the K others. Where it does not and :math:`K \ge B`, let R
be the B others who take part without a uniformly random one, r. In each case R is a
uniform subset of its size. By joint convexity R may be taken as known, and its sum as
0. If it has fewer than B - 1 members, the example takes part with probability q: a pair
   of Poisson sampling. Otherwise the output is normal around 0 with weight a, around
   the contribution of r (at most C) with weight b, and around the contribution of the
   example with weight h. Of an event let :math:`\Phi(t)` be the probability under noise
   around 0, and :math:`\Phi(t')` that around the sum of r. By the lemma of Neyman and
   Pearson :math:`|t - t'| \le s`, and of noise around a vector of norm at most C the
   probability is between :math:`\Phi(t - s)` and :math:`\Phi(t + s)`.

*The supremum.* For :math:`\alpha \ge 1` it has :math:`t' = t - s`. Over the normal
density at t, the derivative in t is

.. math:: h (e^{-u t - u^2 / 2} - \alpha e^{v t - v^2 / 2})
    - (\alpha - 1) (a + b e^{s t - s^2 / 2}),

which falls with t: there is one maximum. With t for -t and -t', the bound below 1 is
:math:`H_\alpha(P \| Q) = h + a + b - \alpha + \dots` by the exchange of the neighbors,
:math:`1 - \alpha + \alpha D_{Q P}(1 / \alpha)` where h + a + b is scaled to 1.

D is a supremum of linear functions of :math:`\alpha` that fall, is 1 at 0 and at least
:math:`(1 - \alpha)_+`. So, like that of Poisson sampling, it is the profile of a pair
of distributions; their mixture dominates the step, and composes adaptively (`Zhu et al.
2022 <https://arxiv.org/abs/2106.08567>`_, proposition 8 and theorem 10).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld

from dpadambc.mechanisms.events import ReadableDpEvent
from dpadambc.mechanisms.profiles import losses_of_profile, of_any_sign

_log_ndtr = scipy.special.log_ndtr


class FullBatches(NamedTuple):
    """The case that at least B - 1 others are drawn: the weights of its three parts."""

    with_it: float  # h
    without_it: float  # a, of B - 1 others
    of_others: float  # b, of B others
    prob: float  # of all three

    def deltas(self, epsilons: np.ndarray, s: float, u: float, v: float) -> np.ndarray:
        """Computes the bound D at each epsilon, of any sign."""
        positive = lambda x: self._positive_deltas(x, s, u, v)
        exchanged = lambda x: self._positive_deltas(x, s, v, u)
        return of_any_sign(epsilons, positive, exchanged)

    def _positive_deltas(
        self, epsilons: np.ndarray, s: float, u: float, v: float
    ) -> np.ndarray:
        with np.errstate(divide="ignore"):
            h, a, b = np.log(self[:3])
            # ln(exp(x) - 1), where exp(x) is no number too.
            less = epsilons + np.log(-np.expm1(-epsilons))
        moved = lambda t, by: by * t - by**2 / 2  # of a density, its logarithm
        t, width = np.zeros_like(epsilons), 1e3
        for _ in range(64):
            others = less + np.logaddexp(a, b + moved(t, s))
            falls = np.logaddexp(epsilons + h + moved(t, v), others)
            width /= 2
            t += np.where(h + moved(t, -u) > falls, width, -width)
        others = less + np.logaddexp(a + _log_ndtr(t), b + _log_ndtr(t - s))
        taken = np.logaddexp(epsilons + h + _log_ndtr(t - v), others)
        first = h + _log_ndtr(t + u)
        return np.exp(first) * -np.expm1(np.minimum(taken - first, 0))


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonDpEvent(ReadableDpEvent):
    """One Gaussian step on a truncated Poisson sample.

    Only the accountants of `accounting` read it.

    Args:
      noise_multiplier: the noise over the sensitivity, C or under REPLACE_ONE 2 C.
      sampling_prob: q, the probability of each example.
      truncated_batch_size: B, the largest batch.
      num_examples: the size of the data set.
      neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
    """

    noise_multiplier: float
    sampling_prob: float
    truncated_batch_size: int
    num_examples: int
    neighboring_relation: NeighboringRelation  # pyright: ignore[reportIncompatibleVariableOverride]

    @functools.cached_property
    def _too_many(self) -> float:
        """The probability that more than B are drawn, and the example is kept."""
        n, q, size = self.num_examples, self.sampling_prob, self.truncated_batch_size
        return float(scipy.stats.binom.sf(size, n, q) * size / n)

    @property
    def rate(self) -> float:
        """The probability that an example takes part."""
        n, q, size = self.num_examples, self.sampling_prob, self.truncated_batch_size
        few = scipy.stats.binom.cdf(size - 1, n - 1, q)
        return float(q * few + self._too_many)

    @property
    def full_batches(self) -> FullBatches:
        """The case that the batch has B - 1 others and the example, or room for it."""
        n, q, size = self.num_examples, self.sampling_prob, self.truncated_batch_size
        one_less = scipy.stats.binom.pmf(size - 1, n - 1, q)
        others = max(scipy.stats.binom.sf(size - 1, n - 1, q) - self._too_many, 0.0)
        parts = np.array([q * one_less + self._too_many, (1 - q) * one_less, others])
        prob = float(parts.sum())
        h, a, b = (parts / prob if prob else parts).tolist()
        return FullBatches(h, a, b, prob)

    def privacy_losses(self, interval: float) -> pld.PrivacyLossDistribution:
        """Returns the privacy losses of one step on a grid, from above."""
        replaces = self.neighboring_relation == NeighboringRelation.REPLACE_ONE
        stddev = self.noise_multiplier * (1 + replaces)  # in units of C
        poisson = pld.from_gaussian_mechanism(
            stddev,
            value_discretization_interval=interval,
            sampling_prob=self.sampling_prob,
            neighboring_relation=self.neighboring_relation,
        )
        full, s = self.full_batches, 1 / stddev
        if not full.prob:
            return poisson
        pairs = ((s, s), (s, s)) if replaces else ((s, 0.0), (0.0, s))
        profiles = (functools.partial(full.deltas, s=s, u=u, v=v) for u, v in pairs)
        both = (losses_of_profile(x, interval, math.inf) for x in profiles)
        losses = pld.PrivacyLossDistribution(*both)
        return losses.compute_mixture(poisson, min(full.prob, 1.0))
