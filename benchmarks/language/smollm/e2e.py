"""SmolLM2-135M, privately fine-tuned to write about the tables of E2E.

    python -m benchmarks.language.smollm --data-dir DIR --way lora --epsilon 8
    python -m benchmarks.language.smollm                # prints the tables

The protected unit is one pair of a table and a text; each trial is a private training
of its own, and epsilon is that of one. Scored are the 630 tables of the test file with
all their references: one text a table, greedy and by a beam of five, of 48 tokens at
most, by the BLEU and ROUGE-L of `benchmarks.language.scores`, without regard to case.
What MiniLM wrote is on record too: a prefix language model with its weights and a new
head, by a beam of four.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import experiment, records
from benchmarks.language import data, finetune, scores
from benchmarks.language.smollm import texts, weights
from benchmarks.language.smollm.begin import Begin, begin
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
MINILM = RESULTS.parents[1] / "e2e.jsonl"
NUM_VALIDATION = 1_000
WIDTHS = {"greedy": 1, "beam": 5}
NUM_SAMPLES = 8
L2_CLIP_NORM = 1.0
LEARNING_RATES = {"lora": 2e-2, "full": 2e-4}


@dataclasses.dataclass(frozen=True)
class Setting(finetune.Setting):
    """One training, of so many of the last blocks on hidden states of those before."""

    last: int | None = None  # is all of them


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Those that are asked for."""
    methods, seeds = arguments.method or (experiment.AUTOMATIC,), arguments.seed or (0,)
    asked: Any = seeds, arguments.epsilon or (8.0,), arguments.way, methods
    for seed, epsilon, way, method in itertools.product(*asked):
        method = finetune.NOT_PRIVATE if epsilon is None else method
        for rate in arguments.learning_rate or (LEARNING_RATES[way],):
            size = arguments.epochs, arguments.batch_size, rate, L2_CLIP_NORM
            setting = Setting(way, method, epsilon, *size, arguments.last)
            identity = finetune.identity(setting, seed)
            yield Cell(method, epsilon, seed, identity, (setting, seed))


Rows = Callable[[Begin, int], texts.Texts]
Test = Callable[[Begin, Any, Cell], records.Row]


