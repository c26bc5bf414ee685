"""CPU seconds from Python to a compiled program, of gradients and of whole steps.

    python -m benchmarks.speed.compile [--repeats N] [--models NAME ...]
        [--cases NAME ...] [--width N] [--layers N] [--output FILE] ...

The models are the decoder, unrolled and scanned, with and without `jax.checkpoint`, and
three small ones of fixed sizes. `fit, step` is what `training.fit` compiles: it draws a
batch and leaves out its padding, too. Each case is traced, lowered and compiled in a
process of its own, without the persistent cache; the cases are interleaved, and a ratio
is one within a repeat. It is CPU time, since XLA compiles on several threads.
"""

import argparse
import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.environment import environment
from benchmarks.speed import contenders, models, run, table, timing
from dpadambc import training
from dpadambc.core.programs import Programs

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = pathlib.Path(__file__).with_name("compile.json")

SIZES: Mapping[str, int] = {
    "batch_size": 8,
    "width": 128,
    "layers": 12,
    "heads": 4,
    "length": 64,
    "vocabulary": 1_000,
}

_unrolled = functools.partial(models.decoder, scanned=False)


def _fixed(make: Callable[[], models.Problem]) -> Callable[..., models.Problem]:
    """A model whose sizes are not those of the decoder."""
    return lambda **sizes: make()


MODELS: Mapping[str, Callable[..., models.Problem]] = {
    "MLP, 161 parameters": _fixed(lambda: models.mlp(64, sizes=(8, 16, 1))),
    "CNN5": _fixed(lambda: models.cnn5(256)),
    "transformer, 2 layers": _fixed(
        lambda: models.transformer(64, width=128, layers=2, heads=4, length=32)
    ),
    "unrolled": functools.partial(_unrolled, rematerialized=False),
    "unrolled, remat": functools.partial(_unrolled, rematerialized=True),
    "scan": functools.partial(models.decoder, rematerialized=False),
    "scan, remat": functools.partial(models.decoder, rematerialized=True),
}

STEPS: Mapping[str, str] = {"adam, step": run.ADAM, "private, step": "private"}
OF_FIT = "fit, step"
CASES = (*contenders.CONTENDERS, *STEPS, OF_FIT)

Seconds = dict[str, float]  # by stage
Measure = Callable[[str, str], Seconds]  # of a model and a case


def baseline(case: str) -> str:
    """What a case is compared with."""
    return "adam, step" if case in (*STEPS, OF_FIT) else contenders.BASELINE


def _function(problem: models.Problem, case: str) -> tuple[Callable[..., Any], Any]:
    """What is compiled, and its arguments."""
    if case in STEPS:
        return run.step_cases(problem)[STEPS[case]]
    if case == OF_FIT:
        return fit_step(problem)
    args = (problem.params, *problem.batch)
    return contenders.CONTENDERS[case](problem), args


def fit_step(problem: models.Problem) -> tuple[Callable[..., Any], Any]:
    """The step of `training.fit` on a data set of a hundred batches, and its shapes."""
    mechanism = run.mechanism(problem.batch_size)
    step = training.Step(
        problem.loss_fn, mechanism, optax.adam(1e-3), skip_padding=True
    )
    num_examples = round(problem.batch_size / mechanism.sampling_prob)
    programs = Programs(step, num_examples)
    rows = lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype)

    def one(state, data):
        batch = programs.draw(state)
        return step(state, batch.gather(data), batch.is_padding_example)

    init = functools.partial(step.init, key=jax.random.key(0))
    state = jax.eval_shape(init, problem.params)
    return one, (state, jax.tree.map(rows, tuple(problem.batch)))


def stages(fun: Callable[..., Any], args: Sequence[Any]) -> Seconds:
    """CPU seconds of each stage and of all."""
    # The first program of a process pays for what all of them need.
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3, np.float32)))
    times = [time.process_time()]
    traced = jax.jit(fun).trace(*args)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    seconds = dict(zip(("trace", "lower", "compile"), np.diff(times), strict=True))
    return {k: float(v) for k, v in seconds.items()} | {"total": times[-1] - times[0]}


def measure_here(model: str, case: str, **problem_sizes: int) -> Seconds:
    """One case in this process."""
    jax.config.update("jax_enable_compilation_cache", False)
    return stages(*_function(MODELS[model](**problem_sizes), case))


def measure_in_new_process(model: str, case: str, **problem_sizes: int) -> Seconds:
    """One case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.compile", "--one", model, case]
    for name, size in problem_sizes.items():
        command += [_option(name), str(size)]
    process = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout)


def summarize(repeats: Sequence[Mapping[str, Seconds]]) -> dict[str, Any]:
    """Quartiles of each case and of its ratio to the baseline, repeat by repeat."""
    results = {}
    for case in repeats[0]:
        seconds = {
            stage: timing.quartiles(np.array([r[case][stage] for r in repeats]))
            for stage in repeats[0][case]
        }
        results[case] = {"seconds": seconds}
        if baseline(case) in repeats[0]:
            totals = [(r[case]["total"], r[baseline(case)]["total"]) for r in repeats]
            ratios = np.array([total / base for total, base in totals])
            results[case]["ratio"] = timing.quartiles(ratios)
    return results


def measure(
    names: Sequence[str], cases: Sequence[str], repeats: int, measure_one: Measure
) -> dict[str, Any]:
    """All cases of all models, one after the other in each repeat."""
    seconds: dict[str, list[dict[str, Seconds]]] = {name: [] for name in names}
    for i in range(repeats):
        for name in names:
            seconds[name].append({case: measure_one(name, case) for case in cases})
        print(f"repeat {i + 1} of {repeats}: done", file=sys.stderr)
    return {
        name: {"model": _title(name), "cases": summarize(seconds[name])}
        for name in names
    }


def _title(name: str) -> str:
    return f"decoder, {name}" if name.startswith(("scan", "unrolled")) else name


def _option(size: str) -> str:
    return f"--{size.replace('_', '-')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(_option(name), type=int, default=default)
    args = parser.parse_args()
    problem_sizes = {name: getattr(args, name) for name in SIZES}
    if args.one:
        print(json.dumps(measure_here(*args.one, **problem_sizes)))
        return
    one = functools.partial(measure_in_new_process, **problem_sizes)
    results = {
        "command": " ".join(["python -m benchmarks.speed.compile", *sys.argv[1:]]),
        "environment": environment(),
        "sizes": problem_sizes,
        "models": measure(args.models, args.cases, args.repeats, one),
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table.compile_times(results))


if __name__ == "__main__":
    main()
