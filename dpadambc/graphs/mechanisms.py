"""The Gaussian mechanism where one node is in several clipped terms of the sum.

Training on a graph clips one term for each root, the gradient of the loss on its
subgraph. A node is in its own term and in those of the roots that gather it, and can
change all of them. `graphs.subgraphs` bounds their number; these mechanisms account for
it.
"""

import dataclasses

import dp_accounting

from dpadambc.core import validate
from dpadambc.core.accounting import PLD, RDP
from dpadambc.core.clip import NeighboringRelation
from dpadambc.graphs.poisson_terms import PoissonTermsDpEvent
from dpadambc.mechanisms import names, replaced_terms
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian
from dpadambc.mechanisms.mechanism import Mechanism
from dpadambc.mechanisms.poisson import PoissonGaussian


class _MultiTermGaussian(Mechanism):
    """The sensitivity of a node in several terms, for any sampling."""

    max_terms: int

    def __post_init__(self):
        validate.count(max_terms=self.max_terms, least=1)
        super().__post_init__()

    @property
    def terms_per_unit(self) -> int:
        """The most clipped terms that a node is in."""
        return self.max_terms


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class NodePoissonGaussian(_MultiTermGaussian, PoissonGaussian):
    r"""Poisson sampling of roots, where a node is in at most `max_terms` terms.

    At every step each root takes part independently with probability `sampling_prob`.
    Under ADD_OR_REMOVE_ONE one node is removed: its own term vanishes (C), and the
    other T - 1 change (2 C each). The sensitivity is (2 T - 1) C / B. Under REPLACE_ONE
    a node changes, and stays in its terms: 2 T C / B.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity; or a schedule.
      max_terms: T, the most terms that a node is in, its own included: see
        `graphs.max_terms`.
      sampling_prob: q, in [0, 1].
      iterations: the number of steps.
      normalize_by: B, positive; usually `sampling_prob * num_roots`, rounded.
      neighboring_relation: ADD_OR_REMOVE_ONE, REPLACE_SPECIAL (a node replaced by one
        without features or edges, whose own term is zero) or REPLACE_ONE.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.graphs.NodePoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, max_terms=8, sampling_prob=0.1,
      ...     iterations=100, normalize_by=1_000)
      >>> mechanism.sensitivity
      0.015
      >>> round(mechanism.epsilon(target_delta=1e-6), 2)
      2.25

    References:
      The accounting is in `graphs.poisson_terms`. Node-level training by subgraphs:
      `Daigavane et al., Node-Level Differentially Private Graph Neural Networks
      <https://arxiv.org/abs/2111.15521>`_, 2021
    """

    max_terms: int

    relations = dict.fromkeys(NeighboringRelation, (PLD, RDP))

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        sampling, relation = self.sampling_prob, self.neighboring_relation
        step = PoissonTermsDpEvent(noise_multiplier, self.max_terms, sampling, relation)
        return dp_accounting.SelfComposedDpEvent(step, steps)


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFixedSizeGaussian(_MultiTermGaussian, FixedSizeGaussian):
    """A fresh uniform subset of roots in each step, a node in at most `max_terms`.

    Sampling without replacement keeps the number of roots, so privacy is stated for a
    node that changes, perhaps to one without features or edges, and stays in its terms:
    each is replaced, by 2 C. The sensitivity is 2 T C / B.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity; or a schedule.
      max_terms: T, the most terms that a node is in, its own included.
      batch_size: the number of roots in a step.
      num_examples: the number of roots, the same for neighbors.
      iterations: the number of steps.
      normalize_by: B, positive; usually `batch_size`.
      neighboring_relation: REPLACE_ONE.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range, or for another relation.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.graphs.NodeFixedSizeGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, max_terms=8, batch_size=10_000,
      ...     num_examples=90_941, iterations=191, normalize_by=10_000)
      >>> rdp = mechanism.epsilon(1 / 909_410, accountant=accounting.RDP)
      >>> round(rdp, 3)
      5.957
      >>> round(mechanism.epsilon(target_delta=1 / 909_410), 2)
      3.66

    References:
      The accounting is in `mechanisms.replaced_terms`. By `accounting.RDP`: `Daigavane
      et al., Node-Level Differentially Private Graph Neural Networks
      <https://arxiv.org/abs/2111.15521>`_, 2021
    """

    max_terms: int

    def __post_init__(self):
        super().__post_init__()
        validate.count(num_examples=self.num_examples, least=self.max_terms)

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        numbers = self.max_terms, self.batch_size, self.num_examples
        step = replaced_terms.without_replacement(noise_multiplier, *numbers)
        return dp_accounting.SelfComposedDpEvent(step, steps)
