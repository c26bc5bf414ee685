"""E2E: a text about a restaurant from a table, by MiniLM's weights, privately.

    python -m benchmarks.language.e2e --data-dir DIR --way LoRA
    python -m benchmarks.language.e2e                   # prints the tables

The protected unit is one pair of a table and a text. The training file has 42,061 of
them for 4,862 tables, so a table is in several, and what all its texts have in common
is protected as a group of them is. Batches are Poisson samples, delta is 1e-5.

The vocabulary, the weights, and the lengths that texts are cut off at are public.
Learning rates are compared by the loss on 1,000 pairs of the development file; each
trial is a private training of its own, and epsilon is that of one. The test file has
630 tables, with seven or eight references each, in lower case and without accents, as
MiniLM's tokenizer has all texts. `scores` says how BLEU and ROUGE-L are computed.

MiniLM has not been trained to write, so this is no match for a model that has been:
GPT-2's published numbers are for one. A call makes what is not on record, and goes on
where one was cut off; several calls, of a way each, may write to one record.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers
from flax import nnx

from benchmarks import records
from benchmarks.language import (
    buckets,
    data,
    decoding,
    encoder,
    finetune,
    generator,
    pairs,
    scores,
    vocabulary,
    ways,
)
from benchmarks.language.finetune import NOT_PRIVATE, Setting
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")

ON_CPU = buckets.Groups((48, 56, 64, 72, 80, 96, 128), 32)  # tables and texts
ON_ACCELERATOR = buckets.Groups((64, 80, 128), 128)
MAX_LENGTH = ON_CPU.lengths[-1]
TABLE_LENGTH, TEXT_LENGTH = 48, 80
NUM_VALIDATION = 1_000
WIDTHS = {"greedy": 1, "beam": 4}
NUM_SAMPLES = 8

EPOCHS, BATCH_SIZE = 1, 512
L2_CLIP_NORM = 0.1
RANK = 8
MODEL_KEY = 0  # of what is random in a model before it is trained
EPSILONS = (3.0, 8.0)
METHODS = ("DP-AdamBC", "DP-Adam", NOT_PRIVATE)
LEARNING_RATES = {
    "LoRA": {"DP-AdamBC": 5e-3, "DP-Adam": 5e-3, NOT_PRIVATE: 5e-3},
    "full": {"DP-AdamBC": 5e-4, "DP-Adam": 5e-4, NOT_PRIVATE: 5e-4},
}


def groups() -> buckets.Groups:
    """How pairs are grouped."""
    return buckets.groups_of_backend(ON_CPU, ON_ACCELERATOR)


def parts_of(model: generator.Generator, way: str) -> ways.Parts:
    """What is trained, and what is not."""
    if way == "LoRA":
        key = jax.random.key(MODEL_KEY)
        model = ways.with_lora(model, rank=RANK, key=key, names=ways.ALL_LINEAR)
    return ways.split(model, way)


def setting(
    way: str,
    method: str,
    target_epsilon: float | None,
    rate: float,
    epochs: float,
    batch_size: int,
) -> Setting:
    return Setting(
        way=way,
        method=method,
        target_epsilon=target_epsilon,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=rate,
        l2_clip_norm=L2_CLIP_NORM,
    )


def settings(arguments: argparse.Namespace) -> Iterator[tuple[int, Setting]]:
    """Those that are asked for, with their seeds: without privacy first."""
    size = arguments.epochs, arguments.batch_size
    by_epsilon = [None, *sorted(arguments.epsilon, reverse=True)]
    for seed, epsilon, way, method in itertools.product(
        range(arguments.seeds), by_epsilon, arguments.way, arguments.method
    ):
        if (epsilon is None) == (method == NOT_PRIVATE):
            for rate in arguments.learning_rate or [LEARNING_RATES[way][method]]:
                yield seed, setting(way, method, epsilon, rate, *size)


class Start(NamedTuple):
    """Where every training begins, of which nothing is private."""

    tokenizer: tokenizers.Tokenizer
    model: generator.Generator


def start() -> Start:
    """MiniLM with the tokens of the lowest ids, and a new head."""
    known = data.tokenizer()
    ids = vocabulary.common(known)
    body = vocabulary.reduced_encoder(encoder.load(), ids)
    model = generator.Generator(body, rngs=nnx.Rngs(MODEL_KEY))
    return Start(vocabulary.reduced_tokenizer(known, ids), model)


def write(
    model: generator.Generator,
    tables: Sequence[str],
    tokenizer: tokenizers.Tokenizer,
    width: int,
) -> list[str]:
    """A text about each table, by beam search of this width."""
    read = pairs.tokenize_tables(tables, TABLE_LENGTH, tokenizer)
    *_, end = tokenizer.encode("").ids
    written = decoding.write_all(model, read, width=width, length=TEXT_LENGTH, end=end)
    return [pairs.spell(tokens, tokenizer) for tokens in written]


def loss_per_token(parts: ways.Parts, trained: Any, texts: data.Tokens) -> float:
    """The mean over all tokens of all texts."""
    of_each = finetune.losses(parts, trained, texts, groups())
    return float(np.average(of_each, weights=pairs.num_labels(texts)))


def tested(
    model: generator.Generator,
    test: Mapping[str, Sequence[str]],
    tokenizer: tokenizers.Tokenizer,
) -> records.Row:
    """BLEU and ROUGE-L by each kind of decoding, and some of the texts."""
    spelled = tokenizer.normalizer.normalize_str
    references = [[spelled(text) for text in several] for several in test.values()]
    texts = {
        name: write(model, list(test), tokenizer, width)
        for name, width in WIDTHS.items()
    }
    found: records.Row = {
        name: {
            "bleu": round(scores.bleu(several, references), 2),
            "rouge_l": round(scores.rouge_l(several, references), 2),
        }
        for name, several in texts.items()
    }
    rows = zip(test, *texts.values(), strict=True)
    samples = [dict(zip(("table", *WIDTHS), row, strict=True)) for row in rows]
    return found | {"samples": samples[:: -(-len(samples) // NUM_SAMPLES)]}


def tokens(
    data_dir: pathlib.Path, split: str, tokenizer: tokenizers.Tokenizer
) -> data.Tokens:
    """All pairs of a file."""
    return pairs.tokenize(data.load_e2e(data_dir, split), MAX_LENGTH, tokenizer)


class Laboratory:
    """Trains what is not on record, and tests it."""

    def __init__(self, arguments: argparse.Namespace):
        self._records = records.Records(arguments.output)
        self._checkpoints = arguments.checkpoints
        self._start, folder = start(), arguments.data_dir
        self._train = tokens(folder, "train", self._start.tokenizer)
        dev = tokens(folder, "dev", self._start.tokenizer)
        _, validation = data.split_validation(len(dev.tokens), NUM_VALIDATION)
        self._validation = dev.take(validation)
        self._test = data.references(data.load_e2e(folder, "test"))

    def get(self, setting: Setting, seed: int) -> records.Row:
        """The training, made and written down if it is not there."""
        row = identity(setting, seed)
        return self._records.get(row, lambda: self._make(setting, seed))

    def _make(self, setting: Setting, seed: int) -> records.Row:
        parts = parts_of(self._start.model, setting.way)
        folder = self._checkpoints / folder_name(identity(setting, seed))
        texts = self._train
        trained, row = finetune.fit(setting, seed, parts, texts, folder, groups())
        model = ways.merged(parts.model(trained))
        loss = loss_per_token(parts, trained, self._validation)
        row["loss_per_token"] = round(loss, 4)
        return row | tested(model, self._test, self._start.tokenizer)


def identity(setting: Setting, seed: int) -> records.Row:
    """What tells a training from others."""
    return {"setting": dataclasses.asdict(setting), "seed": seed}


def folder_name(row: records.Row) -> str:
    """Of the state of one training."""
    setting = row["setting"]
    names = "way", "method", "target_epsilon", "epochs", "batch_size", "learning_rate"
    parts = [*(str(setting[name]) for name in names), str(row["seed"])]
    return "_".join(parts).replace(" ", "-")


class Line(NamedTuple):
    """What the seeds of a setting have in common."""

    way: str
    method: str
    target_epsilon: float | None
    epochs: float
    batch_size: int
    learning_rate: float

    def __str__(self) -> str:
        epsilon = "" if self.target_epsilon is None else f", ε {self.target_epsilon:g}"
        epochs = f"{self.epochs:g} epochs of {self.batch_size:,}"
        return f"{self.way}, {self.method}{epsilon}, {epochs}, η {self.learning_rate:g}"


def by_line(rows: Sequence[records.Row]) -> dict[Line, list[records.Row]]:
    """All seeds of each."""
    found: dict[Line, list[records.Row]] = {}
    for row in rows:
        line = Line(*(row["setting"][name] for name in Line._fields))
        found.setdefault(line, []).append(row)
    return found


def best(found: Mapping[Line, Sequence[records.Row]]) -> list[Line]:
    """Of all learning rates the one with the least loss on validation pairs."""
    loss = lambda line: statistics.fmean(row["loss_per_token"] for row in found[line])
    chosen: dict[tuple, Line] = {}
    for line in sorted(found, key=loss, reverse=True):
        chosen[line[:-1]] = line
    return [line for line in found if line in chosen.values()]


def _cells(line: Line, rows: Sequence[records.Row]) -> list[str]:
    mean = lambda of: statistics.fmean(map(of, rows))
    numbers = [
        mean(lambda row, how=how, what=what: row[how][what])
        for what in ("bleu", "rouge_l")
        for how in WIDTHS
    ]
    loss = f"{mean(lambda row: row['loss_per_token']):.3f}"
    return [str(line), str(len(rows)), loss, *(f"{number:.1f}" for number in numbers)]


def _samples(line: Line, row: records.Row) -> str:
    told = [f"    {name}: {text}" for x in row["samples"] for name, text in x.items()]
    return "\n".join([f"{line}:", *told])


def render(rows: Sequence[records.Row]) -> str:
    """The scores, and what is written about some of the tables."""
    found = by_line(rows)
    chosen = best(found)
    scored = [f"{what}, {how}" for what in ("BLEU", "ROUGE-L") for how in WIDTHS]
    header = ["", "seeds", "loss by token", *scored]
    table = markdown(header, [_cells(line, found[line]) for line in chosen])
    return "\n\n".join([table, *(_samples(line, found[line][0]) for line in chosen)])


def options(
    doc: str | None, results: pathlib.Path, epochs: float, batch_size: int
) -> argparse.ArgumentParser:
    """Of a command that trains where it has the data, and then prints its tables."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    parser.add_argument("--output", type=pathlib.Path, default=results)
    parser.add_argument("--way", choices=LEARNING_RATES, nargs="+", default=("LoRA",))
    parser.add_argument(
        "--method", choices=finetune.OPTIMIZERS, nargs="+", default=METHODS
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--learning-rate", type=float, nargs="+", help="to compare")
    parser.add_argument("--epochs", type=float, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument(
        "--checkpoints",
        type=pathlib.Path,
        default=results.with_name(f"{results.stem}_checkpoints"),
        help="where trainings go on from",
    )
    return parser


def main() -> None:
    arguments = options(__doc__, RESULTS, EPOCHS, BATCH_SIZE).parse_args()
    if arguments.data_dir:
        laboratory = Laboratory(arguments)
        for seed, each in settings(arguments):
            laboratory.get(each, seed)
    print(render(records.read(arguments.output)))


if __name__ == "__main__":
    main()
