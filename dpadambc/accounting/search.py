r"""The epsilon of a search over hyperparameters that publishes the best trial.

A trial draws a candidate, trains privately and scores the model. In a search the number
of trials is random and secret, the candidates are drawn with replacement, and only the
best trial is published: eight trials cost about one and a half times the epsilon of
one, and sixty-four about twice. (All trials of a fixed number may be published; they
compose.) `training.search` makes such a search. This is its proof.

A trial Q draws a candidate, trains with it and scores the model; its output y has
candidate, model and score. K trials are made, and the one with the best score is
returned. Equal scores are put into random order: let y have one more coordinate,
uniform and independent of the data, so that outputs are in a linear order that does not
depend on the data, and no two of K are equal.

Let q be the density of y, F(y) = Q(y' <= y), and f(x) = E x^K the generating function
of K. The best of k trials has density k q F^{k-1}, so the result has

.. math:: a(y) = q(y) f'(F(y)),

and the event that no trial is made (K = 0) has the same probability on all data sets.
From here on, primes on q, F and a are for a neighbor, and f' is still the derivative.
Let δ(ε) be the largest hockey-stick divergence of Q between neighbors, in either order,
and m = f'(1) = E K. f' grows, so it is at most m.

*Lemma.* If f'(F) <= e^c f'(F') everywhere, then δ_a(ε) <= m δ(ε - c).
*Proof.* a - e^ε a' = f'(F) q - e^ε f'(F') q' <= f'(F) (q - e^{ε-c} q'), whose positive
part has an integral of at most m δ(ε - c). ∎ So ε_a(δ) = c + ε(δ / m).

*Truncated negative binomial*, shape η and γ: with g(x) = 1 - (1 - γ) x it is
f'(x) = m (γ / g(x))^{η+1}. Where Q is (ε₁, δ₁)-private, 1 - F' <= e^{ε₁} (1 - F) + δ₁,
since the set of outputs above y is the same on all data sets. So

.. math:: g(F') = \gamma + (1-\gamma)(1 - F')
    \le \gamma + (1-\gamma) \delta_1 + e^{\epsilon_1} (1-\gamma)(1-F)
    \le e^{\epsilon_1} g(F)

if γ + (1 - γ) δ₁ <= e^{ε₁} γ, and the lemma holds with c = (η + 1) ε₁. The least such
ε₁ solves e^{ε₁} - 1 = δ(ε₁) (1 - γ) / γ; it is at most log(1 / γ). No smaller ratio of
g(F') and g(F) follows from the profile: by duality of profile and trade-off curve, the
largest ratio that a Q of this profile has is e^{ε₁}.

*Poisson*, mean μ: f'(x) = μ e^{μ (x - 1)}, and F - F' is at most the total variation
δ(0). The lemma holds with c = μ δ(0).

*Fixed number*: it is a composition. Nothing much better holds (Papernot and Steinke).

That candidates have different mechanisms changes nothing as long as δ(ε) bounds them
all: Q is a mixture of them with the same weights on all data sets.

References:
  Papernot and Steinke, `Hyperparameter Tuning with Renyi Differential Privacy
  <https://arxiv.org/abs/2110.03620>`_, 2021: the Rényi bound, which dp-accounting has.
  Koskela, Redberg and Wang, `Privacy Profiles for Private Selection
  <https://arxiv.org/abs/2402.06701>`_, 2024: bounds by the profile.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import scipy.optimize
from dp_accounting import DpEvent, NeighboringRelation, SelfComposedDpEvent, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import rdp_privacy_accountant

from dpadambc.accounting.calibrate import without_lines
from dpadambc.accounting.trials import (
    FixedTrials,
    GeometricTrials,
    PoissonTrials,
    Trials,
    TruncatedNegativeBinomial,
)
from dpadambc.core import accounting, validate
from dpadambc.core.accounting import PLD, RDP, Accountant, check_delta
from dpadambc.mechanisms.checks import check_mechanism
from dpadambc.mechanisms.mechanism import Mechanism

MechanismT = TypeVar("MechanismT", bound=Mechanism)
Bound = Literal["profile", "renyi", "composition"]

# The relative accuracy to which the epsilon of one trial is solved for.
_TOLERANCE = 5e-4


def check_trials(trials: Trials) -> None:
    """Raises unless it is a distribution whose searches are accounted for."""
    # Not a subclass, which may draw numbers from another distribution.
    if type(trials) not in (
        GeometricTrials,
        TruncatedNegativeBinomial,
        PoissonTrials,
        FixedTrials,
    ):
        raise TypeError(
            "Expected trials to be a distribution of the number of trials, such as"
            f" accounting.GeometricTrials(8), got {trials!r}."
        )


def _least_ratio(gamma: float, profile: Callable[[float], float]) -> float:
    """Finds the least ε₁ with e^{ε₁} - 1 >= δ(ε₁) (1 - γ) / γ."""
    gap = lambda x: math.expm1(x) * gamma - (1 - gamma) * profile(x)
    most = -math.log(gamma)
    if gap(0.0) >= 0 or gap(most) <= 0:
        return 0.0 if gap(0.0) >= 0 else most
    least = scipy.optimize.root_scalar(gap, bracket=(0.0, most), xtol=1e-9).root
    while gap(least) < 0:  # the root, from the side where the inequality holds
        least = min(least * (1 + 1e-9) + 1e-12, most)
    return least


def by_profile(
    losses: PrivacyLossDistribution,
    trials: Trials,
    target_delta: float,
    rounding: float = 0.0,
) -> float:
    """Computes c + ε(δ / m) of the lemma, if each delta lacks at most `rounding`."""
    profile = lambda x: min(float(losses.get_delta_for_epsilon(x)) + rounding, 1.0)
    if isinstance(trials, TruncatedNegativeBinomial):
        c = (trials.shape + 1) * _least_ratio(trials.gamma, profile)
    else:
        c = trials.expected * profile(0.0)
    left = target_delta / trials.expected - rounding
    return c + float(losses.get_epsilon_for_delta(left)) if left > 0 else math.inf


def _profile_epsilon(
    event: DpEvent, trials: Trials, target_delta: float, relation: NeighboringRelation
) -> float:
    if PLD.is_astronomical(event):
        return math.inf
    grid = PLD.on_fine_grid(event, relation, target_delta / trials.expected)
    return by_profile(grid.losses, trials, target_delta, accounting.rounding_of(event))


def _renyi_epsilon(
    event: DpEvent, trials: Trials, target_delta: float, relation: NeighboringRelation
) -> float:
    if RDP.is_astronomical(event):
        return math.inf
    accountant: Any = RDP.composed(event, rdp.RdpAccountant(None, relation))
    shape = float(getattr(trials, "shape", np.inf))  # of a Poisson, to dp-accounting
    accountant._rdp = rdp_privacy_accountant._compute_rdp_repeat_and_select(
        accountant._orders, accountant._rdp, trials.expected, shape
    )
    return float(accountant.get_epsilon(target_delta))


class TunedEpsilon(NamedTuple):
    """The cost of a search, with others to compare it with.

    Attributes:
      epsilon: the epsilon of the search.
      bound: the bound that gave it: by the privacy profile, by Rényi divergences, or by
        composition.
      of_one_trial: the epsilon of one trial.
      of_composition: the epsilon of as many trials as are expected, rounded up, all of
        which may be published.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=4.0, sampling_prob=0.1, iterations=300,
      ...     normalize_by=100)
      >>> found = accounting.tuned_epsilon(
      ...     mechanism, 1e-5, trials=accounting.GeometricTrials(8))
      >>> print(f"{found.of_one_trial:.2f}, search {found.epsilon:.2f}, "
      ...       f"composition {found.of_composition:.2f}, by {found.bound}")
      1.77, search 2.70, composition 5.69, by profile
    """

    epsilon: float
    bound: Bound
    of_one_trial: float
    of_composition: float

    @property
    def cheaper(self) -> Literal["search", "composition"]:
        """The cheaper of the search and the composition of as many trials."""
        return "search" if self.epsilon < self.of_composition else "composition"


@without_lines()
def tuned_epsilon_of_event(
    event: DpEvent,
    accountants: Sequence[Accountant],
    trials: Trials,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
) -> TunedEpsilon:
    """Returns the least of the bounds that hold: see `tuned_epsilon`.

    Args:
      event: one trial.
      accountants: the accountants that can read it.
      trials: the distribution of the number of trials.
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: the difference of two neighboring data sets.
    """
    check_trials(trials)

    def composed(number: int) -> float:
        whole, relation = SelfComposedDpEvent(event, number), neighboring_relation
        used = accountants, target_delta
        return accounting.least_epsilon(whole, *used, relation=relation)

    bounds: list[tuple[float, Bound]] = []
    arguments = event, trials, target_delta, neighboring_relation
    if isinstance(trials, FixedTrials):
        bounds.append((composed(trials.number), "composition"))
    elif PLD in accountants:
        bounds.append((_profile_epsilon(*arguments), "profile"))
    if RDP in accountants and not isinstance(trials, FixedTrials):
        bounds.append((_renyi_epsilon(*arguments), "renyi"))
    least, bound = min(bounds)
    return TunedEpsilon(least, bound, composed(1), composed(math.ceil(trials.expected)))


def tuned_epsilon(
    mechanism: Mechanism,
    target_delta: float,
    *,
    trials: Trials,
    iterations: int | None = None,
    accountant: Accountant | None = None,
) -> TunedEpsilon:
    """Computes the epsilon of publishing the best of a random number of trials.

    Guarantees:
      * It holds for any score, where the score is computed inside the trial: from the
        releases of the trial, or from public data.
      * It holds for any candidates that are drawn without looking at the data, one for
        each trial, independently, where the event bounds the mechanism of each.
      * It covers the best trial alone: not the number of trials, nor another score.

    Args:
      mechanism: the mechanism of one trial.
      target_delta: the delta that goes with it, in (0, 1).
      trials: the distribution of the number of trials, such as `GeometricTrials(8)`.
      iterations: the number of steps of each; `mechanism.iterations` by default.
      accountant: `accounting.PLD` or `accounting.RDP`; by default the least of all
        bounds.

    Returns:
      A `TunedEpsilon`.

    Raises:
      TypeError: if `trials` is no such distribution.
      ValueError: if delta is outside (0, 1), or the accountant cannot account for the
        sampling under the neighboring relation.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> found = accounting.tuned_epsilon(
      ...     mechanism, 1e-5, trials=accounting.GeometricTrials(8))
      >>> print(f"{mechanism.epsilon(1e-5):.1f} of one, {found.epsilon:.1f} in all")
      2.3 of one, 3.5 in all

    References:
      Liu and Talwar, `Private Selection from Private Candidates
      <https://arxiv.org/abs/1811.07971>`_, 2018
    """
    check_mechanism(mechanism)
    check_delta(target_delta, mechanism.known_size)
    accountants = (accountant,) if accountant else mechanism.accountants
    event, relation = mechanism.dp_event(iterations), mechanism.neighboring_relation
    return tuned_epsilon_of_event(event, accountants, trials, target_delta, relation)


def calibrate_search(
    kind: type[MechanismT],
    *,
    target_epsilon: float,
    target_delta: float,
    trials: Trials,
    accountant: Accountant | None = None,
    **public_numbers: Any,
) -> MechanismT:
    """Makes the mechanism of one trial with which a whole search meets a target.

    Args:
      kind: the class of the mechanism.
      target_epsilon: the epsilon of the search to reach and not to exceed.
      target_delta: the delta that goes with it.
      trials: the distribution of the number of trials.
      accountant: `accounting.PLD` or `accounting.RDP`; by default the least bound.
      **public_numbers: the arguments of `Mechanism.calibrate`.

    Returns:
      A mechanism whose search costs the target, to three digits, and never more.

    Raises:
      TypeError: if `trials` is no such distribution, or as `Mechanism.calibrate`.
      ValueError: as `Mechanism.calibrate`.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = accounting.calibrate_search(
      ...     dpadambc.PoissonGaussian, target_epsilon=2.0, target_delta=1e-5,
      ...     trials=accounting.GeometricTrials(8), l2_clip_norm=1.0, sampling_prob=0.1,
      ...     iterations=30, normalize_by=100)
      >>> print(f"{mechanism.noise_multiplier:.1f} {mechanism.epsilon(1e-5):.1f}")
      2.0 1.3
    """
    validate.positive(target_epsilon=target_epsilon)
    how: dict[str, Any] = dict(target_delta=target_delta, accountant=accountant)

    @functools.cache
    def mechanism(log_epsilon: float) -> MechanismT:
        return kind.calibrate(
            target_epsilon=math.exp(log_epsilon), **how, **public_numbers
        )

    @functools.cache
    def gap(x: float) -> float:
        found = tuned_epsilon(mechanism(x), trials=trials, **how)
        # Bounded, since the search cannot use infinity.
        spent = min(found.epsilon, 10 * target_epsilon)
        return math.log(max(spent, 1e-3 * target_epsilon) / target_epsilon)

    most = math.log(target_epsilon)  # no search costs less than one trial
    if gap(most) <= 0:
        return mechanism(most)
    least = most - math.log(2)
    while gap(least) > 0:
        least -= math.log(2)
    x = scipy.optimize.root_scalar(gap, bracket=(least, most), xtol=_TOLERANCE).root
    while gap(x) > 0:
        x -= _TOLERANCE
    return mechanism(x)
