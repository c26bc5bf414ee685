"""The epsilon of a search over hyperparameters, of which the best trial is published.

A trial draws a candidate, trains privately and scores the model. In a search the number
of trials is random and secret, the candidates are drawn with replacement, and nothing
is told but the best trial: eight trials cost about one and a half times the epsilon of
one, and sixty-four about twice. (All of a fixed number of trials may be told; they
compose.) `training.search` makes such a search; `_selection` has the proof.
"""

import math
from typing import Literal, NamedTuple

import dp_accounting

from dpadambc.accounting import selection
from dpadambc.accounting.selection import Events
from dpadambc.accounting.trials import Trials

__all__ = ["TunedEpsilon", "tuned_epsilon"]


class TunedEpsilon(NamedTuple):
    """What a search costs, beside what it is to be compared with.

    Attributes:
      epsilon: of the search.
      bound: which bound gave it: of the privacy profile, of Rényi divergences, or of
        composition.
      of_one_trial: the epsilon of one trial.
      of_composition: the epsilon of as many trials as are expected, rounded up, all of
        which may be published.

    Example:
      >>> import dpadambc
      >>> from dpadambc.accounting import trials
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=4.0, sampling_prob=0.1, iterations=300,
      ...     normalize_by=100)
      >>> found = mechanism.tuned_epsilon(1e-5, trials=trials.Geometric(8))
      >>> print(f"{found.of_one_trial:.2f}, search {found.epsilon:.2f}, "
      ...       f"composition {found.of_composition:.2f}, by {found.bound}")
      1.77, search 2.70, composition 5.69, by profile
    """

    epsilon: float
    bound: Literal["profile", "renyi", "composition"]
    of_one_trial: float
    of_composition: float

    @property
    def cheaper(self) -> Literal["search", "composition"]:
        """Whether the search costs less than composition of as many trials."""
        return "search" if self.epsilon < self.of_composition else "composition"


def tuned_epsilon(
    events: Events,
    trials: Trials,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> TunedEpsilon:
    """The epsilon of publishing the best of a random number of trials.

    Guarantees:
      * It holds for any score, where the score is computed inside the trial: from what
        the trial releases, from public data, or from protected data with noise whose
        event is composed into that of the trial.
      * It holds for any candidates that are drawn without looking at the data, one for
        each trial, independently, where the event bounds the mechanism of each.
      * It covers the best trial alone: not the number of trials, nor another score.

    Args:
      events: what one trial runs, by the accountant in whose unit it is; the least of
        the bounds is taken. See `Mechanism.tuned_epsilon` for one mechanism.
      trials: the distribution of the number of trials, such as `trials.Geometric(8)`.
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.

    Returns:
      A `TunedEpsilon`.

    Raises:
      TypeError: if `trials` is no such distribution.
      ValueError: without an event, for an unknown accountant, a delta outside (0, 1),
        or an event that an accountant cannot account for under this relation.

    Example:
      >>> import dp_accounting
      >>> from dpadambc.accounting import trials, tuning
      >>> tuned = tuning.tuned_epsilon(
      ...     {"pld": dp_accounting.GaussianDpEvent(4.0)}, trials.Geometric(8),
      ...     target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> print([f"{x:.2f}" for x in (tuned.of_one_trial, tuned.epsilon)])
      ['0.93', '1.46']

    References:
      Liu and Talwar, `Private Selection from Private Candidates
      <https://arxiv.org/abs/1811.07971>`_, 2018
    """
    rest = {"target_delta": target_delta, "neighboring_relation": neighboring_relation}
    epsilon, name = selection.least_bound(events, trials, **rest)
    number = math.ceil(trials.expected)
    return TunedEpsilon(
        epsilon,
        name,
        selection.composed_epsilon(events, 1, **rest),
        selection.composed_epsilon(events, number, **rest),
    )
