"""The microbatches of a run: the largest with which a step fits into memory."""

import dataclasses
import functools
from typing import Any

import jax

from dpadambc.clipping import memory
from dpadambc.core import mesh
from dpadambc.core.microbatches import first_rows
from dpadambc.core.step import Step, TrainState, compiled, may_be_kept


@functools.lru_cache(maxsize=64)
def peak_bytes(step: Step, num_examples: int, structure: Any, shapes: Any) -> int:
    """The memory of a step on each device, compiled for arguments of these shapes."""
    with mesh.on_mesh(step.layout):
        steps = compiled(step, num_examples).steps
        lowered = steps.lower(*structure.unflatten(shapes), iterations=1)
        return memory.peak_bytes(lowered.compile())


def with_microbatches(
    step: Step, num_examples: int, state: TrainState, frozen: Any, examples_of: Any
) -> Step:
    """The step with the largest microbatches that fit into memory, or the least."""
    spans = mesh.spans_processes(step.layout)
    if (limit := memory.stated_bytes(of_all_processes=spans)) is None:
        return step
    place = lambda x: getattr(x, "sharding", None)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x))
    arguments = jax.tree.map(shape, (state, frozen, examples_of(state)))
    shapes, structure = jax.tree.flatten(arguments)
    of_size = lambda size: dataclasses.replace(step, microbatch_size=size)
    measure = peak_bytes if may_be_kept(step) else peak_bytes.__wrapped__
    needed = lambda n: measure(of_size(n), num_examples, structure, tuple(shapes))
    with mesh.on_mesh(step.layout):
        batch = jax.eval_shape(compiled(step, num_examples).batch, state)
    num_rows = first_rows(len(batch.indices), step.expected_size)
    num_shards = mesh.num_shards(step.layout)
    return of_size(memory.microbatch_size(limit, num_rows, num_shards, needed))
