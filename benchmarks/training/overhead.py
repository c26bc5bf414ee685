"""What the loop costs: steps of `fit` against the same steps in a bare jitted loop."""

import functools
import time
from typing import Any

import jax
import numpy as np
import optax

import dpadambc
from benchmarks.speed import models, timing
from dpadambc import training

CHUNK = 20  # steps that are timed together


def mechanism_for(batch_size: int, iterations: int = 1000) -> dpadambc.Mechanism:
    """Batches of one size from four times as many examples."""
    return dpadambc.FixedSizeGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_examples=4 * batch_size,
        batch_size=batch_size,
        iterations=iterations,
        normalize_by=batch_size,
    )


def optimizer_for(mechanism: Any) -> optax.GradientTransformation:
    """DP-AdamBC, but for the clip and the noise."""
    return dpadambc.adam_bc(1e-3, mechanism.noise_stddev)


def repeated(problem: models.Problem) -> tuple[Any, ...]:
    """The batch of a problem four times over, as a data set."""
    return jax.tree.map(lambda x: np.concatenate([np.asarray(x)] * 4), problem.batch)


class _Bare:
    """The loop that one would write by hand, with nothing but its steps."""

    def __init__(self, problem: models.Problem, mechanism: Any):
        tx = optax.chain(
            dpadambc.add_dp_noise(mechanism.noise_stddev, key=jax.random.key(0)),
            optimizer_for(mechanism),
        )
        data = jax.device_put(repeated(problem))
        clipped_grad = dpadambc.clipped_grad(
            problem.loss_fn,
            l2_clip_norm=mechanism.l2_clip_norm,
            normalize_by=mechanism.normalize_by,
        )

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(params, state, key):
            key, sampling_key = jax.random.split(key)
            batch = mechanism.sample_step(
                sampling_key, 0, num_examples=mechanism.num_examples
            )
            examples = jax.tree.map(lambda x: x[batch.indices], data)
            gradient = clipped_grad(params, *examples)
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, key

        params = jax.tree.map(jax.numpy.copy, problem.params)
        self._step, self._state = step, (params, tx.init(params), jax.random.key(1))

    def seconds_per_step(self) -> float:
        start = time.perf_counter()
        for _ in range(CHUNK):
            self._state = self._step(*self._state)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start) / CHUNK


def measure(problem: models.Problem, rounds: int, steps_per_call: int) -> dict:
    """The two take turns: a callback of `fit` runs the bare loop."""
    mechanism = mechanism_for(problem.batch_size, CHUNK * (rounds + 1))
    bare = _Bare(problem, mechanism)
    seconds: dict[str, list[float]] = {"fit": [], "bare": []}
    started = time.perf_counter()

    def callback(progress: training.Progress) -> None:
        nonlocal started
        if progress.iterations % CHUNK:
            return
        jax.block_until_ready(progress.seen)
        seconds["fit"].append((time.perf_counter() - started) / CHUNK)
        seconds["bare"].append(bare.seconds_per_step())
        started = time.perf_counter()

    training.fit(
        problem.loss_fn,
        problem.params,
        repeated(problem),
        mechanism,
        optimizer_for(mechanism),
        key=jax.random.key(0),
        target_delta=1e-6,
        steps_per_call=steps_per_call,
        callbacks=callback,
    )
    # The first of each compiles.
    times = {name: np.array(values[1:]) for name, values in seconds.items()}
    return {
        "name": problem.name,
        "batch_size": problem.batch_size,
        "steps_per_call": steps_per_call,
        "seconds": {name: timing.quartiles(t) for name, t in times.items()},
        "ratio": timing.quartiles(times["fit"] / times["bare"]),
    }
