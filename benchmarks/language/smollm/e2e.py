"""SmolLM2-135M, privately fine-tuned to write about the tables of E2E.

    python -m benchmarks.language.smollm --data-dir DIR --way lora --epsilon 8
    python -m benchmarks.language.smollm                # prints the tables

The model is public, pretrained, and dequantized from four bits. The protected unit is
one pair of a table and a text; batches are Poisson samples, delta is 1e-5. Rates are
compared by the loss on 1,000 pairs of the development file; each trial is a private
training of its own, and epsilon is that of one.

The protocol of the scores: the 630 tables of the test file, with seven or eight
references each; one text a table, greedy and by a beam of five, of 48 tokens at most;
BLEU and ROUGE-L of `benchmarks.language.scores`, without regard to case.

Weights are downloaded once, or read from `--weights`. A call trains what is not on
record, and goes on where one was cut off.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import records
from benchmarks.language import data, scores
from benchmarks.language.finetune import NOT_PRIVATE
from benchmarks.language.smollm import texts, tune, weights
from benchmarks.language.smollm.begin import Begin, begin
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
EPOCHS, BATCH_SIZE = 2, 1_024
NUM_VALIDATION = 1_000
WIDTHS = {"greedy": 1, "beam": 5}
NUM_SAMPLES = 8
L2_CLIP_NORM = 1.0
LEARNING_RATES = {"lora": 2e-2, "full": 2e-4}


def tested(start: Begin, trained: Any, arguments: argparse.Namespace) -> records.Row:
    """The loss by token of validation pairs, scores, and some of the texts."""
    development = texts.tokenize(
        data.load_e2e(arguments.data_dir, "dev"), start.tokenizer
    )
    _, chosen = data.split_validation(len(development.first), NUM_VALIDATION)
    validation = development.take(chosen)
    numbers = np.sum(validation.tokens != texts.PADDING, axis=1) - validation.first
    numbers = np.clip(numbers, 1, texts.TEXT_LENGTH)
    loss = np.sum(start.losses(trained, validation)) / np.sum(numbers)
    test = data.references(data.load_e2e(arguments.data_dir, "test"))
    tables = list(test)[: arguments.tables]
    references = [test[table] for table in tables]
    found: records.Row = {
        "loss_per_token": round(float(loss), 4),
        "num_tables": len(tables),
    }
    model, written = start.whole(trained), {}
    for name, width in WIDTHS.items():
        written[name] = texts.write(model, tables, start.tokenizer, width)
        found[name] = {
            "bleu": round(scores.bleu(written[name], references), 2),
            "rouge_l": round(scores.rouge_l(written[name], references), 2),
        }
    rows = zip(tables, *written.values(), strict=True)
    samples = [dict(zip(("table", *WIDTHS), row, strict=True)) for row in rows]
    return found | {"samples": samples[:: -(-len(samples) // NUM_SAMPLES)]}


def train(
    setting: tune.Setting, seed: int, ends: float, arguments: argparse.Namespace
) -> records.Row | None:
    """A training and its test; nothing, where the time was over before."""
    load = functools.partial(weights.load, *arguments.weights or [weights.fetch()])
    start = begin(load, setting.way, setting.last, arguments.cache_dir)
    rows = texts.tokenize(data.load_e2e(arguments.data_dir, "train"), start.tokenizer)
    trained, row = tune.fit(
        setting,
        seed,
        start.parts,
        start.examples(rows),
        arguments.checkpoints / folder_name(setting, seed),
        dtype=arguments.dtype,
        microbatch_size=arguments.microbatch_size,
        ends=ends,
    )
    return None if row is None else row | tested(start, trained, arguments)


def folder_name(setting: tune.Setting, seed: int) -> str:
    """Of the state of one training."""
    values = *dataclasses.asdict(setting).values(), seed
    return "_".join(map(str, values)).replace(" ", "-").replace(",", "")


def settings(arguments: argparse.Namespace) -> Iterator[tuple[int, tune.Setting]]:
    """Those that are asked for, with their seeds."""
    seeds: Any = range(arguments.seeds)
    asked = seeds, arguments.epsilon, arguments.way, arguments.method
    for seed, epsilon, way, method in itertools.product(*asked):
        for rate in arguments.learning_rate or [LEARNING_RATES[way]]:
            yield (
                seed,
                tune.Setting(
                    way=way,
                    method=NOT_PRIVATE if epsilon is None else method,
                    target_epsilon=epsilon,
                    epochs=arguments.epochs,
                    batch_size=arguments.batch_size,
                    learning_rate=rate,
                    l2_clip_norm=L2_CLIP_NORM,
                    last=arguments.last,
                ),
            )


Line = tuple[Any, ...]  # the setting without its rate


def best(rows: Sequence[records.Row]) -> dict[Line, list[records.Row]]:
    """Of all rates the one with the least loss on validation pairs, all its seeds."""
    by_rate: dict[Line, dict[float, list[records.Row]]] = {}
    for row in rows:
        setting = dict(row["setting"])
        rate = setting.pop("learning_rate")
        line = tuple(setting.items())
        by_rate.setdefault(line, {}).setdefault(rate, []).append(row)
    loss = lambda rows: statistics.fmean(row["loss_per_token"] for row in rows)
    return {line: min(rates.values(), key=loss) for line, rates in by_rate.items()}


def render(rows: Sequence[records.Row]) -> str:
    """The scores, and some of the texts that a model of each kind writes."""
    header = ["way", "method", "ε", "epochs", "batch", "η", "seeds", "loss by token"]
    header += [f"{kind}, {how}" for kind in ("BLEU", "ROUGE-L") for how in WIDTHS]
    body, told = [], []
    for several in best(rows).values():
        row, setting = several[0], several[0]["setting"]
        last, epsilon = setting["last"], setting["target_epsilon"]
        mean = lambda of: statistics.fmean(map(of, several))  # noqa: B023
        way = setting["way"] + (f", last {last} blocks" if last else "")
        numbers = [
            mean(lambda row, how=how, kind=kind: row[how][kind])
            for kind in ("bleu", "rouge_l")
            for how in WIDTHS
        ]
        line = [way, setting["method"], "none" if epsilon is None else f"{epsilon:g}"]
        line += [f"{setting['epochs']:g}", f"{setting['batch_size']:,}"]
        line += [f"{setting['learning_rate']:g}", str(len(several))]
        line += [f"{mean(lambda row: row['loss_per_token']):.3f}"]
        body.append([*line, *(f"{number:.1f}" for number in numbers)])
        told.append(f"{', '.join(line[:3])}:")
        told += [
            f"    {name}: {text}" for x in row["samples"] for name, text in x.items()
        ]
    return "\n".join([markdown(header, body), "", *told])


def _epsilon(word: str) -> float | None:
    return None if word == "none" else float(word)


def options(
    doc: str | None, output: pathlib.Path, epochs: float, batch_size: int
) -> argparse.ArgumentParser:
    """Of a command that trains, with the defaults of its study."""
    found = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    add = found.add_argument
    add("--data-dir", type=pathlib.Path, help="of E2E; trains, where given")
    add("--way", choices=LEARNING_RATES, nargs="+", default=("lora",))
    add("--epsilon", type=_epsilon, nargs="+", default=(8.0,), help="3, 8 or none")
    add("--method", choices=tune.METHODS, nargs="+", default=(tune.AUTOMATIC,))
    add("--learning-rate", type=float, nargs="+", help="to compare")
    add("--epochs", type=float, default=epochs)
    add("--batch-size", type=int, default=batch_size, help="expected")
    add("--last", type=int, help="train the last blocks, on hidden states")
    add("--seeds", type=int, default=1, help="how many")
    add("--tables", type=int, help="of the test file, for the scores; all by default")
    add("--minutes", type=float, default=float("inf"), help="then stop; resumes")
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    add("--dtype", choices=("float32", "bfloat16"), default=default)
    add("--microbatch-size", type=int, help="planned by default")
    word = "the file, or its parts, if it is not to be fetched"
    add("--weights", type=pathlib.Path, nargs="+", help=word)
    add("--output", type=pathlib.Path, default=output)
    kept = output.with_name(f"{output.stem}_checkpoints")
    add("--checkpoints", type=pathlib.Path, default=kept)
    add("--cache-dir", type=pathlib.Path, default=weights.CACHE)
    return found


def run(
    arguments: argparse.Namespace,
    train: Callable[..., records.Row | None],
    render: Callable[[Sequence[records.Row]], str],
) -> None:
    """Trains what is asked for and not on record, until the time is over; the table."""
    ends = time.monotonic() + 60 * arguments.minutes
    if arguments.data_dir:
        found = records.Records(arguments.output)
        for seed, setting in settings(arguments):
            identity = {"setting": dataclasses.asdict(setting), "seed": seed}
            if found.find(identity) is None:
                row = train(setting, seed, ends, arguments)
                if row is None:
                    print("Out of time; the same command goes on from here.")
                    return
                found.get(identity, lambda row=row: row)
    print(render(records.read(arguments.output)))


def main() -> None:
    parser = options(__doc__, RESULTS, EPOCHS, BATCH_SIZE)
    run(parser.parse_args(), train, render)
