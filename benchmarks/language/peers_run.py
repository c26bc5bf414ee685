"""Measures a private step of MiniLM here, by Opacus and by Opake; needs all of them.

    pip install '.[language]' torch==2.13.0 transformers peft opacus opake
    taskset -c 0 python -m benchmarks.language.peers_run [--rounds 5] [--output FILE]
        [--ways WAY ...] [--lengths N ...] [--batch-size N] [--memory-limit GIB]
    python -m benchmarks.language.peers                  # the table

*Agreement.* The norms of the examples' gradients, and that of their clipped sum, are
compared with ours first, of a few texts, half of them padded.

*Memory.* Ours is what the compiler says of the step. Theirs are the parameters, and the
most that tensors take at once from before the optimizer is made to the end of a second
step, as PyTorch's profiler counts them; so neither has libraries or fragments of a heap
in it. Batches are doubled until one takes a GiB; larger ones are on the line through
the last two.

*Time.* All steps are called in turns in one process, warm, on one thread. A second is
one of the processor, so that others on the machine do not count. The process keeps its
memory, as in `benchmarks.speed.pytorch_run`, for the good of those that need most. What
would need more than the limit is not timed.
"""

# pyright: basic, reportMissingImports=false
# PyTorch and what uses it are no dependencies of this project.

import argparse
import gc
import importlib.metadata
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import torch

import dpadambc
from benchmarks import environment
from benchmarks.language import cost, data, peers, pytorch_minilm, pytorch_steps
from benchmarks.speed import pytorch_run, timing

PACKAGES = ("torch", "transformers", "peft", "opacus", "opake")
NUM_COMPARED, LENGTH_COMPARED = 8, 32
ENOUGH_BYTES = 2**30
HEAP = 1.5  # times what is in it, at most, where a process keeps its memory

Calls = dict[str, Callable[[], Any]]


def _step(
    name: str, model: pytorch_minilm.Classifier, texts: pytorch_minilm.Texts
) -> pytorch_steps.Step:
    if name == peers.PYTORCH:
        return pytorch_steps.ordinary(model, texts)
    return pytorch_steps.PRIVATE[name](model, texts).step


def _texts(length: int, batch_size: int) -> pytorch_minilm.Texts:
    return pytorch_minilm.of_numpy(cost.random_texts(length, batch_size))


def _padded_texts() -> data.Tokens:
    """Half of them only half as long."""
    texts = cost.random_texts(LENGTH_COMPARED, NUM_COMPARED)
    texts.tokens[::2, LENGTH_COMPARED // 2 :] = 0
    return texts


def _norm(arrays: Sequence[Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays)))


def compare(way: str) -> list[dict[str, Any]]:
    """How far the gradients of all tools are from ours, relatively."""
    texts = _padded_texts()
    parts = pytorch_minilm.in_jax(pytorch_minilm.build(way), way)
    args = (parts.trained, parts.frozen, *texts)
    batched: dict[str, Any] = {"batch_argnums": (2, 3, 4)}
    clip: dict[str, Any] = {"l2_clip_norm": cost.L2_CLIP_NORM, "normalize_by": 1.0}
    grads = jax.jit(dpadambc.per_example_grad(parts.loss_fn, **batched))(*args)
    norms = np.asarray(dpadambc.per_example_norms(grads))
    grad_fn = dpadambc.clipped_grad(parts.loss_fn, **batched, **clip)
    clipped = dpadambc.materialize(jax.jit(grad_fn)(*args))
    norm_of_sum = float(optax.tree.norm(clipped))
    rows = []
    for name, make in pytorch_steps.PRIVATE.items():
        model = pytorch_minilm.build(way)
        found = make(model, pytorch_minilm.of_numpy(texts)).gradient()
        theirs = _norm([x.detach().numpy() for x in found.clipped])
        differences = {
            "norms": float(np.abs(found.norms.detach().numpy() / norms - 1).max()),
            "clipped": abs(theirs / norm_of_sum - 1),
        }
        rows.append({"way": way, "step": name} | differences)
        gc.collect()
    return rows


