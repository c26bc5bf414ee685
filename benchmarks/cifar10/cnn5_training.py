"""One private training of CNN5, by the library's own loop, and how it is told about."""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks import experiment, records
from benchmarks.cifar10 import cnn5, data
from dpadambc import training
from dpadambc.training import checkpoints

TARGET_DELTA = 1e-5
L2_CLIP_NORM = 1.0
BATCH_SIZE = 1024
STEPS_PER_EPOCH = 48  # as the authors count them, who drop what is left over
RECORD_EVERY = 240  # steps


def sgd(
    learning_rate: float,
    noise_stddev: float,
    momentum: float = 0.9,
    per_noise: bool = False,
) -> optax.GradientTransformation:
    """With the momentum that what the authors report as DP-SGD has.

    `per_noise` is the unit of a learning rate: that of the DP-Adam that this equals
    where the second moment is that of the noise.
    """
    unit = (1 - momentum) / noise_stddev if per_noise else 1.0
    return optax.sgd(unit * learning_rate, momentum)


def floor_alone(
    learning_rate: float, noise_stddev: float
) -> optax.GradientTransformation:
    """DP-AdamBC without the subtraction, with the floor that much higher.

    So the same coordinates are at the floor, but for the first steps.
    """
    return dpadambc.adam_bc(
        learning_rate,
        noise_stddev,
        b2=experiment.B2,
        variance_floor=_floor_at_noise(noise_stddev),
        correction=0.0,
    )


def _floor_at_noise(noise_stddev: float) -> float:
    """The variance of the noise, and the standard deviation of an average of it."""
    b2 = experiment.B2
    return noise_stddev**2 * (1 + np.sqrt(2 * (1 - b2) / (1 + b2)))


