r"""Epsilon without a grid of losses: the reference that accountants are compared with.

    python -m benchmarks.accounting.exact       # writes exact.json

With the privacy loss L of one step under P, its cumulants
:math:`K(s) = \ln E\, e^{s L}` and n steps, for any s > 0

.. math:: \delta(\varepsilon) = E (1 - e^{\varepsilon - L})_+
    = \frac{1}{2 \pi} \int \frac{e^{n K(s + i t) - (s + i t) \varepsilon}}
        {(s + i t)(s + i t + 1)} \, dt,

since the factor is the Laplace transform of :math:`(1 - e^{-y})_+`. On the line through
the saddle point the integrand is what an exponentially tilted loss has for a
characteristic function: no cancellation, however small delta is. Both integrals are of
analytic functions over the line, where the trapezoidal rule converges exponentially.
Its error in t is known by Poisson's summation formula: with the step
:math:`2 \pi / T` the rule gives :math:`\sum_m e^{s m T} \delta(\varepsilon + m T)`, of
which all terms are positive and those with m ≠ 0 are bounded by 1 and by Chernoff. With
bounds on what is cut off and on rounding, true delta is enclosed, and so is epsilon.

The pairs are of neighboring data sets that exist, so no accountant may go below them:

- *add or remove*: all other gradients are zero, that of the example is C;
- *replace*: C becomes -C, and all other gradients are zero;
- *sampling without replacement*: as before, or all other gradients are C too. From
  above: the profile of advanced joint convexity, in both directions, composed;
- *node*: terms of others that it is in go from -C to C, its own from nothing to C.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

from benchmarks.accounting import settings
from benchmarks.accounting.settings import Setting

RESULTS = pathlib.Path(__file__).with_name("exact.json")

_REACH = 14.0  # standard deviations past the outermost peak of an integrand
_NEGLIGIBLE = 1e-13  # of delta: what is cut off
_ROUNDING = 4e-16
_NODES_PER_DEVIATION = 8
_MOST_BLOCKS = 10_000

Mixture = tuple[np.ndarray, np.ndarray]  # means in standard deviations, probabilities


@dataclasses.dataclass(frozen=True)
class Losses:
    """The privacy loss of one step, as the nodes of a quadrature."""

    losses: np.ndarray
    log_masses: np.ndarray

    def cumulant(self, s: np.ndarray) -> np.ndarray:
        """K at complex s, of shape (n,)."""
        real = float(np.real(s[0]))
        peak = np.max(self.log_masses + real * self.losses)
        kept = self.log_masses + real * self.losses > peak - 80
        losses, log_masses = self.losses[kept], self.log_masses[kept] - peak
        total = np.zeros(len(s), complex)
        for part in np.array_split(
            np.arange(len(s)), 1 + len(s) * len(losses) // 10**6
        ):
            total[part] = np.exp(log_masses + s[part, None] * losses).sum(1)
        return np.log(total) + peak


Steps = Sequence[tuple[Losses, int]]  # with how often each is composed


def _log_density(mixture: Mixture, x: np.ndarray) -> np.ndarray:
    means, probs = mixture
    exponents = -((x[:, None] - means) ** 2) / 2 - 0.5 * math.log(2 * math.pi)
    return np.asarray(scipy.special.logsumexp(exponents, b=probs, axis=1))


def mixture_losses(first: Mixture, second: Mixture, largest_tilt: float) -> Losses:
    """Of one mixture of unit normals against another, for s up to `largest_tilt`."""
    means = np.concatenate([first[0], second[0]])
    beyond = _REACH + largest_tilt * np.ptp(means)
    low, high = means.min() - beyond, means.max() + beyond
    size = math.ceil((high - low) * _NODES_PER_DEVIATION)
    x, step = np.linspace(low, high, size + 1, retstep=True)
    log_first, log_second = _log_density(first, x), _log_density(second, x)
    return Losses(log_first - log_second, log_first + math.log(step))


def symmetric_losses(rate: float, shift: float, largest_tilt: float) -> Losses:
    """Of the profile that advanced joint convexity gives, in both directions at once.

    Positive losses are those of the mixture against the normal; a negative one has the
    mass that the normal has where the mixture has the positive one; the rest is 0.
    """
    mixture = np.array([0.0, shift]), np.array([1 - rate, rate])
    pure = np.zeros(1), np.ones(1)
    panels = np.linspace(
        shift / 2,
        (1 + largest_tilt) * shift + _REACH,
        8 + int(8 * largest_tilt * shift),
    )
    nodes, weights = np.polynomial.legendre.leggauss(24)
    half = np.diff(panels)[:, None] / 2
    x = (panels[:-1, None] + half * (1 + nodes)).ravel()
    log_weights = np.log(half * weights).ravel()
    log_mixture, log_pure = _log_density(mixture, x), _log_density(pure, x)
    losses = log_mixture - log_pure
    log_masses = np.concatenate([log_mixture + log_weights, log_pure + log_weights])
    rest = 1 - np.exp(log_masses).sum()
    return Losses(
        np.concatenate([losses, -losses, [0.0]]),
        np.concatenate([log_masses, [math.log(rest)]]),
    )


def _root(
    fun: Callable[[float], float], low: float, high: float, tolerance: float
) -> float:
    found = scipy.optimize.root_scalar(fun, bracket=(low, high), xtol=tolerance)
    return float(found.root)


class Composition:
    """Delta of composed steps on one contour, which is best near one delta."""

    def __init__(self, steps_of: Callable[[float], Steps], delta: float):
        self._steps, self._tilt = _best_tilt(steps_of, delta)
        count = sum(n for _, n in self._steps)
        at_tilt = self._cumulant(np.array([complex(self._tilt)]))[0].real
        self._chernoff_tilt = 1.5 * self._tilt + 1
        beyond = self._cumulant(np.array([complex(self._chernoff_tilt)]))[0].real
        self._beyond = beyond
        # The period beyond which all other terms of the sum are negligible.
        enough = math.log(1 / (_NEGLIGIBLE * delta))
        least = (at_tilt - math.log(delta)) / self._tilt  # of epsilon, by Chernoff
        past = self._chernoff_tilt - self._tilt
        excess = beyond - self._chernoff_tilt * least
        self._period = max(enough / self._tilt, (enough + max(excess, 0)) / past) + 1
        self._at_tilt = at_tilt
        self._s, self._log_terms, self._cut = self._contour()
        self._rounding = _ROUNDING * (count + 64)

    def _cumulant(self, s: np.ndarray) -> np.ndarray:
        return sum((n * losses.cumulant(s) for losses, n in self._steps), np.zeros(1))

    def _contour(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Points on it, the logarithms of the integrand there, and what is cut off."""
        step, block = 2 * math.pi / self._period, 64
        s, terms = [], []
        for i in range(_MOST_BLOCKS):
            t = step * np.arange(i * block, (i + 1) * block)
            s.append(self._tilt + 1j * t)
            terms.append(self._cumulant(s[-1]) - np.log(s[-1]) - np.log(s[-1] + 1))
            # The cumulant at the end of a block bounds what follows: the density of
            # the loss is smooth, and its characteristic function falls.
            last = np.max(np.real(terms[-1]))
            cut = math.exp(last - float(np.real(terms[0][0])))
            if cut * self._tilt * (self._tilt + 1) < _NEGLIGIBLE / 100:
                return np.concatenate(s), np.concatenate(terms), cut
        raise ValueError(
            "Expected more steps, got so few that the loss has no smooth density."
        )

    def delta_bounds(self, epsilon: float) -> tuple[float, float]:
        """Below and above true delta."""
        step = 2 * math.pi / self._period
        terms = np.exp(self._log_terms - self._s * epsilon)
        terms[0] /= 2  # the other half of the line is the conjugate
        total = step / math.pi * np.real(terms).sum()
        size = step / math.pi * np.abs(terms).sum()
        error = self._rounding * size + 2 * len(self._s) * self._cut * size
        below = math.exp(-self._tilt * self._period)
        past = self._chernoff_tilt - self._tilt
        above = math.exp(
            self._beyond - self._chernoff_tilt * epsilon - past * self._period
        )
        return float(total - error - 2 * (below + above)), float(total + error)

    def epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """Below and above true epsilon."""
        if self.delta_bounds(0.0)[1] <= delta:
            return 0.0, 0.0
        most = (self._at_tilt - math.log(delta)) / self._tilt
        excess = lambda e, i: math.log(self.delta_bounds(e)[i] / delta)
        above = _root(lambda e: excess(e, 1), 0.0, most, 1e-13)
        # Far from there the lower bound on delta is of no use: it is sought nearby.
        below, width = above, 1e-12
        while below > 0 and self.delta_bounds(below)[0] < delta:
            below, width = max(above - width, 0.0), 2 * width
        return below, above


