"""One fine-tuning on pairs of E2E by `training.fit`, private or not, which resumes."""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks import records
from benchmarks.language import finetune
from benchmarks.language.finetune import NOT_PRIVATE, TARGET_DELTA
from benchmarks.language.smollm import texts
from dpadambc import clipping, training

AUTOMATIC = "AUTO-S, DP-Adam"
METHODS = (AUTOMATIC, *finetune.OPTIMIZERS)
SECONDS_PER_LINE = 30.0


@dataclasses.dataclass(frozen=True)
class Setting(finetune.Setting):
    """One training, but for its seed and for what it trains on.

    Attributes:
      last: how many of the last blocks are trained, on hidden states of those before
        that are computed once; None is all.
    """

    last: int | None = None

    def mechanism(self, num_examples: int) -> dpadambc.PoissonGaussian:
        """With the least noise for the target, or with none and no clip."""
        found = super().mechanism(num_examples)
        if self.method != AUTOMATIC:
            return found
        return dataclasses.replace(found, clip_rule=clipping.Automatic())

    def optimizer(
        self, mechanism: dpadambc.PoissonGaussian
    ) -> optax.GradientTransformation:
        """Its rate falls linearly to zero."""
        name = "DP-Adam" if self.method == AUTOMATIC else self.method
        rate = optax.linear_schedule(self.learning_rate, 0.0, mechanism.iterations)
        return finetune.OPTIMIZERS[name](rate, mechanism.noise_stddev)


@dataclasses.dataclass
class Lines:
    """Prints how far a run is, and ends it when its time is over."""

    tokens_per_step: float
    ends: float  # of `time.monotonic`

    def __post_init__(self):
        self._began, self._told, self._steps = time.monotonic(), 0.0, 0

    def __call__(self, progress: training.Progress) -> None:
        jax.block_until_ready(progress.seen)
        now, self._steps = time.monotonic(), self._steps + progress.num_steps
        is_last = progress.iterations == progress.iterations_in_all
        if is_last or now - self._told > SECONDS_PER_LINE:
            self._told = now
            rate = self._steps * self.tokens_per_step / (now - self._began)
            print(
                f"step {progress.iterations:,} of {progress.iterations_in_all:,},"
                f" {rate:,.0f} tokens a second, ε {progress.epsilon():.2f}",
                flush=True,
            )
        if now > self.ends and not is_last:
            raise training.Stop("out of time", is_public=True)


def fit(
    setting: Setting,
    seed: int,
    parts: texts.Parts,
    examples: tuple[Any, ...],
    folder: pathlib.Path,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    microbatch_size: int | None = None,
    ends: float = float("inf"),
) -> tuple[Any, records.Row | None]:
    """Trains on the texts, or goes on where it ended.

    Args:
      setting: what to do.
      seed: of the batches and the noise.
      parts: the model.
      examples: tokens, where each text begins and, with `setting.last`, hidden states.
      folder: of the checkpoints that it goes on from.
      dtype: of the products; parameters stay float32.
      microbatch_size: by default the largest that fits into memory.
      ends: when the run is saved and ends, of `time.monotonic`.

    Returns:
      What is trained, and what to write down; nothing of a run that is to go on.
    """
    tokens = np.asarray(examples[0])
    num_examples = len(tokens)
    mechanism = setting.mechanism(num_examples)
    per_step = setting.batch_size * np.mean(np.sum(tokens != texts.PADDING, axis=1))
    began = time.perf_counter()
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
        callback=Lines(float(per_step), ends),
        checkpoints=training.Checkpoints(folder, every=20, keep=1),
    )
    trained = result.state.params
    if result.iterations < mechanism.iterations:
        return trained, None
    steps = result.iterations - (result.resumed_from or 0)
    seconds = (time.perf_counter() - began) / steps if steps else None
    return trained, {
        "num_examples": num_examples,
        "num_trained": int(optax.tree.size(trained)),
        "epsilon": None if setting.method == NOT_PRIVATE else result.epsilon,
        "noise_multiplier": mechanism.noise_multiplier,
        "iterations": mechanism.iterations,
        "seconds_per_step": seconds and round(seconds, 3),  # with compilation
    }
