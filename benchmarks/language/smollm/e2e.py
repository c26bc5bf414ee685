"""SmolLM2-135M, privately fine-tuned to write about the tables of E2E.

    python -m benchmarks.language.smollm --data-dir DIR --way lora --epsilon 8
    python -m benchmarks.language.smollm                # prints the table

The protected unit is one pair of a table and a text, and epsilon is that of one
training. Scored are the 630 tables of the test file with all their references, by
`benchmarks.language.scores`: one text a table, greedy and by a beam of five.
"""

import argparse
import dataclasses
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
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
NUM_VALIDATION = 1_000
WIDTHS = {"greedy": 1, "beam": 5}
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


Rows = Callable[[texts.Begin, int], texts.Texts]
Test = Callable[[texts.Begin, Any, Cell], records.Row]


def trainer(
    arguments: argparse.Namespace, rows_of: Rows, test: Test
) -> Callable[[Cell], records.Row]:
    """Trains a cell on the rows of its seed, and tests what was trained."""
    ends = time.monotonic() + 60 * arguments.minutes
    kept = arguments.cache_dir / arguments.output.stem
    paths = arguments.weights or [weights.fetch()]

    def train(cell: Cell) -> records.Row:
        setting, seed = cell.setting
        asked = setting.way, setting.last, arguments.cache_dir
        start = texts.begin(weights.load(*paths), *asked)
        examples = start.examples(rows_of(start, seed))
        trained, row = finetune.fit(
            *(setting, seed, start.parts, examples),
            kept / finetune.folder_name(setting, seed),
            dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
            microbatch_size=arguments.microbatch_size,
            ends=ends,
        )
        return row | test(start, trained, cell)

    return train


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], records.Row]:
    """Trains on all pairs; loss, scores and the texts are of other files."""
    train, development, test = (
        data.load_e2e(arguments.data_dir, split) for split in data.E2E_FILES
    )
    references = data.references(test)

    def tested(start: texts.Begin, trained: Any, cell: Cell) -> records.Row:
        rows = texts.tokenize(development, start.tokenizer)
        _, chosen = data.split_validation(len(rows.first), NUM_VALIDATION)
        validation = rows.take(chosen)
        numbers = np.sum(validation.tokens != texts.PADDING, axis=1) - validation.first
        numbers = np.clip(numbers, 1, texts.TEXT_LENGTH)
        loss = np.sum(start.losses(trained, validation)) / np.sum(numbers)
        model, tables = start.whole(trained), list(references)
        row: records.Row = {"loss_per_token": round(float(loss), 4)}
        row["num_tables"], known = len(tables), list(references.values())
        samples = [{"table": table} for table in tables]
        for name, width in WIDTHS.items():
            written = texts.write(model, tables, start.tokenizer, width)
            bleu, rouge_l = scores.bleu(written, known), scores.rouge_l(written, known)
            row[name] = {"bleu": round(bleu, 2), "rouge_l": round(rouge_l, 2)}
            for sample, text in zip(samples, written, strict=True):
                sample[name] = text
        return row | {"samples": samples}

    rows_of = lambda start, seed: texts.tokenize(train, start.tokenizer)
    return trainer(arguments, rows_of, tested)


def by_setting(rows: Sequence[records.Row]) -> list[list[records.Row]]:
    """All seeds of each."""
    found: dict[str, list[records.Row]] = {}
    for row in rows:
        found.setdefault(json.dumps(row["setting"]), []).append(row)
    return list(found.values())


def table(rows: Sequence[records.Row]) -> str:
    """Loss and scores of each setting, in the mean over its seeds."""
    scored = list(itertools.product(("bleu", "rouge_l"), WIDTHS))
    body = []
    for several in by_setting(rows):
        of = several[0]["setting"]
        epsilon, last = of["target_epsilon"], of["last"]
        way = of["way"] + (f", last {last} blocks" if last else "")
        line = [way, of["method"], "none" if epsilon is None else f"{epsilon:g}"]
        line += [f"{of['epochs']:g}", f"{of['batch_size']:,}"]
        line += [f"{of['learning_rate']:g}", str(len(several))]
        loss = statistics.fmean(row["loss_per_token"] for row in several)
        values = [
            statistics.fmean(x[how][name] for x in several) for name, how in scored
        ]
        body.append([*line, f"{loss:.3f}", *(f"{value:.1f}" for value in values)])
    header = ["way", "method", "ε", "epochs", "batch", "η", "seeds", "loss by token"]
    names = {"bleu": "BLEU", "rouge_l": "ROUGE-L"}
    return markdown([*header, *(f"{names[x]}, {how}" for x, how in scored)], body)


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
        add("--microbatch-size", type=int, help="planned by default")
        add("--weights", type=pathlib.Path, nargs="+", help="a file, or its parts")

    return add_options


TABLES = lambda rows: {"scores": table(rows)}
STUDY = Study(RESULTS, cells, prepare, TABLES, options=options(2, 1_024))