def _best_tilt(steps_of: Callable[[float], Steps], delta: float) -> tuple[Steps, float]:
    """The s with Chernoff's least epsilon, and quadratures that reach 1.5 s + 1."""
    reach = 4.0
    while True:
        steps = steps_of(1.5 * reach + 1)

        def epsilon(log_s, steps=steps):
            s = math.exp(log_s)
            at = np.array([complex(s)])
            total = sum(n * losses.cumulant(at)[0].real for losses, n in steps)
            return (total - math.log(delta)) / s

        found = scipy.optimize.minimize_scalar(
            epsilon, bounds=(math.log(1e-2), math.log(reach)), options={"xatol": 1e-2}
        )
        tilt = math.exp(found.x)
        if tilt < 0.9 * reach or reach > 1e4:
            return steps, tilt
        reach *= 4


def composed_bounds(
    steps_of: Callable[[float], Steps], delta: float
) -> tuple[float, float]:
    """Below and above epsilon of composed steps, by their quadratures up to a tilt."""
    return Composition(steps_of, delta).epsilon_bounds(delta)


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Of one Gaussian on the whole data set: the closed form."""
    mu = 1 / noise_multiplier
    log_ndtr = scipy.special.log_ndtr

    def log_delta(epsilon):
        first = log_ndtr(mu / 2 - epsilon / mu)
        second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return first + math.log(-math.expm1(second - first)) - math.log(delta)

    return _root(log_delta, 0, mu**2 / 2 + 40 * mu, 1e-13)


_Pair = Callable[[float], tuple[Mixture, Mixture]]  # of a noise multiplier


def _mixture(means: Sequence[float], probs: Sequence[float], sigma: float) -> Mixture:
    return np.array(means) / sigma, np.array(probs)


def _sampled(rate: float, terms: Sequence[float], z: float) -> Mixture:
    """A normal that moves with some probability."""
    return _mixture(terms, (1 - rate, rate), z)


def _exchanged(pair: _Pair) -> _Pair:
    """The other direction."""

    def exchanged(z: float) -> tuple[Mixture, Mixture]:
        first, second = pair(z)
        return second, first

    return exchanged


def _add_pairs(rate: float) -> list[_Pair]:
    pure = np.zeros(1), np.ones(1)

    def add(z: float) -> tuple[Mixture, Mixture]:
        return _sampled(rate, (0, 1), z), pure

    return [add, _exchanged(add)]


def _replace_pairs(rate: float) -> list[_Pair]:
    # In units of the sensitivity, 2 C. The other direction is its mirror image.
    return [lambda z: (_sampled(rate, (0, 0.5), z), _sampled(rate, (0, -0.5), z))]


def _node_pairs(rate: float, max_terms: int) -> list[_Pair]:
    largest, others = 2 * max_terms - 1, np.arange(max_terms)
    probs = scipy.stats.binom.pmf(others, max_terms - 1, rate)
    own = np.concatenate([others, others + 1])
    of_own = np.concatenate([probs * (1 - rate), probs * rate])

    def pair(z: float) -> tuple[Mixture, Mixture]:
        there = _mixture(own.tolist(), of_own.tolist(), largest * z)
        gone = _mixture((-others).tolist(), probs.tolist(), largest * z)
        return there, gone

    return [pair, _exchanged(pair)]


def _pairs(setting: Setting) -> list[_Pair]:
    if setting.kind == "node":
        return _node_pairs(setting.rate, setting.max_terms)
    if setting.kind == "fixed":
        return _add_pairs(setting.rate) + _replace_pairs(setting.rate)
    of = _replace_pairs if setting.relation == "REPLACE_ONE" else _add_pairs
    return of(setting.rate)


def epsilon_bounds(setting: Setting, noise_multiplier=None) -> tuple[float, float]:
    """Below and above the least epsilon of a setting; one solved for needs its noise.

    Returns:
      A true lower bound, of a pair that exists, and an upper bound. Of nodes no upper
      bound is known: both are of the pair.
    """
    levels = setting.noise_levels(noise_multiplier)
    if setting.rate == 1:
        ((z, count),) = levels.items()
        exact = gaussian_epsilon(z / math.sqrt(count), setting.delta)
        return exact, exact

    def bounds(losses_of: Callable[[float, float], Losses]) -> tuple[float, float]:
        steps_of = lambda tilt: [(losses_of(z, tilt), n) for z, n in levels.items()]
        return composed_bounds(steps_of, setting.delta)

    def of(pair: _Pair) -> Callable[[float, float], Losses]:
        return lambda z, tilt: mixture_losses(*pair(z), tilt)

    found = [bounds(of(pair)) for pair in _pairs(setting)]
    below, above = (max(values) for values in zip(*found, strict=True))
    if setting.kind == "fixed":
        above = bounds(lambda z, tilt: symmetric_losses(setting.rate, 1 / z, tilt))[1]
    return below, above


def noise_multiplier(setting: Setting) -> float:
    """The least noise by which the upper bound meets the target."""
    target = setting.target or math.inf
    gap = lambda x: epsilon_bounds(setting, math.exp(x))[1] - target
    low, high = math.log(0.4), math.log(4)
    while gap(high) > 0:
        high += 1
    while gap(low) < 0:
        low -= 0.3
    return math.exp(_root(gap, low, high, 1e-7))


def main() -> None:
    results = {}
    for setting in settings.ALL:
        row = {}
        if setting.target is not None:
            row["noise_multiplier"] = noise_multiplier(setting)
        below, above = epsilon_bounds(setting, row.get("noise_multiplier"))
        results[setting.name] = row | {"below": below, "above": above}
        print(f"{setting.name}: {results[setting.name]}", flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
