"""One batch over more and more devices: time of a step, and what each device holds."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.speed import models, timing
from benchmarks.training import overhead
from dpadambc import training
from dpadambc.core.mesh import layout_of, placed
from dpadambc.core.programs import Programs


def _case(problem: models.Problem, devices: int, split_params: bool) -> Any:
    """The step of `fit` on so many devices, and its arguments."""
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    params = problem.params
    if split_params:
        params = jax.device_put(params, training.fully_sharded(params, mesh, "data"))
    mechanism: Any = overhead.mechanism_for(problem.batch_size)
    optimizer = overhead.optimizer_for(mechanism)
    batches = NamedSharding(mesh, PartitionSpec("data"))
    layout = layout_of(params, None, [batches])
    step = training.Step(problem.loss_fn, mechanism, optimizer, layout=layout)
    words = np.asarray(jax.random.key_data(jax.random.key(1)))
    programs, digest = Programs(step, problem.batch_size), np.zeros(2, np.uint32)
    state = programs.start(placed(params, layout), words, digest, "threefry2x32")
    whole = problem.batch, np.zeros(problem.batch_size, bool)
    rows = jax.device_put(whole, jax.tree.map(lambda _: batches, whole))
    return step, (state, *rows)


def measure(problem: models.Problem, rounds: int) -> list[dict[str, Any]]:
    """Powers of two up to all devices, interleaved."""
    counts = [2**i for i in range(jax.device_count().bit_length())]
    rows = []
    for split_params in (False, True):
        cases: timing.Cases = {str(n): _case(problem, n, split_params) for n in counts}
        compiled = timing.compile_cases(cases)
        times = timing.interleaved_times(cases, compiled, rounds)
        for n in counts:
            analysis = compiled[str(n)].memory_analysis()
            rows.append(
                {
                    "name": problem.name,
                    "batch_size": problem.batch_size,
                    "devices": n,
                    "split_params": split_params,
                    "seconds": timing.quartiles(times[str(n)]),
                    "speedup": timing.quartiles(times["1"] / times[str(n)]),
                    "state_bytes": analysis.argument_size_in_bytes,
                    "temporary_bytes": analysis.temp_size_in_bytes,
                }
            )
    return rows
