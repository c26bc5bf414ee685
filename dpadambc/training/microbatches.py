"""The microbatches of a run: the largest with which a step fits into memory."""

import dataclasses
from typing import Any

import jax

from dpadambc.clipping import memory
from dpadambc.core import mesh
from dpadambc.core.microbatches import first_rows
from dpadambc.core.programs import Programs
from dpadambc.core.step import Step, TrainState


def with_microbatches(
    step: Step, num_examples: int, state: TrainState, frozen: Any, examples_of: Any
) -> Step:
    """Returns the step with the largest microbatches that fit, or the smallest."""
    spans = mesh.spans_processes(step.layout)
    if (limit := memory.stated_bytes(of_all_processes=spans)) is None:
        return step
    of_size = lambda size: dataclasses.replace(step, microbatch_size=size)
    arguments = state, frozen, examples_of(state)

    def needed(size: int) -> int:
        programs = Programs(of_size(size), num_examples)
        return memory.peak_bytes(programs.steps(*arguments, iterations=1))

    with mesh.on_mesh(step.layout):
        batch = jax.eval_shape(Programs(step, num_examples).draw, state)
    num_rows = first_rows(len(batch.indices), step.expected_size)
    num_shards = mesh.num_shards(step.layout)
    return of_size(memory.microbatch_size(limit, num_rows, num_shards, needed))
