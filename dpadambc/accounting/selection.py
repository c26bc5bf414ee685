r"""The best of a random number of trials: what it costs, with the proof.

A trial Q draws a candidate, trains with it and scores the model; its output y has
candidate, model and score. K trials are made, and the one with the best score is
returned. Equal scores are put into random order: let y have one more coordinate,
uniform and independent of the data, so that outputs are in a linear order that does not
depend on the data, and no two of K are equal.

Let q be the density of y, F(y) = Q(y' <= y), and f(x) = E x^K the generating function
of K. The best of k trials has density k q F^{k-1}, so what is returned has

.. math:: a(y) = q(y) f'(F(y)),

and the event that nothing is (K = 0) the same probability on all data sets. Primes on
q, F and a are for a neighbor from here on, and f' is still the derivative. Let δ(ε) be
the largest hockey-stick divergence of Q between neighbors, in either order, and m =
f'(1) = E K. f' grows, so it is at most m.

*Lemma.* If f'(F) <= e^c f'(F') everywhere, then δ_a(ε) <= m δ(ε - c).
*Proof.* a - e^ε a' = f'(F) q - e^ε f'(F') q' <= f'(F) (q - e^{ε-c} q'), whose positive
part has an integral of at most m δ(ε - c). ∎ So ε_a(δ) = c + ε(δ / m).

*Truncated negative binomial*, shape η and γ: with g(x) = 1 - (1 - γ) x it is
f'(x) = m (γ / g(x))^{η+1}. Where Q is (ε₁, δ₁)-private, 1 - F' <= e^{ε₁} (1 - F) + δ₁,
since what is above y is one set on all data sets. So

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

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import dp_accounting
import numpy as np
import scipy.optimize
from dp_accounting import dp_event
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.accounting import losses as _losses
from dpadambc.accounting.trials import (
    Fixed,
    Geometric,
    Poisson,
    Trials,
    TruncatedNegativeBinomial,
)
from dpadambc.core import accounting as _events
from dpadambc.core import astronomical
from dpadambc.core import epsilon as _epsilon

# What one trial runs, in the unit of each accountant that can read it.
Events = Mapping[_events.Accountant, dp_accounting.DpEvent]


class Bound(NamedTuple):
    """An upper bound on the epsilon of a search."""

    epsilon: float
    name: Literal["profile", "renyi", "composition"]


def check(trials: Trials) -> None:
    """Raises unless it is a distribution whose searches are accounted for."""
    # Not a subclass, which may draw other numbers than it is accounted for.
    if type(trials) not in (Geometric, TruncatedNegativeBinomial, Poisson, Fixed):
        raise TypeError(
            "Expected trials to be a distribution of the number of trials, such as"
            f" dpadambc.accounting.trials.Geometric(8), got {trials!r}."
        )


def _check_events(events: Events) -> None:
    if not isinstance(events, Mapping) or not events:
        raise TypeError(
            "Expected events by the accountant that reads them, such as"
            f' {{"pld": dp_accounting.GaussianDpEvent(2.0)}}, got {events!r}.'
        )
    for accountant in events:
        _events.check_accountant(accountant)


def _least_ratio(gamma: float, profile: Callable[[float], float]) -> float:
    """The least ε₁ with e^{ε₁} - 1 >= δ(ε₁) (1 - γ) / γ."""
    gap = lambda x: math.expm1(x) * gamma - (1 - gamma) * profile(x)
    most = -math.log(gamma)
    if gap(0.0) >= 0 or gap(most) <= 0:
        return 0.0 if gap(0.0) >= 0 else most
    least = scipy.optimize.root_scalar(gap, bracket=(0.0, most), xtol=1e-9).root
    while gap(least) < 0:  # the root, from the side where the inequality holds
        least = min(least * (1 + 1e-9) + 1e-12, most)
    return least


def _by_profile(
    losses: PrivacyLossDistribution,
    trials: Trials,
    target_delta: float,
    rounding: float = 0.0,
) -> float:
    """The lemma: c + ε(δ / m), where rounding may have taken so much off each delta."""
    profile = lambda x: min(float(losses.get_delta_for_epsilon(x)) + rounding, 1.0)
    if isinstance(trials, TruncatedNegativeBinomial):
        c = (trials.shape + 1) * _least_ratio(trials.gamma, profile)
    else:
        c = trials.expected * profile(0.0)
    left = target_delta / trials.expected - rounding
    return c + float(losses.get_epsilon_for_delta(left)) if left > 0 else math.inf


def _profile_epsilon(
    event: dp_accounting.DpEvent,
    trials: Trials,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> float:
    if astronomical.is_astronomical(event, "pld"):
        return math.inf
    losses = _losses.privacy_losses(
        event,
        target_delta=target_delta / trials.expected,
        neighboring_relation=neighboring_relation,
    )
    return _by_profile(losses, trials, target_delta, _losses.rounding_of(event))


def _renyi_epsilon(
    event: dp_accounting.DpEvent,
    trials: Trials,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> float:
    if astronomical.is_astronomical(event, "rdp"):
        return math.inf
    shape = getattr(trials, "shape", np.inf)  # of a Poisson, to dp-accounting
    return _epsilon.epsilon(
        dp_event.RepeatAndSelectDpEvent(event, trials.expected, float(shape)),
        target_delta=target_delta,
        neighboring_relation=neighboring_relation,
        accountant="rdp",
    )


def composed_epsilon(
    events: Events,
    number: int,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> float:
    """The epsilon of so many trials, all of which may be published."""
    return min(
        _epsilon.epsilon(
            dp_accounting.SelfComposedDpEvent(event, number),
            target_delta=target_delta,
            neighboring_relation=neighboring_relation,
            accountant=accountant,
        )
        for accountant, event in events.items()
    )


def least_bound(
    events: Events,
    trials: Trials,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> Bound:
    """The least of the bounds that hold."""
    check(trials)
    _check_events(events)
    _events.check_delta(target_delta)
    if isinstance(trials, Fixed):
        epsilon = composed_epsilon(
            events,
            trials.number,
            target_delta=target_delta,
            neighboring_relation=neighboring_relation,
        )
        return Bound(epsilon, "composition")
    arguments = trials, target_delta, neighboring_relation
    bounds = []
    if "pld" in events:
        bounds.append(Bound(_profile_epsilon(events["pld"], *arguments), "profile"))
    if "rdp" in events:
        bounds.append(Bound(_renyi_epsilon(events["rdp"], *arguments), "renyi"))
    return min(bounds)
