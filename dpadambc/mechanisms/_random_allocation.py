r"""Accounting of random allocation: an example is in one random step of several.

*Theorem.* Let each of b steps add Gaussian noise of deviation :math:`z C` to a sum. Let
one example add a vector of norm at most C to the sum of one step, which is uniformly
random and secret. Vectors and sums may depend on all earlier outputs. With P and Q the
laws of all outputs with the example and without it, for every :math:`\alpha \ge 0`

.. math:: H_\alpha(P \| Q) \le E (Y - \alpha)_+, \quad
    H_\alpha(Q \| P) \le E (1 - \alpha Y)_+, \quad
    Y = \frac{1}{b} \sum_{j=1}^b Y_j

with independent log-normal :math:`Y_j` of mean 1 whose logarithm has variance
:math:`1 / z^2`. An example that adds C to a separate coordinate attains both.

*Proof.* The steps in which the others take part are independent of the example:
condition on them (joint convexity). Let :math:`a_j \le 1 / z` be the norm of the vector
of step j over z C, a function of earlier outputs. An example in step j multiplies the
density of that step's output by :math:`L_j = \exp(a_j \xi_j - a_j^2 / 2)`. Under Q,
:math:`\xi_j` is standard normal and independent of the past. So dP/dQ is the mean of
the :math:`L_j`.

Let f be convex. Given the past, dP/dQ is affine in the last :math:`L_j`. The process
:math:`\exp(B_t - t / 2)` is a martingale in t, so it increases with t in convex order.
Hence an independent :math:`Y_b` in place of :math:`L_b` does not decrease
:math:`E_Q f(dP/dQ)`. The expectation over :math:`Y_b` is a convex function of the rest,
so the step before can be replaced likewise, and so on to the first.

*Several participations.* Let the example be in k random steps of b. Split the steps at
random into k blocks whose sizes differ by one at most, and let it be in one uniformly
random step of each block. By symmetry these are k uniformly random steps. Given the
blocks, dP/dQ is the product of their means, which is affine in each :math:`L_j` alone.
So the proof holds unchanged, however the blocks interleave in time, with a product of
independent means: the composition of k events. By joint convexity it holds for random
blocks. For 1 < k < b the bound is not exact.

*Composition.* Both bounds are the profiles of one pair of distributions, Y and its law
under Q, so they compose over epochs, adaptively (`Zhu et al. 2022
<https://arxiv.org/abs/2106.08567>`_). A run that ends within an epoch is a function of
one that goes on, so the bound of the whole epoch holds for it.

*Numbers.* Every operation spreads Y without moving its mean, which can only increase
both expectations. A number between two points of a grid is split between them. A number
below the grid is split between its first point and 0, an infinite loss of Q against P.
A number above it is split between its last point and infinity, which has mass under P
alone, an infinite loss of P against Q. All terms are positive, so rounding is relative,
about 1e-12 of each mass.

References:
  Chua et al., `Balls-and-Bins Sampling for DP-SGD <https://arxiv.org/abs/2412.16802>`_
  Feldman and Shenfeld, `Privacy amplification by random allocation
  <https://arxiv.org/abs/2502.08202>`_
"""

import dataclasses
import functools
from typing import NamedTuple, Self

import dp_accounting
import numpy as np
import scipy.special
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_pmf import DensePLDPmf

from dpadambc.mechanisms.events import ReadableDpEvent

# The mass that each operation cuts off: mass under Q below, under P above.
_TAIL = 1e-20
# The number of points of a grid, and of the finer grid of a sum.
_POINTS, _FINE_POINTS = 600, 6_000
# Beyond this logarithm the ratio is near the largest float.
_LARGEST_LOG = 600.0
# More noise counts as this much, so that the numbers of a grid differ.
_MOST_NOISE = 1e6


