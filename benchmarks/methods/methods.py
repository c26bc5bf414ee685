"""The methods that are compared: what a trial draws, and the transformation it makes.

All gradients are in units of the clip norm: the loss is divided by C, and every
mechanism clips at one. So C is drawn like a learning rate, and no learning rate depends
on it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import dpadambc
from benchmarks import experiment
from benchmarks.methods.tasks import Task
from dpadambc import Mechanism, clipping, contrib
from dpadambc.contrib import CorrelatedGaussian, strategies

NUM_TRIALS = 16
FLAT = clipping.Flat()
MOMENTUM = 0.9

Range = tuple[float, float]
Candidate = Mapping[str, Any]  # a number, or an array of one for each run

# Logarithmically uniform between the two.
LEARNING_RATE_OF_SGD = (0.03, 30.0)  # with momentum
LEARNING_RATE = (1e-3, 1.0)  # where updates have the size of one
CLIP_NORM = (0.05, 5.0)
PRECONDITIONED_CLIP_NORM = (1.0, 100.0)  # of gradients whose coordinates are about one
FLOOR = (0.1, 10.0)  # the factor of a `RelativeFloor`
WEIGHT_DECAY = (1e-3, 1.0)
B3, ALPHA = (0.9, 0.999), (0.5, 8.0)  # of the slow moment, for a few hundred steps
LEAST_DIVISOR = (1e-4, 1e-1)  # of gradients that are divided by their size
NUM_PHASES = 10  # of DP²: five pairs


Make = Callable[[Candidate, Any, jax.Array], optax.GradientTransformationExtraArgs]


class Method(NamedTuple):
    """One line of the table.

    Attributes:
      ranges: of what a trial draws, beside the clip norm.
      make: the transformation of per-example gradients, of a candidate, the mechanism
        and the key of the noise.
      mechanism: of a task, an epsilon and the number of examples.
      is_preconditioned: whether gradients are preconditioned by moments of noise
        before they are clipped.
    """

    ranges: Mapping[str, Range]
    make: Make
    mechanism: Callable[[Task, float, int], Mechanism] = Task.poisson
    is_preconditioned: bool = False

    def candidates(self) -> dict[str, np.ndarray]:
        """The same quantiles of a number for all methods that draw it, at any epsilon.

        Each array has shape (NUM_TRIALS,).
        """
        ranges = {"l2_clip_norm": CLIP_NORM, **self.ranges}
        return {
            name: low * (high / low) ** _quantiles(name)
            for name, (low, high) in ranges.items()
        }


def _quantiles(name: str) -> np.ndarray:
    """One in each sixteenth, in random order: a Latin hypercube of all names."""
    rng = np.random.default_rng(list(name.encode()))
    return (rng.permutation(NUM_TRIALS) + rng.uniform(size=NUM_TRIALS)) / NUM_TRIALS


Optimizer = Callable[[Candidate, Any], optax.GradientTransformation]


def _behind_noise(
    optimizer: Optimizer,
    clip_rule: clipping.ClipRule = FLAT,
    moving: Callable[[Mechanism], Mechanism] = lambda mechanism: mechanism,
) -> Make:
    """An optimizer of the private gradient, made of a candidate and the noise level."""

    def make(candidate, mechanism, key):
        own = moving(dataclasses.replace(mechanism, clip_rule=clip_rule))
        return optax.chain(
            dpadambc.privatize(own, key=key), optimizer(candidate, own.noise_stddev)
        )

    return make


def _dp2_rmsprop(candidate, mechanism, key):
    """Without the `eps` of RMSProp: the noise in its moment is above it."""
    return dpadambc.contrib.dp2_rmsprop(
        candidate["learning_rate"],
        mechanism,
        key=key,
        interval=mechanism.iterations // NUM_PHASES,
        preconditioned_clip_norm=candidate["preconditioned_clip_norm"],
        preconditioned_learning_rate=candidate["preconditioned_learning_rate"],
    )


def _scale_then_privatize(candidate, mechanism, key):
    """What gradients are in units of is the least divisor, and clips nothing.

    Divided gradients have no unit, and a clip norm of their own.
    """
    clip_norm = candidate["preconditioned_clip_norm"]
    noise_stddev = mechanism.noise_stddev * clip_norm
    private_gradient = optax.chain(
        dpadambc.clip_per_example(clip_norm, normalize_by=mechanism.normalize_by),
        dpadambc.add_dp_noise(noise_stddev, key=key),
    )
    return optax.chain(
        contrib.scale_then_privatize(private_gradient, eps=1.0, decay=experiment.B2),
        _adam(candidate, noise_stddev),
    )


def _correlated(coefficients: Sequence[float]) -> Callable[..., Mechanism]:
    """Noise of which later steps take back a part, over epochs in one order."""

    def mechanism(task: Task, target_epsilon: float, num_examples: int) -> Mechanism:
        return CorrelatedGaussian.calibrate(
            target_epsilon=target_epsilon,
            target_delta=task.target_delta,
            l2_clip_norm=1.0,
            noising_coefficients=tuple(coefficients),
            batches_per_epoch=round(num_examples / task.batch_size),
            iterations=task.iterations,
            normalize_by=task.batch_size,
        )

    return mechanism


def _sgd(candidate: Candidate, _: Any) -> optax.GradientTransformation:
    return optax.sgd(candidate["learning_rate"], MOMENTUM)


def _adam(candidate: Candidate, _: Any) -> optax.GradientTransformation:
    return optax.adam(candidate["learning_rate"], b2=experiment.B2)


def _adamw(candidate: Candidate, _: Any) -> optax.GradientTransformation:
    return optax.adamw(
        candidate["learning_rate"],
        b2=experiment.B2,
        weight_decay=candidate["weight_decay"],
    )


def _adam_bc(correction: float) -> Optimizer:
    return lambda candidate, noise_stddev: dpadambc.adam_bc(
        candidate["learning_rate"],
        noise_stddev,
        b2=experiment.B2,
        variance_floor=dpadambc.RelativeFloor(candidate["floor"]),
        correction=correction,
    )


def _adamw_bc(candidate: Candidate, noise_stddev: Any) -> optax.GradientTransformation:
    return dpadambc.adamw_bc(
        candidate["learning_rate"],
        noise_stddev,
        b2=experiment.B2,
        variance_floor=dpadambc.RelativeFloor(candidate["floor"]),
        weight_decay=candidate["weight_decay"],
    )


def _muon(candidate: Candidate, _: Any) -> optax.GradientTransformation:
    """Of matrices; vectors have Adam, as in its default."""
    return optax.contrib.muon(candidate["learning_rate"], adam_b2=experiment.B2)


def _ademamix_bc(
    candidate: Candidate, noise_stddev: Any
) -> optax.GradientTransformation:
    return contrib.ademamix_bc(
        candidate["learning_rate"],
        noise_stddev,
        b2=experiment.B2,
        b3=candidate["b3"],
        alpha=candidate["alpha"],
        variance_floor=dpadambc.RelativeFloor(candidate["floor"]),
    )


def _adafactor_bc(
    candidate: Candidate, noise_stddev: Any
) -> optax.GradientTransformation:
    """With a first moment behind it, as the others have."""
    return optax.chain(
        contrib.scale_by_adafactor_bc(
            noise_stddev,
            min_dim_size_to_factor=2,
            variance_floor=dpadambc.RelativeFloor(candidate["floor"]),
        ),
        optax.ema(MOMENTUM),
        optax.scale_by_learning_rate(candidate["learning_rate"]),
    )


_SGD = {"learning_rate": LEARNING_RATE_OF_SGD}
_ADAM = {"learning_rate": LEARNING_RATE}
_WITH_FLOOR = {**_ADAM, "floor": FLOOR}
_WITH_DECAY = {**_ADAM, "weight_decay": WEIGHT_DECAY}

CONTROL = "floor alone"
METHODS = {
    "DP-SGD": Method(_SGD, _behind_noise(_sgd)),
    "DP-Adam": Method(_ADAM, _behind_noise(_adam)),
    "DP-AdamBC": Method(_WITH_FLOOR, _behind_noise(_adam_bc(1.0))),
    CONTROL: Method(_WITH_FLOOR, _behind_noise(_adam_bc(0.0))),
    "DP-AdamW": Method(_WITH_DECAY, _behind_noise(_adamw)),
    "DP-AdamW-BC": Method({**_WITH_FLOOR, **_WITH_DECAY}, _behind_noise(_adamw_bc)),
    "AdEMAMix-BC": Method(
        {**_WITH_FLOOR, "b3": B3, "alpha": ALPHA}, _behind_noise(_ademamix_bc)
    ),
    "Adafactor-BC": Method(_WITH_FLOOR, _behind_noise(_adafactor_bc)),
    "Muon": Method(_ADAM, _behind_noise(_muon)),
    "AUTO-S, DP-SGD": Method(_SGD, _behind_noise(_sgd, clipping.Automatic())),
    "AUTO-S, DP-Adam": Method(_ADAM, _behind_noise(_adam, clipping.Automatic())),
    "DP-PSAC, DP-SGD": Method(_SGD, _behind_noise(_sgd, contrib.PerSampleAdaptive())),
    "quantile, DP-SGD": Method(
        _SGD, _behind_noise(_sgd, moving=contrib.QuantileClipping)
    ),
    "slack, DP-SGD": Method(_SGD, _behind_noise(_sgd, moving=contrib.SlackClipping)),
    "BISR, DP-SGD": Method(
        _SGD,
        _behind_noise(_sgd),
        _correlated(strategies.banded_inverse_square_root(4)),
    ),
    "λ-CGD, DP-SGD": Method(_SGD, _behind_noise(_sgd), _correlated((1.0, -0.9))),
    "BISR, DP-AdamBC": Method(
        _WITH_FLOOR,
        _behind_noise(_adam_bc(1.0)),
        _correlated(strategies.banded_inverse_square_root(4)),
    ),
    "DP-KFC, DP-SGD": Method(
        {**_SGD, "l2_clip_norm": PRECONDITIONED_CLIP_NORM},
        _behind_noise(_sgd),
        is_preconditioned=True,
    ),
    "DP-KFC, DP-AdamBC": Method(
        {**_WITH_FLOOR, "l2_clip_norm": PRECONDITIONED_CLIP_NORM},
        _behind_noise(_adam_bc(1.0)),
        is_preconditioned=True,
    ),
    "DP²-RMSProp": Method(
        {
            **_SGD,
            "preconditioned_learning_rate": LEARNING_RATE,
            "preconditioned_clip_norm": PRECONDITIONED_CLIP_NORM,
        },
        _dp2_rmsprop,
    ),
    "scale-then-privatize": Method(
        {
            **_ADAM,
            "l2_clip_norm": LEAST_DIVISOR,
            "preconditioned_clip_norm": PRECONDITIONED_CLIP_NORM,
        },
        _scale_then_privatize,
    ),
}
