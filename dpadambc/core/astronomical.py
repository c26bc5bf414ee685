"""How large privacy losses are, and whether epsilon is too large to be computed."""

import math

import dp_accounting
import numpy as np

from dpadambc.accounting.accountants import ReadableDpEvent
from dpadambc.core.accounting import Accountant

# Epsilon counts as infinite where the privacy loss of a step, or the mean of all, is
# beyond this: it means nothing, and its distribution would not fit into memory.
_LARGEST_LOSS = 2e4
# Its exponential is a number.
_LARGEST_EXPONENT = 700.0


def _gaussian_loss(noise_multiplier: float) -> float:
    """The mean privacy loss of a Gaussian whose mean moves by one."""
    with np.errstate(divide="ignore"):
        return float(0.5 / np.square(np.float64(noise_multiplier)))


def _losses(event: dp_accounting.DpEvent) -> tuple[float, float]:
    """About the largest privacy loss of one step, and the mean of all together.

    Of sampling they have the rate at which it hits, and no amplification: enough to
    tell what is astronomical.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        loss = _gaussian_loss(event.noise_multiplier)
        return loss, loss
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        largest, mean = _losses(event.event)
        return largest, mean * event.count if event.count else 0.0
    if isinstance(event, dp_accounting.ComposedDpEvent):
        largest, means = zip(*map(_losses, event.events), strict=True)
        return max(largest), sum(means)
    if isinstance(event, ReadableDpEvent):
        loss, rate = _gaussian_loss(event.noise_multiplier), event.rate
    elif isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        loss = _gaussian_loss(event.noise_multiplier)
        rate = event.sampling_probability
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
        loss, rate = _losses(event.event)[0], event.sampling_probability
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        loss = _losses(event.event)[0]
        rate = event.sample_size / event.source_dataset_size
    else:
        return 0.0, 0.0
    return (loss, rate * loss) if rate else (0.0, 0.0)


def is_astronomical(event: dp_accounting.DpEvent, accountant: Accountant) -> bool:
    """Whether epsilon is infinite, or so large that it is not worth computing."""
    largest, mean = _losses(event)
    if accountant == "rdp":  # which knows no grid
        return largest == math.inf
    return max(largest, mean) > _LARGEST_LOSS


def range_of_losses(event: dp_accounting.DpEvent) -> float:
    """About how far the largest and the least loss of one step are apart."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return max(map(range_of_losses, event.events), default=0.0)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return range_of_losses(event.event)
    loss, rate_times_loss = _losses(event)
    if loss == 0:
        return 0.0
    # Of a Gaussian whose mean moves by one, nine deviations to both sides and more;
    # of a mixture with what did not move, less.
    largest = loss + 10 * math.sqrt(2 * loss)
    rate = min(rate_times_loss / loss, 1.0)
    if rate == 1 or largest > _LARGEST_EXPONENT:
        return 2 * largest
    return 2 * math.log1p(rate * math.expm1(largest))