def trainer(
    arguments: argparse.Namespace, rows_of: Rows, test: Test
) -> Callable[[Cell], records.Row]:
    """Trains a cell on the rows of its seed, and tests what was trained."""
    ends, output = time.monotonic() + 60 * arguments.minutes, arguments.output
    kept = arguments.checkpoints or output.with_name(f"{output.stem}_checkpoints")
    load = functools.partial(weights.load, *arguments.weights or [weights.fetch()])

    def train(cell: Cell) -> records.Row:
        setting, seed = cell.setting
        start = begin(load, setting.way, setting.last, arguments.cache_dir)
        examples = start.examples(rows_of(start, seed))
        trained, row = finetune.fit(
            *(setting, seed, start.parts, examples),
            kept / finetune.folder_name(setting, seed),
            dtype=arguments.dtype,
            microbatch_size=arguments.microbatch_size,
            ends=ends,
        )
        return row | test(start, trained, cell)

    return train


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], records.Row]:
    """Trains on all pairs; loss, scores and some of the texts are of other files."""
    train, development, test = (
        data.load_e2e(arguments.data_dir, split) for split in data.E2E_FILES
    )
    references = data.references(test)

    def tested(start: Begin, trained: Any, cell: Cell) -> records.Row:
        rows = texts.tokenize(development, start.tokenizer)
        _, chosen = data.split_validation(len(rows.first), NUM_VALIDATION)
        validation = rows.take(chosen)
        numbers = np.sum(validation.tokens != texts.PADDING, axis=1) - validation.first
        numbers = np.clip(numbers, 1, texts.TEXT_LENGTH)
        loss = np.sum(start.losses(trained, validation)) / np.sum(numbers)
        model, tables = start.whole(trained), list(references)
        written = {
            name: texts.write(model, tables, start.tokenizer, width)
            for name, width in WIDTHS.items()
        }
        names, told = ("table", *WIDTHS), zip(tables, *written.values(), strict=True)
        samples = [dict(zip(names, each, strict=True)) for each in told]
        return {
            "loss_per_token": round(float(loss), 4),
            "num_tables": len(tables),
            **{name: scored(several) for name, several in written.items()},
            "samples": samples[:: -(-len(samples) // NUM_SAMPLES)],
        }

    def scored(several: Sequence[str]) -> dict[str, float]:
        of = {"bleu": scores.bleu, "rouge_l": scores.rouge_l}
        known = list(references.values())
        return {name: round(score(several, known), 2) for name, score in of.items()}

    rows_of = lambda start, seed: texts.tokenize(train, start.tokenizer)
    return trainer(arguments, rows_of, tested)


def line(setting: dict[str, Any]) -> list[str]:
    """What the seeds of a setting have in common."""
    epsilon = setting["target_epsilon"]
    private = "" if epsilon is None else f", ε {epsilon:g}"
    size = f"{setting['epochs']:g} epochs of {setting['batch_size']:,}"
    rate = f"η {setting['learning_rate']:g}"
    return [f"{setting['way']}, {setting['method']}{private}, {size}, {rate}"]


def columns(setting: dict[str, Any]) -> list[str]:
    """The same, one by one."""
    last, epsilon = setting["last"], setting["target_epsilon"]
    way = setting["way"] + (f", last {last} blocks" if last else "")
    found = [way, setting["method"], "none" if epsilon is None else f"{epsilon:g}"]
    found += [f"{setting['epochs']:g}", f"{setting['batch_size']:,}"]
    return [*found, f"{setting['learning_rate']:g}"]


def by_setting(rows: Sequence[records.Row]) -> list[list[records.Row]]:
    """All seeds of each."""
    found: dict[str, list[records.Row]] = {}
    for row in rows:
        found.setdefault(json.dumps(row["setting"]), []).append(row)
    return list(found.values())


def table(
    rows: Sequence[records.Row],
    header: Sequence[str],
    told: Callable[[dict[str, Any]], list[str]],
) -> str:
    """Loss and scores of each setting, in the mean over its seeds."""
    kinds = list(itertools.product(("bleu", "rouge_l"), WIDTHS))
    body = []
    for several in by_setting(rows):
        mean = lambda of: statistics.fmean(map(of, several))  # noqa: B023
        loss = f"{mean(lambda row: row['loss_per_token']):.3f}"
        found = [mean(lambda row, x=x, how=how: row[how][x]) for x, how in kinds]
        first = [*told(several[0]["setting"]), str(len(several)), loss]
        body.append([*first, *(f"{number:.1f}" for number in found)])
    names = {"bleu": "BLEU", "rouge_l": "ROUGE-L"}
    last = [f"{names[x]}, {how}" for x, how in kinds]
    return markdown([*header, "seeds", "loss by token", *last], body)


def samples(rows: Sequence[records.Row]) -> str:
    """Some of the texts that a model of each setting writes."""
    found = []
    for row, *_ in by_setting(rows):
        told = [pair for each in row["samples"] for pair in each.items()]
        found += [
            f"{line(row['setting'])[0]}:",
            *(f"    {how}: {x}" for how, x in told),
        ]
    return "\n".join(found)


def tables(rows: Sequence[records.Row]) -> dict[str, str]:
    """Of both models."""
    of_minilm = records.read(MINILM)
    return {
        "scores": table(rows, ["way", "method", "ε", "epochs", "batch", "η"], columns),
        "MiniLM": table(of_minilm, [""], line),
        "samples": samples([*rows, *of_minilm]),
    }


def options(epochs: float, batch_size: int) -> Callable[..., None]:
    """Those of a command that trains, with the defaults of its study."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--way", choices=LEARNING_RATES, nargs="+", default=("lora",))
        add("--learning-rate", type=float, nargs="+", help="to compare")
        add("--epochs", type=float, default=epochs)
        add("--batch-size", type=int, default=batch_size, help="expected")
        add("--last", type=int, help="train the last blocks, on hidden states")
        add("--minutes", type=float, default=float("inf"), help="then stop; resumes")
        default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        add("--dtype", choices=("float32", "bfloat16"), default=default)
        add("--microbatch-size", type=int, help="planned by default")
        add("--weights", type=pathlib.Path, nargs="+", help="a file, or its parts")
        add("--checkpoints", type=pathlib.Path, help="beside the output by default")

    return add_options


STUDY = Study(RESULTS, cells, prepare, tables, options=options(2, 1_024))