def _tensor_bytes(call: Callable[[], None]) -> int:
    """The most that the tensors which a call makes take at once."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]"
    )
    return int(np.cumsum([change for _, change in changes]).max())


def step_bytes(name: str, way: str, length: int, batch_size: int) -> int:
    """Of parameters, and of all tensors of two steps."""
    model, texts = pytorch_minilm.build(way), _texts(length, batch_size)

    def two_steps():
        step = _step(name, model, texts)
        step()
        step()

    found = _tensor_bytes(two_steps) + model.num_bytes()
    gc.collect()
    return found


def memory(name: str, way: str, length: int, batch_size: int) -> dict[int, int]:
    """Bytes by the batch size."""
    if name == pytorch_steps.OPAKE_IN_PARTS:  # the same for all larger batches
        return {batch_size: step_bytes(name, way, length, batch_size)}
    found, size = {}, 2
    while len(found) < 2 or max(found.values()) < ENOUGH_BYTES:
        found[size] = step_bytes(name, way, length, size)
        size *= 2
    return found


def names_of(way: str) -> list[str]:
    """The steps in PyTorch: microbatches are for gradients that are large."""
    private = [
        name
        for name in pytorch_steps.PRIVATE
        if way == "full" or name != pytorch_steps.OPAKE_IN_PARTS
    ]
    return [peers.PYTORCH, *private]


def ours(way: str, length: int, batch_size: int) -> tuple[Calls, dict[str, Any]]:
    """Our compiled steps, and their memory."""
    steps = {name: f"{kind} step" for name, kind in peers.KIND.items()}
    cases = cost.cases_of(way, length, batch_size)
    cases = {name: cases[case] for name, case in steps.items()}
    compiled = timing.compile_cases(cases)

    def call_of(name):
        return lambda: jax.block_until_ready(compiled[name](*cases[name][1]))

    sizes = {
        name: {batch_size: timing.peak_bytes(each)} for name, each in compiled.items()
    }
    return {name: call_of(name) for name in steps}, sizes


def measure(
    way: str, length: int, batch_size: int, rounds: int, memory_limit: float
) -> dict[str, Any]:
    names = names_of(way)
    calls, sizes = ours(way, length, batch_size)
    sizes |= {name: memory(name, way, length, batch_size) for name in names}
    fits = lambda name: peers.bytes_at(sizes[name], batch_size) <= memory_limit / HEAP
    texts = _texts(length, batch_size)
    calls |= {
        name: _step(name, pytorch_minilm.build(way), texts)
        for name in names
        if fits(name)
    }
    times = pytorch_run.interleaved_times(calls, rounds, time.process_time)
    programs: dict[str, Any] = {name: {"bytes": found} for name, found in sizes.items()}
    for name, seconds in times.items():
        ratios = seconds / times[peers.baseline(name)]
        programs[name]["seconds"] = pytorch_run.quartiles(seconds)
        programs[name]["ratio"] = pytorch_run.quartiles(ratios)
    row: dict[str, Any] = {"way": way, "length": length, "batch_size": batch_size}
    return row | {"programs": programs}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=cost.WAYS, default=cost.WAYS)
    parser.add_argument("--lengths", nargs="+", type=int, default=cost.LENGTHS)
    parser.add_argument("--batch-size", type=int, default=cost.BATCH_SIZE)
    parser.add_argument("--memory-limit", type=float, default=14, help="in GiB")
    parser.add_argument("--output", type=pathlib.Path, default=peers.RESULTS)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if not pytorch_run.KEEP_MEMORY.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.language.peers_run"]
        kept = os.environ | pytorch_run.KEEP_MEMORY
        os.execve(sys.executable, [*command, *sys.argv[1:]], kept)
    torch.set_num_threads(1)
    limit = int(chosen.memory_limit * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    record: dict[str, Any] = {
        "environment": environment.environment() | versions,
        "agreement": [row for way in chosen.ways for row in compare(way)],
        "rows": [],
    }
    print(peers.agreement(record["agreement"]), flush=True)
    for way in chosen.ways:
        for length in chosen.lengths:
            row = measure(way, length, chosen.batch_size, chosen.rounds, limit)
            print(json.dumps(row), flush=True)
            record["rows"].append(row)
            chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
