"""The privacy losses of a profile, delta as it goes with epsilon, from above.

A convex profile is that of a pair of distributions. Of its points on the grid, a pair
on the grid has a profile that is the polygon through them ("connecting the dots",
`Doroshenko et al. 2022 <https://arxiv.org/abs/2207.04380>`_), which is nowhere below.
"""

from collections.abc import Callable

import numpy as np
from dp_accounting.pld import pld_pmf

# The profile is cut where it falls below this; the rest counts as infinite loss.
_TAIL = 1e-22


def losses_of_profile(
    deltas: Callable[[np.ndarray], np.ndarray], interval: float, largest: float
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
