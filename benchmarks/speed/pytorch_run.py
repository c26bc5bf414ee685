"""The same models in PyTorch, with Opacus and Opake; for a Python that has them.

    python -m benchmarks.speed.pytorch_run [--rounds N] [--models NAME ...]
        [--modes NAME ...] [--output FILE] [--threads N] [--cpu-time] [--check]
    python -m benchmarks.speed.pytorch_run --device cuda --rounds 10
        --modes hooks ghost

A gradient is forward, backward, clip and sum, without noise, on two threads. Memory
is the peak of a process that computes nothing else. A mode that fails on a model is
recorded with its error.

PyTorch gives the memory of every gradient back to the system, which can take longer
than the gradient; the process that is timed keeps it instead. On a machine that others
use too, take `--threads 1 --cpu-time`: threads that wait for each other are of no use
there. `--check` compares each mode with a loop over the examples of small models, and
times nothing.

On a GPU products are in TF32, as JAX has them, and memory is the most that PyTorch has
allocated there in one gradient.
"""

# pyright: basic, reportMissingImports=false
# PyTorch, Opacus and Opake are no dependencies of this project.

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from benchmarks.speed import pytorch_models as models
from benchmarks.speed.pytorch_models import Problem

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = pathlib.Path(__file__).with_name("pytorch_results.json")
ON_GPU = RESULTS.with_name("pytorch_gpu.json")
BASELINE = "non-private"
UNTIED = "ghost, untied head"
L2_CLIP_NORM = 1.0
CALLS = 2
WARM_ROUNDS = 1
# Settings of glibc under which a process keeps its memory.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Gradient = Sequence[torch.Tensor]  # one for each parameter
Call = Callable[[], Gradient]

_decoder = functools.partial(models.decoder, width=512, layers=8, heads=8)

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "transformer-64": functools.partial(models.transformer, 64),
    "transformer-256": functools.partial(models.transformer, 256),
    "decoder-16": functools.partial(_decoder, 16),
    "decoder-64": functools.partial(_decoder, 64),
    "decoder-384": functools.partial(models.decoder, 16),
    "encoder-64": functools.partial(models.encoder, 16, 64),
    "encoder-256": functools.partial(models.encoder, 16, 256),
    "mlp-256": functools.partial(models.mlp, 256),
    "mlp-1024": functools.partial(models.mlp, 1024),
    "encoder-512": functools.partial(models.encoder, 512, 64),
    "cnn5-256": functools.partial(models.cnn5, 256),
    "cnn5-2048": functools.partial(models.cnn5, 2048),
    "gcn": models.gcn,
    "lstm-64": models.lstm,
}

LARGE = ("encoder-512", "cnn5-2048")  # for a GPU

SMALL: dict[str, Callable[[], Problem]] = {
    "transformer": functools.partial(models.transformer, 4, 32, 2, 2, 8, 50),
    "decoder": functools.partial(models.decoder, 4, 32, 2, 2, 8, 50),
    "encoder": functools.partial(models.encoder, 4, 8, 32, 2, 2, 64, 50, 16),
    "mlp": functools.partial(models.mlp, 4, (5, 4, 3)),
    "cnn5": functools.partial(models.cnn5, 2, (2, 3, 4, 5, 3), 16),
    "gcn": functools.partial(models.gcn, 6, 3, 5, 4, 3),
    "lstm": functools.partial(models.lstm, 3, 4, 2, 5, 3, 2),
}


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def non_private(problem: Problem) -> Call:
    """The gradient of the mean loss."""
    params = list(problem.model.parameters())

    def call():
        problem.model.zero_grad()
        mean_loss(problem.model(*problem.inputs), problem.labels).backward()
        return [p.grad for p in params]

    return call


def hooks(problem: Problem) -> Call:
    """Gradients of all examples from hooks, then clipped and summed."""
    if problem.is_checkpointed:
        problem.model.is_reentrant = True
    params = list(problem.model.parameters())
    model = GradSampleModule(problem.model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=problem.batch_size,
    )

    def call():
        optimizer.zero_grad(set_to_none=True)
        mean_loss(model(*problem.inputs), problem.labels).backward()
        optimizer.clip_and_accumulate()
        for p in params:
            p.grad_sample = None  # memory that the other modes need
        return [p.summed_grad for p in params]

    return call


