"""SST-2 by fine-tuning MiniLM: four ways, all optimizers, three epsilons.

    python -m benchmarks.language.sst2 --data-dir DIR --cache-dir DIR --way LoRA
    python -m benchmarks.language.sst2                   # prints the tables

The search of the last block, `benchmarks.rates`, has as many trials for each optimizer
at epsilon 3, scored on 3,000 training phrases that they do not see, and so has that of
a new last block, with one more rate for each. The best is trained on all phrases, at
every epsilon, and tested on GLUE's development set. A training of the whole model takes
most of an hour, so LoRA and full fine-tuning are not searched: the learning rates of
LoRA are the first ones of the search, which did best in short tries on these phrases,
and those of full fine-tuning a twentieth. LoRA by batches of a quarter is a way of its
own, and so is LoRA for four times as many epochs, which is searched, for accelerators.

Trainings of one seed have the same batches and, but for its level, the same noise, so
that optimizers differ by themselves alone: each epsilon is of one training whose key
nobody knows, not of all that are printed. All learning rates are in Adam's unit. A call
makes what is not on record, and goes on where one was cut off; several calls, of a way
each, may write to one record.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import rates, records
from benchmarks.language import data, encoder, features, finetune, prompts, ways
from benchmarks.language.finetune import NOT_PRIVATE, Setting
from dpadambc import accounting

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")

MAX_LENGTH = 64  # tokens; less than one sentence in a thousand is longer
L2_CLIP_NORM = 0.5
EPSILON_OF_TRIALS, OTHER_EPSILONS = 3.0, (8.0, 1.0)
RANK = 8
MODEL_KEY = 0  # of what is random in a model before it is trained


class Way(NamedTuple):
    """How a part of the model is trained.

    Attributes:
      num_blocks: how many of the last blocks it trains; the states before them are
        computed once. None trains the whole model, with its embeddings.
      parts: of a model with these blocks, what is trained and what is not.
      epochs: of training.
      batch_size: expected.
      learning_rates: of the trials of each optimizer.
      seeds: of what is tested.
    """

    num_blocks: int | None
    parts: Callable[..., ways.Parts]
    epochs: int
    batch_size: int
    learning_rates: Mapping[str, Sequence[float]]
    seeds: Sequence[int]


def _whole(model: ways.Model) -> ways.Parts:
    return ways.split(model, "full")


def _with_lora(model: encoder.Classifier) -> ways.Parts:
    adapted = ways.with_lora(
        model, rank=RANK, key=jax.random.key(MODEL_KEY), names=ways.ALL_LINEAR
    )
    return ways.split(adapted, "LoRA")


def _with_new_last_block(model: encoder.Tail) -> ways.Parts:
    new = ways.with_new_last_block(model, jax.random.key(MODEL_KEY))
    return ways.split(new, "full")


# The first of each comes first: where tries on validation phrases did best.
PLAIN = (1e-2, 2e-2, 5e-3)
CORRECTED = (4e-3, 2e-3, 8e-3)
WITHOUT_NOISE = (2e-3, 1e-3, 4e-3)
SEARCHED = {
    "DP-AdamW": PLAIN,
    "DP-AdamBC": CORRECTED,
    "DP-Adam": PLAIN,
    "DP-AdamW-BC": CORRECTED,
    "DP-SGD": PLAIN,
    NOT_PRIVATE: WITHOUT_NOISE,
}
# One more for a block begun anew, whose trials are best at the largest.
FOR_NEW = {method: (*rates, 2 * max(rates)) for method, rates in SEARCHED.items()}
FOR_LORA = {method: rates[:1] for method, rates in SEARCHED.items()}
# Without noise, what did best in the last block's trials, of as many texts in a batch.
FOR_SMALL = FOR_LORA | {NOT_PRIVATE: (1e-3,)}
FOR_LONG = {method: SEARCHED[method] for method in ("DP-AdamW", NOT_PRIVATE)}
FOR_ALL = {method: (rates[0] / 20,) for method, rates in SEARCHED.items()}

WAYS = {
    "last block": Way(1, _whole, 1, 1_024, SEARCHED, range(5)),
    "new last block": Way(1, _with_new_last_block, 1, 1_024, FOR_NEW, range(5)),
    "LoRA": Way(None, _with_lora, 3, 4_096, FOR_LORA, range(2)),
    "LoRA, small batches": Way(None, _with_lora, 3, 1_024, FOR_SMALL, range(1)),
    "LoRA, twelve epochs": Way(None, _with_lora, 12, 4_096, FOR_LONG, range(2)),
    "full": Way(None, _whole, 3, 4_096, FOR_ALL, range(2)),
}


def setting(way: str, method: str, target_epsilon: float, rate: float) -> Setting:
    """One training; without privacy, for any epsilon."""
    how = WAYS[way]
    return Setting(
        way=way,
        method=method,
        target_epsilon=None if method == NOT_PRIVATE else target_epsilon,
        epochs=how.epochs,
        batch_size=how.batch_size,
        learning_rate=rate,
        l2_clip_norm=L2_CLIP_NORM,
    )


def plan(way: str) -> rates.Plan:
    return rates.Plan(
        functools.partial(setting, way),
        WAYS[way].learning_rates,
        EPSILON_OF_TRIALS,
        OTHER_EPSILONS,
        WAYS[way].seeds,
    )


class Laboratory:
    """Trains what is not on record, on the texts that a split stands for."""

    def __init__(self, way: str, arguments: argparse.Namespace):
        self._records = records.Records(arguments.output)
        self._checkpoints = arguments.checkpoints
        body, num_blocks = encoder.load(), WAYS[way].num_blocks
        model = prompts.classifier(body, prompts.SST2)
        if num_blocks is not None:
            model = ways.tail(model, num_blocks)
        self._parts = WAYS[way].parts(model)
        self._train, self._dev = (
            _texts(arguments, split, body, num_blocks) for split in ("train", "dev")
        )

    def _of_split(
        self, split: str
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """What is trained on and what is scored, which may be gigabytes."""
        if split == "test":
            return self._train, self._dev
        fit, validation = data.split_validation(len(self._train[-1]))
        take = lambda rows: tuple(x[rows] for x in self._train)
        return take(fit), take(validation)

    def get(self, setting: Setting, seed: int, split: str) -> records.Row:
        """The training, made and written down if it is not there."""
        row = identity(setting, seed, split)
        folder = self._checkpoints / folder_name(row)

        def make():
            texts, scored = self._of_split(split)
            return finetune.train(setting, seed, self._parts, texts, scored, folder)

        return self._records.get(row, make)


def _texts(
    arguments: argparse.Namespace,
    split: str,
    body: encoder.Encoder,
    num_blocks: int | None,
) -> tuple[np.ndarray, ...]:
    """What the model takes of the texts of a file, and their labels."""
    examples = data.load(arguments.data_dir, "sst2", split)
    tokens = data.cached(examples, MAX_LENGTH, arguments.cache_dir, data.tokenizer())
    if num_blocks is None:
        return tuple(map(np.asarray, tokens))
    seen = features.extract(tokens, arguments.cache_dir, body, num_blocks)
    return np.asarray(tokens.tokens), seen.hidden, np.asarray(tokens.labels)


def identity(setting: Setting, seed: int, split: str) -> records.Row:
    """What tells a training from others: scored on "validation" or "test" texts."""
    return {"setting": dataclasses.asdict(setting), "seed": seed, "split": split}


def folder_name(row: records.Row) -> str:
    """Of the state of one training."""
    setting = row["setting"]
    names = "way", "method", "target_epsilon", "learning_rate", "batch_size"
    numbers = [setting[name] for name in (*names, "l2_clip_norm")]
    parts = [*map(str, (*numbers, row["seed"])), row["split"]]
    return "_".join(parts).replace(" ", "-")


def search_epsilon(way: str, num_train: int) -> float:
    """Of a search of as many trials, their number random and only the best told."""
    number = max(len(several) for several in WAYS[way].learning_rates.values())
    of_one = setting(way, "DP-Adam", EPSILON_OF_TRIALS, 1.0).mechanism(num_train)
    tuned = accounting.tuned_epsilon(
        of_one, finetune.TARGET_DELTA, trials=accounting.Geometric(number)
    )
    return tuned.epsilon


def render(rows: Sequence[records.Row]) -> str:
    """The tables of each way that there is something of."""
    get, parts = rates.reader(rows, identity), []
    for way in WAYS:
        known = [row for row in rows if row["setting"]["way"] == way]
        if not known:
            continue
        of_way = plan(way)
        parts += [
            f"{way}, test accuracy in percent:",
            of_way.results_table(get, of_way.accuracy),
        ]
        if not any(row["split"] == "validation" for row in known):
            continue
        if max(map(len, of_way.learning_rates.values())) == 1:
            parts += ["On validation phrases:", of_way.trials_table(get)]
            continue
        searched = search_epsilon(way, known[0]["num_examples"])
        parts += [
            "The trials, on validation phrases. With keys of their own, were their"
            " number random (geometric) and only the best told, by a score on texts"
            f" that need no protection, a search costs ε {searched:.2f}; the training"
            " on all phrases comes on top:",
            of_way.trials_table(get),
        ]
    return "\n\n".join(parts)


def options(doc: str | None) -> argparse.ArgumentParser:
    """Of a command that trains where it has the data, and then prints its tables."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    parser.add_argument("--cache-dir", type=pathlib.Path, help="of the features")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument(
        "--checkpoints",
        type=pathlib.Path,
        default=pathlib.Path("sst2_checkpoints"),
        help="where trainings go on from",
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.data_dir and not arguments.cache_dir:
        parser.error("Expected --cache-dir beside --data-dir, for the features.")
    return arguments


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=tuple(WAYS))
    parser.add_argument(
        "--method", choices=SEARCHED, nargs="+", default=tuple(SEARCHED)
    )
    arguments = parse(parser)
    if arguments.data_dir:
        for way in arguments.way:
            laboratory = Laboratory(way, arguments)
            known = WAYS[way].learning_rates
            methods = [method for method in arguments.method if method in known]
            plan(way).run(laboratory.get, methods)
    print(render(records.read(arguments.output)))


if __name__ == "__main__":
    main()
