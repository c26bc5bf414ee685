"""Seconds and memory of a private step of MiniLM against an ordinary one.

    taskset -c 0 python -m benchmarks.language.cost [--rounds 5] [--batch-size 64]
    python -m benchmarks.language.cost --table           # of what is on record

For each way to fine-tune and each length of the texts, four programs are compiled and
called in turns in one process: the clipped gradient, the gradient of the mean, and the
step of each, with noise and DP-AdamBC or with Adam. All rows have the full length, and
made up tokens. Recorded are the median, the quartiles of the ratio within a round, and
the bytes of the temporaries.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpadambc
from benchmarks import environment, experiment
from benchmarks.language import data, encoder, ways
from benchmarks.speed import timing
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".json")
WAYS, LENGTHS, BATCH_SIZE, RANK = ("full", "LoRA", "last block"), (32, 64), 64, 8
KINDS = ("ordinary", "private")
L2_CLIP_NORM, NOISE_STDDEV, LEARNING_RATE = 0.1, 1e-3, 1e-3


def parts_of(way: str) -> ways.Parts:
    """MiniLM with a head of two classes."""
    model = encoder.Classifier(encoder.load(), 2, rngs=nnx.Rngs(0))
    if way == "LoRA":
        model = ways.with_lora(model, rank=RANK, key=jax.random.key(0))
    return ways.split(model, way)


def random_texts(length: int, batch_size: int = BATCH_SIZE) -> data.Tokens:
    rng = np.random.default_rng(0)
    shape = batch_size, length
    tokens = rng.integers(1, encoder.Config().num_tokens, shape).astype(np.int32)
    labels = rng.integers(2, size=batch_size).astype(np.int32)
    return data.Tokens(tokens, np.zeros(shape, np.int32), labels)


def cases_of(way: str, length: int, batch_size: int = BATCH_SIZE) -> timing.Cases:
    """Those of MiniLM, on texts of random tokens."""
    parts = parts_of(way)
    texts = random_texts(length, batch_size)
    return programs(parts.loss_fn, parts.trained, parts.frozen, texts)


def programs(
    loss_fn: Callable[..., jax.Array],
    trained: Any,
    frozen: Any,
    texts: Sequence[Any],
) -> timing.Cases:
    """The ordinary and the private program, of the gradient and of the step."""
    batch_size = len(texts[0])
    clipped = dpadambc.clipped_grad(
        loss_fn,
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=batch_size,
        batch_argnums=tuple(range(2, 2 + len(texts))),
    )

    def ordinary(trained, frozen, *texts):
        own = lambda trained, *text: loss_fn(trained, frozen, *text)
        present = jnp.zeros(batch_size, bool)
        return experiment.mean_grad(own)(trained, *texts, is_padding_example=present)

    optimizers = {
        "ordinary": optax.adam(LEARNING_RATE),
        "private": optax.chain(
            dpadambc.add_dp_noise(NOISE_STDDEV, key=jax.random.key(0)),
            dpadambc.adam_bc(LEARNING_RATE, NOISE_STDDEV),
        ),
    }

    def step_of(grad, optimizer):
        def step(trained, state, frozen, *texts):
            gradient = grad(trained, frozen, *texts)
            updates, state = optimizer.update(gradient, state, trained)
            return optax.apply_updates(trained, updates), state

        return step

    cases: timing.Cases = {}
    for name, grad in (("ordinary", ordinary), ("private", clipped)):
        args = (trained, frozen, *texts)
        cases[f"{name} gradient"] = grad, args
        optimizer = optimizers[name]
        state = optimizer.init(trained)
        args = (trained, state, frozen, *texts)
        cases[f"{name} step"] = step_of(grad, optimizer), args
    return cases


def measure(way: str, length: int, batch_size: int, rounds: int) -> dict[str, Any]:
    row = {"way": way, "length": length, "batch_size": batch_size}
    return row | timed(cases_of(way, length, batch_size), rounds)


def timed(cases: timing.Cases, rounds: int) -> dict[str, Any]:
    """Seconds, bytes, and ratios of these programs."""
    compiled = timing.compile_cases(cases)
    seconds = timing.interleaved_times(cases, compiled, rounds)
    temporaries = {
        name: program.memory_analysis().temp_size_in_bytes
        for name, program in compiled.items()
    }
    peaks = {name: timing.peak_bytes(program) for name, program in compiled.items()}
    row: dict[str, Any] = {
        "seconds": {name: timing.quartiles(each) for name, each in seconds.items()}
    }
    row["temporary_bytes"], row["peak_bytes"] = temporaries, peaks
    for what in ("gradient", "step"):
        ratios = seconds[f"private {what}"] / seconds[f"ordinary {what}"]
        row[f"ratio_of_{what}"] = timing.quartiles(ratios)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each way and length: ordinary, private, and their ratio."""
    body = []
    for row in rows:
        seconds = [row["seconds"][f"{x} step"]["median"] for x in KINDS]
        megabytes = [row["peak_bytes"][f"{x} step"] / 1e6 for x in KINDS]
        ratio = row["ratio_of_step"]
        body.append(
            [
                row["way"],
                str(row["length"]),
                *(f"{x:.2f}" for x in seconds),
                f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})",
                *(f"{x:,.0f}" for x in megabytes),
                f"{megabytes[1] / megabytes[0]:.2f}",
            ]
        )
    head = "way", "tokens", "s", "s, private", "ratio", "MB", "MB, private", "ratio"
    return markdown(list(head), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="measures nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.output.read_text())["rows"]))
        return
    rows = []
    for length in arguments.length:
        for way in arguments.way:
            found = measure(way, length, arguments.batch_size, arguments.rounds)
            rows.append(found)
            print(json.dumps(rows[-1]), flush=True)
            record = {"environment": environment.environment(), "rows": rows}
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
