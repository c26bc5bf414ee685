"""One private training of CNN5 by `training.fit`, with the moments of its Adam."""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import optax

import dpadambc
from benchmarks import experiment, records
from benchmarks.cifar10 import cnn5, data
from benchmarks.records import Row
from benchmarks.study import Cell
from dpadambc import clipping, training
from dpadambc.training import checkpoints

TARGET_DELTA = 1e-5
L2_CLIP_NORM = 1.0
RECORD_EVERY = 240  # steps


def sgd(
    learning_rate: float,
    noise_stddev: float,
    momentum: float = 0.9,
    per_noise: bool = False,
) -> optax.GradientTransformation:
    """With the momentum that the authors' DP-SGD has.

    `per_noise` is the unit of a learning rate: that of the DP-Adam that this equals
    where the second moment is that of the noise.
    """
    unit = (1 - momentum) / noise_stddev if per_noise else 1.0
    return optax.sgd(unit * learning_rate, momentum)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training, but for its seed and for what it trains on."""

    batch_size: ClassVar[int] = 1_024  # expected
    # As the authors count them, who drop what is left over.
    steps_per_epoch: ClassVar[int] = 48

    method: str
    target_epsilon: float
    epochs: int
    learning_rate: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The optimizer; the control of a correction is named for what is left."""
        is_control = self.options.get("correction") == 0
        return f"{self.method}, floor alone" if is_control else self.method

    def mechanism(self, num_examples: int) -> dpadambc.PoissonGaussian:
        """With the least noise for the target."""
        return dpadambc.PoissonGaussian.calibrate(
            target_epsilon=self.target_epsilon,
            target_delta=TARGET_DELTA,
            l2_clip_norm=L2_CLIP_NORM,
            sampling_prob=self.batch_size / num_examples,
            iterations=self.epochs * self.steps_per_epoch,
            normalize_by=self.batch_size,
            clip_rule=clipping.Automatic() if self.is_automatic else clipping.Flat(),
        )

    @property
    def is_automatic(self) -> bool:
        return self.method == experiment.AUTOMATIC

    def optimizer(self, noise_stddev: float) -> optax.GradientTransformation:
        """Of the private gradient."""
        method = "DP-Adam" if self.is_automatic else self.method
        make = sgd if method == "DP-SGD" else experiment.PRIVATE[method]
        return make(self.learning_rate, noise_stddev, **self.options)

    def moments(self, opt_state: optax.OptState, noise_stddev: float) -> Row:
        """What the state of an Adam shows of its correction."""
        if self.method == "DP-SGD":
            return {}
        has_floor = optax.tree.get(opt_state, "ScaleByAdamBCState") is not None
        seen = dpadambc.diagnostics.snapshot(
            opt_state,
            noise_stddev=None if has_floor else noise_stddev,
            b2=experiment.B2,
            variance_floor=self.options.get(
                "variance_floor", experiment.VARIANCE_FLOOR
            ),
            correction=self.options.get("correction", 1.0),
        )
        found = {"cosine_to_momentum": float(seen.cosine_to_momentum)}
        share = {"share_at_floor": float(seen.share_at_floor)}
        return found | share if has_floor else found


def identity(setting: Setting, seed: int, split: str) -> Row:
    """What tells a training from others: scored on "validation" or "test" images."""
    return {
        "setting": dataclasses.asdict(setting),
        "seed": seed,
        "split": split,
        "l2_clip_norm": L2_CLIP_NORM,
        "expected_batch_size": setting.batch_size,
        "iterations": setting.epochs * setting.steps_per_epoch,
    }


def cell(setting: Setting, seed: int, split: str) -> Cell:
    own_seed = seed if split == "test" else None
    own = identity(setting, seed, split)
    return Cell(setting.name, setting.target_epsilon, own_seed, own, setting)


def loss_fn(params: Any, image: jax.Array, label: jax.Array, *, key: jax.Array):
    """The loss of one view, whose key `fit` makes."""
    return cnn5.loss_fn(params, image, label, key)


def train(
    setting: Setting,
    seed: int,
    examples: data.Images,
    scored: data.Images,
    folder: pathlib.Path,
) -> Row:
    """Trains on the examples, or goes on where it ended, and scores on the others."""
    mechanism = setting.mechanism(examples.num_examples)
    noise_stddev = cast(float, mechanism.noise_stddev)
    init_key, key = jax.random.split(jax.random.key(seed))
    folder.mkdir(parents=True, exist_ok=True)
    path, started = folder / "curve.jsonl", time.perf_counter()

    def record(progress: training.Progress) -> None:
        nonlocal started
        now = progress.iterations
        if now % RECORD_EVERY and now != progress.total_iterations:
            return
        state = progress.state
        accuracy = cnn5.accuracy(state.params, *map(jnp.asarray, scored))
        row = {"iterations": now, "accuracy": float(accuracy)}
        row["seconds"] = round(time.perf_counter() - started, 1)
        started = time.perf_counter()
        row |= setting.moments(state.opt_state, noise_stddev)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    result = training.fit(
        loss_fn,
        cnn5.init(init_key),
        (examples.images, examples.labels),
        mechanism,
        setting.optimizer(noise_stddev),
        key=key,
        target_delta=TARGET_DELTA,
        microbatch_size=cnn5.MICROBATCH_SIZE,
        steps_per_call=20,
        callbacks=record,
        checkpoints=checkpoints.Checkpoints(folder / "checkpoint", every=100),
    )
    # After an interruption, the steps since the last checkpoint come twice.
    by_step = {row["iterations"]: row for row in records.read(path)}
    curve = [by_step[step] for step in sorted(by_step)]
    return {
        "epsilon": result.epsilon,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": noise_stddev,
        "num_examples": examples.num_examples,
        "num_scored": scored.num_examples,
        "accuracy": curve[-1]["accuracy"],
        "share_at_floor": curve[-1].get("share_at_floor"),
        "seconds": round(sum(row["seconds"] for row in curve), 1),
        "curve": curve,
    }


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    """Trains cells on the images that their split stands for."""
    cifar = data.load(arguments.data_dir)
    fit, validation = data.split_validation(cifar.train.num_examples)
    images = {
        "validation": (cifar.train.take(fit), cifar.train.take(validation)),
        "test": (cifar.train, cifar.test),
    }

    def make(cell: Cell) -> Row:
        known = json.dumps(cell.identity).encode()
        folder = arguments.cache_dir / "cnn5" / hashlib.sha256(known).hexdigest()[:16]
        sides = images[cell.identity["split"]]
        return train(cell.setting, cell.identity["seed"], *sides, folder)

    return make