def ghost(problem: Problem) -> Call:
    """Norms first, then a second backward pass of the weighted losses."""
    if problem.is_checkpointed:
        problem.model.is_reentrant = True
    params = list(problem.model.parameters())
    model = GradSampleModuleFastGradientClipping(
        problem.model, max_grad_norm=L2_CLIP_NORM
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=problem.batch_size,
    )
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def call():
        optimizer.zero_grad(set_to_none=True)
        logits = model(*problem.inputs)
        shape = logits.shape if logits.ndim == 3 else None
        labels = problem.labels.flatten()
        criterion(logits.flatten(0, -2), labels, shape=shape).backward()
        return [p.grad for p in params]

    return call


def _untie(problem: Problem) -> None:
    head = problem.model.head
    head.weight = nn.Parameter(head.weight.detach().clone())


def ghost_untied(problem: Problem) -> Call:
    """Ghost clipping of a decoder whose head has parameters of its own."""
    _untie(problem)
    return ghost(problem)


def opake(problem: Problem, microbatch_size: int | None = None) -> Call:
    """Opake's `clipped_grad`, of the loss of one example, by `vmap`."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.functional import make_functional
    from opake.patches import apply_runtime_patches

    apply_runtime_patches()
    apply, params = make_functional(problem.model)
    batch = (*problem.inputs, problem.labels)

    def loss_fn(params, *example):
        *inputs, labels = (x[None] for x in example)
        return mean_loss(apply(params, *inputs), labels)

    grad_fn, state = clipped_grad(
        loss_fn,
        clipping_norm=L2_CLIP_NORM,
        batch_argnums=tuple(range(1, 1 + len(batch))),
        microbatch_size=microbatch_size,
    )
    return lambda: grad_fn(params, *batch, state=state)[0].pytree


MODES: dict[str, Callable[[Problem], Call]] = {
    BASELINE: non_private,
    "hooks": hooks,
    "ghost": ghost,
    UNTIED: ghost_untied,
    "opake": opake,
    "opake, microbatches of 4": functools.partial(opake, microbatch_size=4),
}


def modes_of(problem: Problem) -> list[str]:
    """The modes that make sense for a model."""
    is_tied = problem.is_checkpointed
    return [mode for mode in MODES if is_tied or mode != UNTIED]


def build(problem: Callable[[], Problem], mode: str, device: str = "cpu") -> Call:
    torch.manual_seed(0)
    return MODES[mode](problem().to(device))


def _clipped_one_by_one(problem: Problem) -> Gradient:
    """The sum of the clipped gradients, from a loop over the examples."""
    params = list(problem.model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for i in range(problem.batch_size):
        inputs = (x[i : i + 1] for x in problem.inputs)
        loss = mean_loss(problem.model(*inputs), problem.labels[i : i + 1])
        grads = torch.autograd.grad(loss, params)
        weight = (L2_CLIP_NORM / _norm(grads)).clamp(max=1)
        total = [t + weight * g for t, g in zip(total, grads, strict=True)]
    return total


def _norm(tensors: Gradient) -> torch.Tensor:
    return torch.stack([x.norm() for x in tensors]).norm()


def relative_error(make: Callable[[], Problem], mode: str) -> float:
    """How far a mode's gradient is from that of a loop over the examples."""
    torch.manual_seed(0)
    problem = make()
    if mode == UNTIED:
        _untie(problem)
    expected = _clipped_one_by_one(problem)
    grads = build(make, mode)()
    differences = [x - y for x, y in zip(grads, expected, strict=True)]
    return float(_norm(differences) / _norm(expected))


def _error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def check() -> None:
    """Prints how far each mode is from a loop, or its error."""
    for name, make in SMALL.items():
        for mode in modes_of(make())[1:]:
            try:
                print(f"{name}, {mode}: {relative_error(make, mode):.1e}")
            except Exception as error:
                print(f"{name}, {mode}: {_error(error)}")


def peak_megabytes() -> float:
    """The most memory that this process has had.

    `ru_maxrss` would not do: a process inherits it from the one that started it.
    """
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return float(line.split()[1]) * 1024 / 1e6


def run_case(model: str, mode: str, memory_limit: int) -> None:
    """Runs one case in this process and prints its memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    call = build(PROBLEMS[model], mode)
    for _ in range(CALLS):
        call()
    print(f"{peak_megabytes():.1f}")


def try_case(model: str, mode: str, memory_limit: int) -> dict[str, Any]:
    """The memory of one case in a process of its own, or its error."""
    module = "benchmarks.speed.pytorch_run"
    command = [sys.executable, "-m", module, "--case", model, mode]
    command += ["--memory-limit", str(memory_limit / 2**30)]
    command += ["--threads", str(torch.get_num_threads())]
    env = {k: v for k, v in os.environ.items() if k not in KEEP_MEMORY}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if process.returncode == 0:
        return {"resident_megabytes": float(process.stdout)}
    last_line = process.stderr.strip().split("\n")[-1]
    return {"error": last_line or f"exit status {process.returncode}"}


def interleaved_times(
    calls: dict[str, Call], rounds: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Seconds of each call, shape (rounds,), after a warm round."""
    times = {name: [] for name in calls}
    for _ in range(rounds + WARM_ROUNDS):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: np.array(t[WARM_ROUNDS:]) for name, t in times.items()}


