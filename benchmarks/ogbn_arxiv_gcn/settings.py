"""A training but for its seed, and the settings that are drawn for a search."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import optax

import dpadambc
from benchmarks import experiment
from dpadambc import clipping, graphs

TARGET_EPSILONS = (3.0, 12.0, 6.0, 1.0)
OTHER_DELTA = 1e-5

# Between these, evenly in the logarithm; those of DP-SGD in units of 1 / C.
LEARNING_RATES = {
    "DP-SGD": (0.5, 30.0),
    "DP-Adam": (1e-3, 5e-2),
    "DP-AdamBC": (3e-4, 1.5e-2),
    "DP-AdamW": (1e-3, 5e-2),
    "DP-AdamW-BC": (3e-4, 1.5e-2),
    experiment.AUTOMATIC: (1e-3, 5e-2),
    experiment.NON_PRIVATE: (5e-4, 1e-2),
}
PRIVATE = (*experiment.PRIVATE, experiment.AUTOMATIC)
DRAWN = {
    "max_memberships": (1, 3, 7),
    "expected_batch_size": (2_500, 5_000, 10_000),
    "iterations": (50, 100, 200),
    "l2_clip_norm": (0.3, 1.0, 3.0),
    "floor": (0.3, 1.0, 3.0),
}
NUM_TRIALS = 10


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

    target_delta: ClassVar[float] = 1 / (10 * 90_941)

    @property
    def of_bc(self) -> dict[str, Any]:
        """What a corrected optimizer takes beside the rate."""
        if not self.method.endswith("BC"):
            return {}
        floor = dpadambc.RelativeFloor(self.floor)
        return {"variance_floor": floor, "correction": self.correction}

    def sampling_prob(self, num_roots: int) -> float:
        return self.expected_batch_size / num_roots

    @functools.cache  # noqa: B019 - of frozen values, and calibration takes seconds
    def mechanism(self, num_roots: int) -> Any:
        """With the least noise for the target; without privacy it clips nothing."""
        is_private = self.target_epsilon is not None
        kind: Any = dpadambc.PoissonGaussian
        numbers: dict[str, Any] = {
            "l2_clip_norm": self.l2_clip_norm if is_private else 1e6,
            "sampling_prob": self.sampling_prob(num_roots),
            "iterations": self.iterations,
            "normalize_by": self.expected_batch_size,
        }
        if self.max_memberships:
            kind = graphs.NodePoissonGaussian
            numbers["max_terms"] = graphs.max_terms(self.max_memberships)
        if self.method == experiment.AUTOMATIC:
            numbers["clip_rule"] = clipping.Automatic()
        if not is_private:
            return kind(noise_multiplier=0.0, **numbers)
        target = {"target_epsilon": self.target_epsilon}
        return kind.calibrate(**target, target_delta=self.target_delta, **numbers)

    def optimizer(self, noise_stddev: Any) -> optax.GradientTransformation:
        """Of the private gradient, whose noise has this level."""
        if self.target_epsilon is None:
            return optax.adam(self.learning_rate, b2=experiment.B2)
        is_decoupled = self.method.startswith("DP-AdamW")
        decay = {"weight_decay": self.weight_decay} if is_decoupled else {}
        make = experiment.PRIVATE.get(self.method, experiment.PRIVATE["DP-Adam"])
        return make(self.learning_rate, noise_stddev, **self.of_bc, **decay)


def two_digits(number: float) -> float:
    return float(f"{number:.2g}")


def draw(rng: np.random.Generator, several: Mapping[str, Sequence[Any]]):
    """Of each trial, by name; every value comes as often as the others."""
    order = lambda x: rng.permutation(np.resize(range(len(x)), NUM_TRIALS))
    columns = [[x[i] for i in order(x)] for x in several.values()]
    return [dict(zip(several, row, strict=True)) for row in zip(*columns, strict=True)]


def draw_rates(rng: np.random.Generator, low: float, high: float) -> list[float]:
    """One in each even part of the range, in random order."""
    places = (rng.permutation(NUM_TRIALS) + rng.random(NUM_TRIALS)) / NUM_TRIALS
    return [low * (high / low) ** place for place in places.tolist()]


def trials(
    method: str, target_epsilon: float | None, alone: bool = False
) -> list[Setting]:
    """As many for each optimizer, and the same draws for all but the learning rate."""
    rng, found = np.random.default_rng(20_231), []
    drawn, rates = draw(rng, DRAWN), draw_rates(rng, *LEARNING_RATES[method])
    for numbers, rate in zip(drawn, rates, strict=True):
        unit = numbers["l2_clip_norm"] if method == "DP-SGD" else 1
        numbers |= {"max_memberships": 0} if alone else {}
        rate = two_digits(rate / unit)
        found.append(Setting(method, target_epsilon, **numbers, learning_rate=rate))
    return found
