"""What is trained: every setting, and the mechanism that makes it private."""

import dataclasses
import functools
from typing import Any, Protocol

import numpy as np

import dpadambc
from benchmarks import experiment
from dpadambc import graphs

TARGET_EPSILONS = (3.0, 12.0, 6.0, 1.0)
TARGET_DELTA = 1 / (10 * 90_941)
OTHER_DELTA = 1e-5

Mechanism = dpadambc.PoissonGaussian | dpadambc.graphs.NodePoissonGaussian


class Trial(Protocol):
    """What a search reads of a setting; the setting is a dataclass."""

    @property
    def method(self) -> str: ...

    @property
    def target_epsilon(self) -> float | None: ...

    @property
    def max_memberships(self) -> int: ...


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
    weight_decay: float = experiment.WEIGHT_DECAY  # of the decoupled optimizers
    correction: float = 1.0  # the share of the noise variance that is subtracted

    @property
    def max_degree(self) -> int:
        """How many neighbors a root takes in, of those that send to it."""
        return 2 * self.max_memberships

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Of the optimizer."""
        found: list[tuple[str, Any]] = []
        if self.method.endswith("BC"):
            found.append(("variance_floor", dpadambc.RelativeFloor(self.floor)))
            found.append(("correction", self.correction))
        if self.method.startswith("DP-AdamW"):
            found.append(("weight_decay", self.weight_decay))
        return tuple(found)

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
    cls = dpadambc.PoissonGaussian
    if max_memberships:
        cls = dpadambc.graphs.NodePoissonGaussian
        numbers["max_terms"] = graphs.max_terms(max_memberships)
    if target_epsilon is None:
        return cls(noise_multiplier=0.0, **numbers)
    return cls.calibrate(
        target_epsilon=target_epsilon, target_delta=TARGET_DELTA, **numbers
    )


# Between these, evenly in the logarithm; those of DP-SGD in units of 1 / C.
LEARNING_RATES = {
    "DP-SGD": (0.5, 30.0),
    "DP-Adam": (1e-3, 5e-2),
    "DP-AdamBC": (3e-4, 1.5e-2),
    "DP-AdamW": (1e-3, 5e-2),
    "DP-AdamW-BC": (3e-4, 1.5e-2),
    experiment.NON_PRIVATE: (5e-4, 1e-2),
}
MAX_MEMBERSHIPS = (1, 3, 7)
EXPECTED_BATCH_SIZES = (2_500, 5_000, 10_000)
ITERATIONS = (50, 100, 200)
L2_CLIP_NORMS = (0.3, 1.0, 3.0)
FLOORS = (0.3, 1.0, 3.0)
NUM_TRIALS = 10
# The best of the trials are tried once more.
NUM_FINALISTS = 3
# Here, as many as did best for the optimizer at the first epsilon.
SHORT_EPSILONS = (6.0, 1.0)
NUM_SHORT_TRIALS = 5
# Of the first and of the second trial; none of those of the results.
TUNING_SEEDS = (1_000, 1_001)


def trials(
    method: str, target_epsilon: float | None, alone: bool = False
) -> list[Setting]:
    """As many for each optimizer, and the same draws for all but the learning rate.

    Every value comes as often as the others, and of ten even parts of the range of
    learning rates each has one.
    """
    rng = np.random.default_rng(20_231)
    column = lambda values: rng.permutation(np.resize(values, NUM_TRIALS)).tolist()
    low, high = LEARNING_RATES[method]
    columns = [
        column(MAX_MEMBERSHIPS),
        column(EXPECTED_BATCH_SIZES),
        column(ITERATIONS),
        column(L2_CLIP_NORMS),
        column(FLOORS),
        ((rng.permutation(NUM_TRIALS) + rng.random(NUM_TRIALS)) / NUM_TRIALS).tolist(),
    ]
    return [
        Setting(
            method=method,
            target_epsilon=target_epsilon,
            max_memberships=0 if alone else max_memberships,
            expected_batch_size=expected_batch_size,
            iterations=iterations,
            l2_clip_norm=l2_clip_norm,
            floor=floor,
            learning_rate=_rounded(
                low
                * (high / low) ** share
                / (l2_clip_norm if method == "DP-SGD" else 1)
            ),
        )
        for (
            max_memberships,
            expected_batch_size,
            iterations,
            l2_clip_norm,
            floor,
            share,
        ) in zip(*columns, strict=True)
    ]


def _rounded(number: float) -> float:
    return float(f"{number:.2g}")
