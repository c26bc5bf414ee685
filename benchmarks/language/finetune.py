"""One fine-tuning by `training.fit`, private or not, which goes on where it ended.

All learning rates fall linearly to zero, as in BERT's own fine-tuning.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpadambc
from benchmarks import experiment, records
from dpadambc import clipping, training

TARGET_DELTA = 1e-5
MOMENTUM = 0.9
NOT_PRIVATE = "AdamW, not private"
NO_CLIP = 1e6  # far above every gradient


# Of the private gradient, each made of a schedule and the level of the noise.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    **experiment.PRIVATE,
    # Its rate has the unit of Adam's, whose second moment is the noise's at least.
    "DP-SGD": lambda schedule, noise_stddev: optax.chain(
        optax.scale((1 - MOMENTUM) / noise_stddev), optax.sgd(schedule, MOMENTUM)
    ),
    experiment.AUTOMATIC: experiment.PRIVATE["DP-Adam"],
    NOT_PRIVATE: lambda schedule, _: optax.adamw(
        schedule, b2=experiment.B2, weight_decay=experiment.WEIGHT_DECAY
    ),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training, but for its seed and for what it trains on."""

    way: str
    method: str
    target_epsilon: float | None  # None is without privacy
    epochs: float
    batch_size: int  # expected
    learning_rate: float
    l2_clip_norm: float

    def __post_init__(self):
        if (self.target_epsilon is None) != (self.method == NOT_PRIVATE):
            raise ValueError(
                f"Expected no target_epsilon for {NOT_PRIVATE!r} alone, got"
                f" {self.target_epsilon} for {self.method!r}."
            )

    def mechanism(self, num_examples: int) -> dpadambc.PoissonGaussian:
        """With the least noise for the target, or with none and no clip."""
        sampling_prob = self.batch_size / num_examples
        public = {
            "sampling_prob": sampling_prob,
            "iterations": round(self.epochs / sampling_prob),
            "normalize_by": self.batch_size,
        }
        if self.target_epsilon is None:
            return dpadambc.PoissonGaussian(
                noise_multiplier=0.0, l2_clip_norm=NO_CLIP, **public
            )
        found = dpadambc.PoissonGaussian.calibrate(
            target_epsilon=self.target_epsilon,
            target_delta=TARGET_DELTA,
            l2_clip_norm=self.l2_clip_norm,
            **public,
        )
        if self.method != experiment.AUTOMATIC:
            return found
        return dataclasses.replace(found, clip_rule=clipping.Automatic())

    def optimizer(
        self, mechanism: dpadambc.PoissonGaussian
    ) -> optax.GradientTransformation:
        """Of the private gradient."""
        rate = optax.linear_schedule(self.learning_rate, 0.0, mechanism.iterations)
        return OPTIMIZERS[self.method](rate, mechanism.noise_stddev)


def identity(setting: Setting, seed: int) -> records.Row:
    """What tells a training from others."""
    return {"setting": dataclasses.asdict(setting), "seed": seed}


def folder_name(setting: Setting, seed: int, *more: str) -> str:
    """Of the state of one training."""
    values = *dataclasses.asdict(setting).values(), seed, *more
    return "_".join(map(str, values)).replace(" ", "-").replace(",", "")


def fit(
    setting: Setting,
    seed: int,
    parts: Any,
    examples: tuple[Any, ...],
    folder: pathlib.Path,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    microbatch_size: int | None = None,
    ends: float = float("inf"),
) -> tuple[Any, records.Row]:
    """Trains the parts of a model, or goes on from the checkpoints in the folder.

    Products have the dtype, and parameters stay float32. At the end of `time.monotonic`
    that is given it saves and leaves. Returns what is trained, and what to write down.
    """
    mechanism = setting.mechanism(len(examples[0]))
    began = time.perf_counter()

    def stop_in_time(progress: training.Progress) -> None:
        jax.block_until_ready(progress.seen)
        if time.monotonic() > ends and progress.iterations < mechanism.iterations:
            raise training.Stop("out of time", is_public=True)

    result = training.fit(
        training.with_compute_dtype(parts.loss_fn, dtype),
        parts.trained,
        examples,
        mechanism,
        setting.optimizer(mechanism),
        key=jax.random.key(seed),
        target_delta=TARGET_DELTA,
        frozen=parts.frozen,
        microbatch_size=microbatch_size or "auto",
        callbacks=stop_in_time,
        checkpoints=training.Checkpoints(folder, every=20, keep=1),
    )
    if result.iterations < mechanism.iterations:
        print("Out of time; the same command goes on from here.")
        sys.exit()
    trained = result.state.params
    steps = result.iterations - (result.resumed_from or 0)
    seconds = (time.perf_counter() - began) / steps if steps else None
    return trained, {
        "num_examples": len(examples[0]),
        "num_trained": int(optax.tree.size(trained)),
        "epsilon": None if setting.method == NOT_PRIVATE else result.epsilon,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": mechanism.noise_stddev,
        "iterations": mechanism.iterations,
        "seconds_per_step": seconds and round(seconds, 3),  # with compilation
    }
