"""Seconds and memory of a private step of MiniLM against an ordinary one.

    taskset -c 0 python -m benchmarks.language.cost [--rounds 5] [--batch-size 64]
    python -m benchmarks.language.cost --memory 8        # the largest batches in 8 GiB
    python -m benchmarks.language.cost --table           # of what is on record

Of each way to fine-tune and each length, the clipped gradient and that of the mean, and
the step of each, with noise and DP-AdamBC or with Adam, take turns in one process, on
made up tokens of full length. The largest batch is that whose step fits by the
compiler's analysis (arguments, outputs and temporaries), without microbatches, by
bisection among the multiples of 8; nothing is run.
"""

import argparse
import bisect
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpadambc
from benchmarks import experiment
from benchmarks.language import encoder, ways
from benchmarks.records import Row
from benchmarks.speed import timing
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown

WAYS, LENGTHS, BATCH_SIZE, RANK = ("full", "LoRA", "last block"), (32, 64), 64, 8
KINDS = ("ordinary", "private")
L2_CLIP_NORM, NOISE_STDDEV, LEARNING_RATE = 0.1, 1e-3, 1e-3
SIZES = range(8, 8192 + 1, 8)  # of the largest batch


def parts_of(way: str) -> ways.Parts:
    """MiniLM with a head of two classes."""
    model = encoder.Classifier(encoder.load(), 2, rngs=nnx.Rngs(0))
    if way == "LoRA":
        model = ways.with_lora(model, rank=RANK, key=jax.random.key(0))
    return ways.split(model, way)


def cases_of(way: str, length: int, batch_size: int) -> timing.Cases:
    """Those of MiniLM, on texts of random tokens."""
    rng, shape = np.random.default_rng(0), (batch_size, length)
    tokens = rng.integers(1, encoder.Config().num_tokens, shape).astype(np.int32)
    labels = rng.integers(2, size=batch_size).astype(np.int32)
    parts = parts_of(way)
    inputs = parts.frozen, tokens, np.zeros(shape, np.int32), labels
    return programs(parts.loss_fn, parts.trained, inputs)


def programs(
    loss_fn: Callable[..., jax.Array], trained: Any, inputs: Sequence[Any]
) -> timing.Cases:
    """The ordinary and the private program, of the gradient and of the step.

    The inputs of the loss are what is frozen, and then texts.
    """
    batch_size = len(inputs[-1])
    clipped = dpadambc.clipped_grad(
        loss_fn,
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=batch_size,
        batch_argnums=tuple(range(2, 1 + len(inputs))),
    )

    def ordinary(trained, frozen, *texts):
        own = lambda trained, *text: loss_fn(trained, frozen, *text)
        present = jnp.zeros(batch_size, bool)
        return experiment.mean_grad(own)(trained, *texts, is_padding_example=present)

    noise = dpadambc.add_dp_noise(NOISE_STDDEV, key=jax.random.key(0))
    corrected = dpadambc.adam_bc(LEARNING_RATE, NOISE_STDDEV)
    optimizers = optax.adam(LEARNING_RATE), optax.chain(noise, corrected)

    def step_of(grad, optimizer):
        def step(trained, state, frozen, *texts):
            gradient = grad(trained, frozen, *texts)
            updates, state = optimizer.update(gradient, state, trained)
            return optax.apply_updates(trained, updates), state

        return step

    cases: timing.Cases = {}
    grads = zip(KINDS, (ordinary, clipped), optimizers, strict=True)
    for kind, grad, optimizer in grads:
        cases[f"{kind} gradient"] = grad, (trained, *inputs)
        args = trained, optimizer.init(trained), *inputs
        cases[f"{kind} step"] = step_of(grad, optimizer), args
    return cases


def timed(cases: timing.Cases, rounds: int) -> Row:
    """Seconds, bytes, and ratios of these programs."""
    compiled = timing.compile_cases(cases)
    seconds = timing.interleaved_times(cases, compiled, rounds)
    memory = {name: each.memory_analysis() for name, each in compiled.items()}
    ratio = lambda of: timing.quartiles(
        seconds[f"private {of}"] / seconds[f"ordinary {of}"]
    )
    return {
        "seconds": {name: timing.quartiles(each) for name, each in seconds.items()},
        "temporary_bytes": {name: x.temp_size_in_bytes for name, x in memory.items()},
        "peak_bytes": {name: timing.peak_bytes(x) for name, x in compiled.items()},
        "ratio_of_gradient": ratio("gradient"),
        "ratio_of_step": ratio("step"),
    }


def step_bytes(way: str, length: int, kind: str, batch_size: int) -> int:
    """Of the compiled step, "ordinary" or "private"."""
    step = cases_of(way, length, batch_size)[f"{kind} step"]
    return timing.peak_bytes(timing.compile_cases({"": step})[""])


def largest_batch(bytes_of: Callable[[int], int], memory: float) -> int:
    """The largest of `SIZES` that fits, where all below it do; 0 if none does."""
    index = bisect.bisect_right(SIZES, memory, key=bytes_of)
    return SIZES[index - 1] if index else 0


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    for length, way in itertools.product(arguments.length, arguments.way):
        identity: Row = {"way": way, "length": length}
        if arguments.memory:
            identity["gibibytes"] = arguments.memory
        else:
            identity["batch_size"] = arguments.batch_size
        yield Cell(way, None, None, identity)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    def measure(cell: Cell) -> Row:
        of = cell.identity["way"], cell.identity["length"]
        if not arguments.memory:
            return timed(cases_of(*of, arguments.batch_size), arguments.rounds)
        memory = arguments.memory * 2**30
        fits = lambda kind: lambda size: step_bytes(*of, kind, size)
        return {"largest_batch": {x: largest_batch(fits(x), memory) for x in KINDS}}

    return measure


def table(rows: Sequence[Row]) -> str:
    """One line for each way and length: ordinary, private, and their ratio."""
    body = []
    for row in rows:
        seconds = [row["seconds"][f"{x} step"]["median"] for x in KINDS]
        megabytes = [row["peak_bytes"][f"{x} step"] / 1e6 for x in KINDS]
        ratio = row["ratio_of_step"]
        line = [row["way"], str(row["length"]), *(f"{x:.2f}" for x in seconds)]
        line += [f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"]
        line += [f"{x:,.0f}" for x in megabytes]
        body.append([*line, f"{megabytes[1] / megabytes[0]:.2f}"])
    head = "way", "tokens", "s", "s, private", "ratio", "MB", "MB, private", "ratio"
    return markdown(head, body)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Of costs, and of the largest batches."""
    body = []
    for row in rows:
        if sizes := row.get("largest_batch"):
            of = [f"{sizes[kind]:,}" for kind in KINDS]
            ratio = f"{sizes['private'] / sizes['ordinary']:.2f}"
            body.append([row["way"], str(row["length"]), *of, ratio])
    largest = markdown(["way", "tokens", *KINDS, "ratio"], body)
    return {"cost": table([x for x in rows if "seconds" in x]), "largest": largest}


def options(parser: argparse.ArgumentParser) -> None:
    """Of a command that needs no data."""
    parser.set_defaults(data_dir=pathlib.Path())
    told = {"const": None, "help": "measures nothing"}
    parser.add_argument("--table", dest="data_dir", action="store_const", **told)
    parser.add_argument("--rounds", type=int, default=5)


def own_options(parser: argparse.ArgumentParser) -> None:
    options(parser)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--memory", type=float, help="in GiB, of the largest batches")
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)


RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
STUDY = Study(RESULTS, cells, prepare, tables, options=own_options)

if __name__ == "__main__":
    STUDY.main(__doc__)