def _split(values: np.ndarray, masses: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Splits masses between the points of a grid, and keeps the mean of each."""
    below = np.clip(np.searchsorted(grid, values, "right") - 1, 0, len(grid) - 2)
    gaps = np.diff(grid)
    up = masses * np.clip((values - grid[below]) / gaps[below], 0, 1)
    size = len(grid)
    return np.bincount(below, masses - up, size) + np.bincount(below + 1, up, size)


class _Ratios(NamedTuple):
    """The law under Q of a sum of density ratios, spread onto a grid."""

    values: np.ndarray  # increasing; the first one is 0
    masses: np.ndarray
    excess: float  # the part of the mean at infinity, without mass

    @property
    def mean(self) -> float:
        return float(self.values @ self.masses) + self.excess

    def trimmed(self) -> Self:
        """Cuts off ends that have hardly any mass."""
        values, masses, excess = self
        first = int(np.searchsorted(np.cumsum(masses), _TAIL))
        first = min(max(first, 1), len(values) - 2)
        above = np.cumsum((values * masses)[::-1])[::-1]
        last = int(np.sum(above > _TAIL * self.mean)) - 1
        last = max(last, first + 1)
        excess += float((values[last:] - values[last]) @ masses[last:])
        kept = masses[first : last + 1].copy()
        kept[-1] += masses[last + 1 :].sum()
        up = masses[:first] * (values[:first] / values[first])
        kept[0] += up.sum()
        zero = float(np.sum(masses[:first] - up))
        values = np.append(0.0, values[first : last + 1])
        return type(self)(values, np.append(zero, kept), excess)

    def coarsened(self) -> Self:
        """Reduces the points: half of them dense where the mass is, half everywhere."""
        values, masses, excess = self
        if len(values) <= _POINTS:
            return self
        probs = masses[1:] * (1 + values[1:] / self.mean)
        density = np.cbrt(probs)
        reached = np.cumsum(density / density.sum() + 1 / len(density))
        steps = np.linspace(reached[0], reached[-1], _POINTS - 1)
        chosen = 1 + np.unique(np.searchsorted(reached, steps).clip(0, len(probs) - 1))
        chosen = np.unique(np.concatenate([[0, 1], chosen, [len(values) - 1]]))
        grid = values[chosen]
        return type(self)(grid, _split(values, masses, grid), excess)

    def __add__(self, other: Self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Convolves with an independent law."""
        values = np.add.outer(self.values, other.values)
        masses = np.multiply.outer(self.masses, other.masses)
        if self is other:  # each pair once
            pairs = np.triu_indices(len(self.values))
            values, masses = values[pairs], masses[pairs] * (2 - (pairs[0] == pairs[1]))
        least = self.values[1] + other.values[1]
        grid = np.geomspace(least, self.values[-1] + other.values[-1], _FINE_POINTS)
        grid = np.concatenate([[0.0], grid])
        masses = _split(values.ravel(), masses.ravel(), grid)
        masses /= masses.sum()  # otherwise rounding grows with the number of terms
        found = type(self)(grid, masses, self.excess + other.excess)
        return found.trimmed().coarsened()


def _one(noise_multiplier: float) -> _Ratios:
    """Returns the ratio of one step: log-normal, on a grid."""
    s = 1 / min(noise_multiplier, _MOST_NOISE)
    end = -scipy.special.ndtri(_TAIL)
    x = np.linspace(-end, s + end, _POINTS)
    values = np.exp(s * x - s**2 / 2)
    edges = np.concatenate([[-np.inf], x, [np.inf]])
    mass, mean = _normal(edges), _normal(edges - s)  # of each cell, under Q and P
    gaps = np.diff(values)
    share = np.clip((mean[1:-1] - values[:-1] * mass[1:-1]) / gaps, 0, mass[1:-1])
    masses = np.concatenate([mass[1:-1] - share, [0.0]])
    masses[1:] += share
    low = min(mean[0] / values[0], mass[0])
    masses[0] += low
    masses[-1] += mass[-1]
    excess = max(mean[-1] - values[-1] * mass[-1], 0.0)
    values, masses = np.append(0.0, values), np.append(mass[0] - low, masses)
    return _Ratios(values, masses, float(excess))


def _normal(edges: np.ndarray) -> np.ndarray:
    """Computes the standard normal's mass between edges, from the nearer tail."""
    low, high = edges[:-1], edges[1:]
    ndtr = scipy.special.ndtr
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def _sum_of(steps: int, noise_multiplier: float) -> _Ratios:
    """Computes the law of a sum of `steps` independent ratios, by doubling."""
    power, total = _one(noise_multiplier), None
    while True:
        if steps % 2:
            total = power if total is None else total + power
        steps //= 2
        if total is not None and not steps:
            return total
        power = power + power


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(ReadableDpEvent):
    """Gaussian steps with an example in a random one of them.

    Only the accountants of `accounting` read it. It is for an example that is added,
    removed or replaced by one that adds nothing: an example that is replaced by any
    other moves the sum twice as far.

    Args:
      noise_multiplier: the standard deviation, in units of the example's contribution.
      steps: the number of steps, at least 2.
      neighboring_relation: ADD_OR_REMOVE_ONE or REPLACE_SPECIAL.
    """

    noise_multiplier: float
    steps: int
    neighboring_relation: dp_accounting.NeighboringRelation | None = (
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )

    @property
    def rate(self) -> float:
        """The probability that the steps together affect the neighbors: one."""
        return 1.0

    @functools.cached_property
    def _ratios(self) -> _Ratios:
        """The law of the mean, cached, as an event is read on several grids."""
        values, masses, excess = _sum_of(self.steps, self.noise_multiplier)
        return _Ratios(values / self.steps, masses, excess / self.steps)

    def privacy_losses(self, interval: float) -> pld.PrivacyLossDistribution:
        """The privacy losses of all steps on a grid, from above, in both directions."""
        z = self.noise_multiplier
        if 0.5 / z**2 + 10 / z > _LARGEST_LOG:
            # As if the step were known: by joint convexity, an upper bound.
            return pld.from_gaussian_mechanism(
                z, value_discretization_interval=interval
            )
        (zero, *_), excess = self._ratios.masses, self._ratios.excess
        logs = np.log(self._ratios.values[1:]) / interval
        first, last = int(np.floor(logs[0])), int(np.ceil(logs[-1])) + 1
        grid = np.exp(np.arange(first, last + 1) * interval)
        masses = _split(self._ratios.values[1:], self._ratios.masses[1:], grid)
        pmf = functools.partial(DensePLDPmf, interval, pessimistic_estimate=True)
        removal = pmf(first, masses * grid, infinity_mass=excess)
        addition = pmf(-last, masses[::-1], infinity_mass=zero)
        return pld.PrivacyLossDistribution(removal, addition)
