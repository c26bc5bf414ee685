"""What a checkpoint costs: seconds to save and to restore the state of a run."""

import dataclasses
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks.speed import models, timing
from benchmarks.training import overhead
from dpadambc import training
from dpadambc.training import checkpoints


def measure(problem: models.Problem, rounds: int) -> dict[str, Any]:
    """Seconds to save and to restore the state of a run."""
    mechanism: Any = overhead.mechanism_for(problem.batch_size)
    optimizer = overhead.optimizer_for(mechanism)
    step = training.Step(problem.loss_fn, mechanism, optimizer)
    state = step.init(problem.params, key=jax.random.key(1))
    size = sum(x.nbytes for x in jax.tree.leaves(training.releasable(state)))
    seconds: dict[str, list[float]] = {"save": [], "restore": []}
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoints.Checkpoints(folder)
        for i in range(rounds + 1):
            state = dataclasses.replace(state, step=state.step + 1)
            start = time.perf_counter()
            saved.save(state, {}, {})
            middle = time.perf_counter()
            jax.block_until_ready(saved.restore(state, {}))
            if i:  # the first compiles
                seconds["save"].append(middle - start)
                seconds["restore"].append(time.perf_counter() - middle)
    return {
        "name": problem.name,
        "num_params": problem.num_params,
        "bytes": size,
        "seconds": {n: timing.quartiles(np.array(s)) for n, s in seconds.items()},
    }
