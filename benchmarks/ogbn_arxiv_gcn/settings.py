"""What is trained: every setting, and the mechanism that makes it private."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import dpadambc
from benchmarks import experiment
from dpadambc import graphs

TARGET_EPSILONS = (3.0, 12.0, 6.0, 1.0)
TARGET_DELTA = 1 / (10 * 90_941)
OTHER_DELTA = 1e-5

Mechanism = dpadambc.SubsampledGaussian | dpadambc.SubsampledMultiTermGaussian


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training, but for its seed."""

    method: str
    target_epsilon: float | None  # None without privacy
    max_memberships: int  # K; 0 for a network that sees nodes alone
    expected_batch_size: int
    iterations: int
    l2_clip_norm: float
    learning_rate: float
    floor: float = 1.0  # relative; of the corrected optimizers

    @property
    def max_degree(self) -> int:
        """How many neighbours a root takes in, of those that send to it."""
        return 2 * self.max_memberships

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Of the optimizer."""
        if not self.method.endswith("BC"):
            return ()
        return (("variance_floor", dpadambc.RelativeFloor(self.floor)),)

    def mechanism(self, num_roots: int) -> Mechanism:
        """With the least noise for the target."""
        return _mechanism(
            self.target_epsilon,
            self.max_memberships,
            self.expected_batch_size,
            self.iterations,
            self.l2_clip_norm,
            num_roots,
        )


@functools.cache
def _mechanism(
    target_epsilon: float | None,
    max_memberships: int,
    expected_batch_size: int,
    iterations: int,
    l2_clip_norm: float,
    num_roots: int,
) -> Mechanism:
    numbers = {
        "l2_clip_norm": l2_clip_norm,
        "sampling_prob": expected_batch_size / num_roots,
        "iterations": iterations,
        "normalize_by": expected_batch_size,
    }
    cls = dpadambc.SubsampledGaussian
    if max_memberships:
        cls = dpadambc.SubsampledMultiTermGaussian
        numbers["max_terms"] = graphs.max_terms(max_memberships)
    if target_epsilon is None:
        return cls(noise_multiplier=0.0, **numbers)
    return cls.calibrate(
        target_epsilon=target_epsilon, target_delta=TARGET_DELTA, **numbers
    )


# Learning rates are drawn between these, evenly in the logarithm.
LEARNING_RATES = {
    "DP-SGD": (0.1, 30.0),
    "DP-Adam": (3e-4, 3e-2),
    "DP-AdamBC": (1e-4, 1e-2),
    "DP-AdamW": (3e-4, 3e-2),
    "DP-AdamW-BC": (1e-4, 1e-2),
    experiment.NON_PRIVATE: (3e-4, 1e-2),
}
MAX_MEMBERSHIPS = (1, 3, 7)
EXPECTED_BATCH_SIZES = (2_500, 5_000, 10_000)
ITERATIONS = (50, 100, 200)
L2_CLIP_NORMS = (0.3, 1.0, 3.0)
FLOORS = (0.3, 1.0, 3.0)
NUM_TRIALS = 10


def trials(
    method: str, target_epsilon: float | None, alone: bool = False
) -> Iterator[Setting]:
    """As many for each optimizer, and the same draws for all but the learning rate."""
    rng = np.random.default_rng(20_231)
    for _ in range(NUM_TRIALS):
        low, high = map(math.log, LEARNING_RATES[method])
        draw = lambda values: values[rng.integers(len(values))]
        yield Setting(
            method=method,
            target_epsilon=target_epsilon,
            max_memberships=0 * draw(MAX_MEMBERSHIPS)
            if alone
            else draw(MAX_MEMBERSHIPS),
            expected_batch_size=draw(EXPECTED_BATCH_SIZES),
            iterations=draw(ITERATIONS),
            l2_clip_norm=draw(L2_CLIP_NORMS),
            floor=draw(FLOORS),
            learning_rate=float(f"{math.exp(rng.uniform(low, high)):.2g}"),
        )