def _finished() -> float:
    """The time when all that a GPU was given is done."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_on_gpu(
    model: str, modes: Sequence[str], rounds: int, device: str
) -> dict[str, Any]:
    """Memory and times of all modes that fit, which take turns."""
    results, calls = {}, {}
    for mode in modes:
        try:
            call = build(PROBLEMS[model], mode, device)
            call()
            torch.cuda.reset_peak_memory_stats()
            call()
        except (ImportError, RuntimeError, ValueError) as error:
            results[mode] = {"error": _error(error)}
            continue
        megabytes = torch.cuda.max_memory_allocated() / 1e6
        results[mode], calls[mode] = {"peak_megabytes": megabytes}, call
    times = interleaved_times(calls, rounds, _finished)
    for mode, seconds in times.items():
        results[mode]["milliseconds"] = quartiles(1e3 * seconds)
        results[mode]["time_ratio"] = quartiles(seconds / times[BASELINE])
    return results


def quartiles(values: np.ndarray) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "q1": float(low), "q3": float(high)}


def measure_on_cpu(
    model: str, modes: Sequence[str], rounds: int, clock: str, memory_limit: int
) -> dict[str, Any]:
    """Memory of all modes, and times of those that work."""
    results = {mode: try_case(model, mode, memory_limit) for mode in modes}
    calls = {
        mode: build(PROBLEMS[model], mode)
        for mode in modes
        if "error" not in results[mode]
    }
    times = interleaved_times(calls, rounds, CLOCKS[clock])
    for mode, seconds in times.items():
        results[mode]["milliseconds"] = quartiles(1e3 * seconds)
        results[mode]["time_ratio"] = quartiles(seconds / times[BASELINE])
    return results


def row_of(model: str, gradients: dict[str, Any], where: dict[str, Any]) -> Any:
    """What is recorded of a model."""
    problem = PROBLEMS[model]()
    return {
        "command": " ".join(["python -m benchmarks.speed.pytorch_run", *sys.argv[1:]]),
        "environment": describe() | where,
        "model": problem.name,
        "batch_size": problem.batch_size,
        "num_params": sum(p.numel() for p in problem.model.parameters()),
        "gradients": gradients,
    }


def describe() -> dict[str, Any]:
    """The date, the machine and the versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{
            name: installed.version
            for name in ("opacus", "opake")
            for installed in importlib.metadata.distributions(name=name)
        },
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=PROBLEMS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-limit", type=float, default=12, help="in GiB")
    parser.add_argument("--cpu-time", action="store_true", help="not the wall's")
    parser.add_argument("--check", action="store_true", help="on small models")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    memory_limit = int(args.memory_limit * 2**30)
    if args.check:
        check()
        return
    if args.case:
        model, mode = args.case
        run_case(model, mode, memory_limit)
        return
    on_gpu = args.device != "cpu"
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    elif not KEEP_MEMORY.items() <= os.environ.items():
        module = ["-m", "benchmarks.speed.pytorch_run"]
        command = [sys.executable, *module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | KEEP_MEMORY)
    # What is measured again replaces what was recorded.
    output = args.output or (ON_GPU if on_gpu else RESULTS)
    results: dict[str, Any] = {"models": {}}
    if output.exists():
        results = json.loads(output.read_text())
    for model in args.models or [x for x in PROBLEMS if (x in LARGE) == on_gpu]:
        wanted = {BASELINE, *args.modes}
        modes = [mode for mode in modes_of(PROBLEMS[model]()) if mode in wanted]
        clock = "cpu" if args.cpu_time else "wall"
        where = {"clock": clock}
        if on_gpu:
            where = {"device": torch.cuda.get_device_name(args.device)}
            gradients = measure_on_gpu(model, modes, args.rounds, args.device)
        else:
            gradients = measure_on_cpu(model, modes, args.rounds, clock, memory_limit)
        row = row_of(model, gradients, where)
        measured = results["models"] | {model: row}
        results["models"] = {k: measured[k] for k in PROBLEMS if k in measured}
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{model}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