# Of a learning rate and the level of the noise, with the options of a setting.
OPTIMIZERS = experiment.PRIVATE | {"DP-SGD": sgd, "floor alone": floor_alone}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training, but for its seed and for what it trains on."""

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
            sampling_prob=BATCH_SIZE / num_examples,
            iterations=self.epochs * STEPS_PER_EPOCH,
            normalize_by=BATCH_SIZE,
        )

    def optimizer(self, noise_stddev: float) -> optax.GradientTransformation:
        """Of the private gradient."""
        make = OPTIMIZERS[self.method]
        return make(self.learning_rate, noise_stddev, **self.options)

    def moments(self, opt_state: optax.OptState, noise_stddev: float) -> dict[str, Any]:
        """What the state of an Adam shows of its correction."""
        if self.method == "DP-SGD":
            return {}
        has_floor = optax.tree.get(opt_state, "ScaleByAdamBCState") is not None
        floor = self.options.get("variance_floor", experiment.VARIANCE_FLOOR)
        correction = self.options.get("correction", 1.0)
        if self.method == "floor alone":
            floor, correction = _floor_at_noise(noise_stddev), 0.0
        seen = dpadambc.diagnostics.snapshot(
            opt_state,
            noise_stddev=None if has_floor else noise_stddev,
            b2=experiment.B2,
            variance_floor=floor,
            correction=correction,
        )
        found = {"cosine_to_momentum": float(seen.cosine_to_momentum)}
        if has_floor:
            found["share_at_floor"] = float(seen.share_at_floor)
        return found


class Curve:
    """A callback that writes down a run every so many steps.

    After an interruption it keeps what was written of the steps that were saved.
    """

    def __init__(self, setting: Setting, scored: data.Images, path: pathlib.Path):
        self._setting, self._path = setting, path
        self._scored = jnp.asarray(scored.images), jnp.asarray(scored.labels)
        self._started = time.perf_counter()

    def __call__(self, progress: training.Progress) -> None:
        now = progress.iterations
        if now % RECORD_EVERY and now != progress.iterations_in_all:
            return
        state = progress.state
        accuracy = float(cnn5.accuracy(state.params, *self._scored))
        seconds = time.perf_counter() - self._started
        self._started += seconds
        record = {"iterations": now, "accuracy": accuracy, "seconds": round(seconds, 1)}
        noise_stddev = cast(float, state.mechanism.noise_stddev)
        record |= self._setting.moments(state.opt_state, noise_stddev)
        rows = [r for r in records.read(self._path) if r["iterations"] < now]
        lines = [json.dumps(r) + "\n" for r in (*rows, record)]
        self._path.write_text("".join(lines))
        print(self._setting, record, flush=True)


def loss_fn(params: Any, image: jax.Array, label: jax.Array, *, key: jax.Array):
    """The loss of one view, whose key `fit` makes."""
    return cnn5.loss_fn(params, image, label, key)


def train(
    setting: Setting,
    seed: int,
    examples: data.Images,
    scored: data.Images,
    folder: pathlib.Path,
) -> records.Row:
    """Trains on the examples, or goes on where it ended, and scores on the others."""
    mechanism = setting.mechanism(examples.num_examples)
    noise_stddev = cast(float, mechanism.noise_stddev)
    init_key, key = jax.random.split(jax.random.key(seed))
    folder.mkdir(parents=True, exist_ok=True)
    curve = Curve(setting, scored, folder / "curve.jsonl")
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
        callback=curve,
        checkpoints=checkpoints.Checkpoints(folder / "checkpoint", every=100),
    )
    rows = records.read(folder / "curve.jsonl")
    return {
        "epsilon": result.epsilon,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": noise_stddev,
        "num_examples": examples.num_examples,
        "num_scored": scored.num_examples,
        "accuracy": rows[-1]["accuracy"],
        "share_at_floor": rows[-1].get("share_at_floor"),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "curve": rows,
    }


def identity(setting: Setting, seed: int, split: str) -> records.Row:
    """What tells a training from others: scored on "validation" or "test" images."""
    return {
        "setting": dataclasses.asdict(setting),
        "seed": seed,
        "split": split,
        "l2_clip_norm": L2_CLIP_NORM,
        "expected_batch_size": BATCH_SIZE,
        "iterations": setting.epochs * STEPS_PER_EPOCH,
    }


def folder_of(checkpoints_dir: pathlib.Path, row: records.Row) -> pathlib.Path:
    """Of the checkpoints of one training."""
    setting = row["setting"]
    numbers = [f"{name}={value:g}" for name, value in setting["options"].items()]
    parts = [
        setting["method"],
        f"epsilon={setting['target_epsilon']:g}",
        f"epochs={setting['epochs']}",
        f"learning_rate={setting['learning_rate']:g}",
        *numbers,
        f"seed={row['seed']}",
        row["split"],
    ]
    return checkpoints_dir / "_".join(parts)


class Laboratory:
    """Trains what is not on record, on the images that a split stands for."""

    def __init__(self, cifar: data.Cifar, found: records.Records, folder: pathlib.Path):
        fit, validation = data.split_validation(cifar.train.num_examples)
        self._images = {
            "validation": (cifar.train.take(fit), cifar.train.take(validation)),
            "test": (cifar.train, cifar.test),
        }
        self._records, self._folder = found, folder

    def get(self, setting: Setting, seed: int, split: str) -> records.Row:
        """The training, made and written down if it is not there."""
        row = identity(setting, seed, split)
        folder = folder_of(self._folder, row)
        make = lambda: train(setting, seed, *self._images[split], folder)
        return self._records.get(row, make)


def options(doc: str | None, output: pathlib.Path) -> argparse.ArgumentParser:
    """Of a command that trains where it has the data, and then prints its tables."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    parser.add_argument("--output", type=pathlib.Path, default=output)
    parser.add_argument(
        "--checkpoints",
        type=pathlib.Path,
        default=pathlib.Path("cnn5_checkpoints"),
        help="where trainings go on from",
    )
    return parser


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{100 * np.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * np.std(values, ddof=1):.2f}"
