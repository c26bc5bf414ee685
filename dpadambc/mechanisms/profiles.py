"""The privacy losses of a profile (delta as a function of epsilon), from above.

A convex profile is that of a pair of distributions. Given its points on the grid, a
pair on the grid has the polygon through them as its profile ("connecting the dots",
`Doroshenko et al. 2022 <https://arxiv.org/abs/2207.04380>`_), which is nowhere below.
"""

from collections.abc import Callable

import numpy as np
import scipy.special
from dp_accounting.pld import pld_pmf

Deltas = Callable[[np.ndarray], np.ndarray]  # of epsilons

# The profile is cut where it falls below this; the rest counts as infinite loss.
_TAIL = 1e-22


def losses_of_profile(
    deltas: Deltas, interval: float, largest: float
) -> pld_pmf.PLDPmf:
    """Computes the losses of the pair that has this profile.

    Args:
      deltas: the delta at each epsilon, of any sign.
      interval: the interval of the grid.
      largest: the loss at which the profile is cut at the latest.
    """
    last = 10 * interval
    while last < largest and deltas(np.array([last]))[0] > _TAIL:
        last = min(1.25 * last, largest)
    size = int(np.ceil(last / interval))
    profile = np.clip(deltas(np.arange(-size, size + 1) * interval), 0, 1)
    # Rounding may break the order; the larger value is the bound.
    profile = np.maximum.accumulate(profile[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -size, size, profile
    )


def of_any_sign(
    epsilons: np.ndarray, positive: Deltas, exchanged: Deltas
) -> np.ndarray:
    """Computes the profile at epsilons of any sign, if need be of the exchanged pair.

    Args:
      epsilons: the epsilons, of any sign.
      positive: the profile of the pair, where epsilon is not negative.
      exchanged: the profile of the exchanged pair, for the same epsilons.
    """
    absolute = np.abs(epsilons)
    negative = -np.expm1(-absolute) + np.exp(-absolute) * exchanged(absolute)
    return np.where(epsilons >= 0, positive(absolute), negative)


def renyi_of_shifts(
    orders: np.ndarray, shifts: np.ndarray, probs: np.ndarray
) -> np.ndarray:
    """Bounds the Rényi divergence of a random shift, by convexity.

    Args:
      orders: the orders of the divergence.
      shifts: the shifts, in deviations of the noise.
      probs: the probability of each shift.
    """
    shifts, probs = shifts[probs > 0], probs[probs > 0]
    exponents = orders[:, None] * (orders[:, None] - 1) * shifts**2 / 2
    total = np.asarray(scipy.special.logsumexp(exponents + np.log(probs), axis=1))
    return np.maximum(total, 0) / (orders - 1)
