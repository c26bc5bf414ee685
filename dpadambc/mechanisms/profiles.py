"""The privacy losses of a profile, delta as it goes with epsilon, from above.

A convex profile is that of a pair of distributions. Of its points on the grid, a pair
on the grid has a profile that is the polygon through them ("connecting the dots",
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
    """The losses of the pair that has this profile.

    Args:
      deltas: at each epsilon, of any sign.
      interval: of the grid.
      largest: the loss at which the profile is cut at the latest.
    """
    last = 10 * interval
    while last < largest and deltas(np.array([last]))[0] > _TAIL:
        last = min(1.25 * last, largest)
    size = int(np.ceil(last / interval))
    profile = np.clip(deltas(np.arange(-size, size + 1) * interval), 0, 1)
    # Rounding may break the order; the larger one is the bound.
    profile = np.maximum.accumulate(profile[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -size, size, profile
    )


def of_any_sign(
    epsilons: np.ndarray, positive: Deltas, exchanged: Deltas
) -> np.ndarray:
    """The profile at each epsilon, from those of a pair and of the exchanged pair.

    Args:
      epsilons: of any sign.
      positive: the profile of the pair, where epsilon is not negative.
      exchanged: that of the exchanged pair, there.
    """
    absolute = np.abs(epsilons)
    negative = -np.expm1(-absolute) + np.exp(-absolute) * exchanged(absolute)
    return np.where(epsilons >= 0, positive(absolute), negative)


def renyi_of_shifts(
    orders: np.ndarray, shifts: np.ndarray, probs: np.ndarray
) -> np.ndarray:
    """Bounds the divergence of a shift that is drawn, as if it were known: convexity.

    Args:
      orders: of the divergence.
      shifts: in deviations of the noise.
      probs: of each shift.
    """
    shifts, probs = shifts[probs > 0], probs[probs > 0]
    exponents = orders[:, None] * (orders[:, None] - 1) * shifts**2 / 2
    total = np.asarray(scipy.special.logsumexp(exponents + np.log(probs), axis=1))
    return np.maximum(total, 0) / (orders - 1)
