r"""A Gaussian step on Poisson-sampled terms, several of which one node can change.

Each of the T terms that a node is in is sampled with probability q; noise of deviation
:math:`\sigma` is added. Let N(a) be normal around :math:`a C` and
:math:`k \sim \mathrm{Bin}(T, q)`. These pairs dominate the step:

* a node changes (REPLACE_ONE): :math:`P = E\,N(k)` against :math:`Q = E\,N(-k)`;
* a node is removed, and with it its own term, and its other terms change: :math:`P =
  E\,N(k)` against :math:`Q = E\,N(-k')`, :math:`k' \sim \mathrm{Bin}(T - 1, q)`; and
  the exchanged pair where a node is added.

*Proof.* Let S be the affected terms that are sampled. The others are sampled
independently of S, in the same way on both sides. By joint convexity their sample may
be taken as known, and as adding up to 0. The outputs are then mixtures, over
the same S, of normal distributions around :math:`a_S` and :math:`b_S`, with
:math:`|a_S| \le |S| C` and :math:`|b_S| \le |S'| C`; S' is S, without the node's own
term where that is removed. Of an event E let :math:`\Phi(t)` be the probability under
N(0). By the lemma of Neyman and Pearson it has at most
:math:`\Phi(t + |a_S| / \sigma)` and at least :math:`\Phi(t - |b_S| / \sigma)` under
the two. So for every :math:`\alpha \ge 0`

.. math:: P(E) - \alpha Q(E) \le E_S [\Phi(t + |S| C / \sigma)
    - \alpha \Phi(t - |S'| C / \sigma)],

which the half line beyond -t attains under the pair above. Hence no hockey-stick
divergence exceeds that of the pair. It holds for any earlier outputs, so the pairs
compose, adaptively too (`Zhu et al. 2022 <https://arxiv.org/abs/2106.08567>`_, theorem
10). Terms of one direction attain them.

With one term these are the pairs of the Poisson-subsampled Gaussian.
"""

import dataclasses

import numpy as np
import scipy.stats
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.core.clip import NeighboringRelation
from dpadambc.mechanisms import normal_mixtures
from dpadambc.mechanisms.events import ReadableDpEvent
from dpadambc.mechanisms.profiles import renyi_of_shifts


@dataclasses.dataclass(frozen=True)
class PoissonTermsDpEvent(ReadableDpEvent):
    """One step on Poisson-sampled terms, several of which contain a node.

    Only the accountants of `accounting` read it.

    Args:
      noise_multiplier: the standard deviation, in units of `largest_shift` terms.
      max_terms: T, the most terms that a node is in.
      sampling_prob: q, the probability of each term.
      neighboring_relation: the change of a node.
    """

    noise_multiplier: float
    max_terms: int
    sampling_prob: float
    neighboring_relation: NeighboringRelation | None = (
        NeighboringRelation.ADD_OR_REMOVE_ONE
    )

    @property
    def own_term_goes(self) -> bool:
        """Whether the node's own term is removed, where the others change."""
        return self.neighboring_relation != NeighboringRelation.REPLACE_ONE

    @property
    def largest_shift(self) -> int:
        """The largest change of the sum by a node, in clip norms."""
        return 2 * self.max_terms - self.own_term_goes

    @property
    def rate(self) -> float:
        """The probability that the sample has an affected term."""
        return 1 - (1 - self.sampling_prob) ** self.max_terms

    def _sampled(self, num_terms: int, sign: int) -> normal_mixtures.NormalMixture:
        """Returns the law of a sum over terms of one direction, in noise deviations."""
        counts = np.arange(num_terms + 1)
        deviation = self.noise_multiplier * self.largest_shift
        probs = scipy.stats.binom.pmf(counts, num_terms, self.sampling_prob)
        return normal_mixtures.mixture(sign * counts / deviation, probs)

    def privacy_losses(self, interval: float) -> PrivacyLossDistribution:
        """Returns the privacy losses of one step on a grid, from above."""
        here, there = self.max_terms, self.max_terms - self.own_term_goes
        sampled, on_grid = self._sampled, normal_mixtures.losses_on_grid
        goes = on_grid(sampled(here, 1), sampled(there, -1), interval)
        if not self.own_term_goes:
            return PrivacyLossDistribution(goes)
        comes = on_grid(sampled(there, 1), sampled(here, -1), interval)
        return PrivacyLossDistribution(goes, comes)

    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        r"""Bounds the divergence by joint convexity, as if the terms were known.

        .. math:: \frac{1}{\alpha - 1}
            \ln E_S e^{\alpha (\alpha - 1) (|S| + |S'|)^2 C^2 / 2 \sigma^2}
        """
        others = self.max_terms - 1
        counts = np.arange(others + 1)
        pmf = scipy.stats.binom.pmf(counts, others, self.sampling_prob)
        own = 2 - self.own_term_goes
        moves = np.concatenate([2 * counts, 2 * counts + own])
        q = self.sampling_prob
        probs = np.concatenate([(1 - q) * pmf, q * pmf])
        shifts = moves / (self.noise_multiplier * self.largest_shift)
        return renyi_of_shifts(orders, shifts, probs)
