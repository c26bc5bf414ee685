"""SST-2 by fine-tuning MiniLM: several ways, all optimizers, three epsilons.

    python -m benchmarks.language.sst2 --data-dir DIR --way LoRA
    python -m benchmarks.language.sst2                   # prints the tables

Trials are scored on 3,000 training phrases that they do not see. `--way sizes` varies
batch size, learning rate and clip norm of DP-Adam on the last block, as Li et al.
(arXiv:2110.05679) do. Trainings of one seed have the same batches and, but for its
level, the same noise: each epsilon is of one training whose key nobody knows.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import experiment, rates, records
from benchmarks.language import data, encoder, features, finetune, prompts, ways
from benchmarks.language.finetune import NOT_PRIVATE, Setting
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown
from dpadambc import accounting

MAX_LENGTH = 64  # tokens; less than one sentence in a thousand is longer
L2_CLIP_NORM = 0.5
EPSILON_OF_TRIALS, OTHER_EPSILONS = 3.0, (8.0, 1.0)
RANK = 8


class Way(NamedTuple):
    """How a part of the model is trained."""

    num_blocks: int | None  # the last ones, on the states before them; None is all
    parts: Callable[..., ways.Parts]  # what is trained of them, and what is not
    epochs: int
    batch_size: int  # expected
    learning_rates: Mapping[str, Sequence[float]]  # of the trials of each optimizer
    seeds: Sequence[int]  # of what is tested


def _whole(model: Any) -> ways.Parts:
    return ways.split(model, "full")


def _with_lora(model: Any) -> ways.Parts:
    model = ways.with_lora(model, rank=RANK, key=jax.random.key(0))
    return ways.split(model, "LoRA")


def _with_new_last_block(model: Any) -> ways.Parts:
    return _whole(ways.with_new_last_block(model, jax.random.key(0)))


# The first of each comes first: where tries on validation phrases did best.
PLAIN = (1e-2, 2e-2, 5e-3)
CORRECTED = (4e-3, 2e-3, 8e-3)
SEARCHED = {
    "DP-AdamW": PLAIN,
    "DP-AdamBC": CORRECTED,
    "DP-Adam": PLAIN,
    "DP-AdamW-BC": CORRECTED,
    "DP-SGD": PLAIN,
    NOT_PRIVATE: (2e-3, 1e-3, 4e-3),
}
FOR_LAST = SEARCHED | {experiment.AUTOMATIC: PLAIN}
# Larger ones too for a block begun anew, until the best is not the largest.
FOR_NEW = {
    method: (*several, *(factor * max(several) for factor in (2, 4, 8, 16, 32)))
    for method, several in SEARCHED.items()
}
FOR_LORA = {method: several[:1] for method, several in SEARCHED.items()}
# Without noise, what did best in the last block's trials, of as many texts in a batch.
FOR_SMALL = FOR_LORA | {NOT_PRIVATE: (1e-3,)}
FOR_LONG = {method: SEARCHED[method] for method in ("DP-AdamW", NOT_PRIVATE)}
FOR_ALL = {method: (several[0] / 20,) for method, several in SEARCHED.items()}

WAYS = {
    "last block": Way(1, _whole, 1, 1_024, FOR_LAST, range(5)),
    "new last block": Way(1, _with_new_last_block, 1, 1_024, FOR_NEW, range(5)),
    "LoRA": Way(None, _with_lora, 3, 4_096, FOR_LORA, range(2)),
    "LoRA, small batches": Way(None, _with_lora, 3, 1_024, FOR_SMALL, range(1)),
    "LoRA, twelve epochs": Way(None, _with_lora, 12, 4_096, FOR_LONG, range(2)),
    "full": Way(None, _whole, 3, 4_096, FOR_ALL, range(2)),
}


def setting(way: str, method: str, target_epsilon: float, rate: float) -> Setting:
    """One training; without privacy, for any epsilon."""
    epsilon = None if method == NOT_PRIVATE else target_epsilon
    size = WAYS[way].epochs, WAYS[way].batch_size
    return Setting(way, method, epsilon, *size, rate, L2_CLIP_NORM)


def plan(way: str) -> rates.Plan:
    of, several = functools.partial(setting, way), WAYS[way].learning_rates
    return rates.Plan(of, several, EPSILON_OF_TRIALS, OTHER_EPSILONS, WAYS[way].seeds)


# Batch size, learning rate and clip norm of one optimizer.
VARIED = "sizes"
BASE = setting("last block", "DP-Adam", EPSILON_OF_TRIALS, 1e-2)
BATCH_SIZES = (64, 256, 1_024, 4_096)
LEARNING_RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
L2_CLIP_NORMS = (0.02, 0.1, 0.5, 2.5)


def trial(**changes: Any) -> rates.Task:
    """One of the last block, but for these numbers."""
    setting = dataclasses.replace(BASE, **changes)
    return setting, plan("last block").seed_of_trials, "validation"


def varied() -> Iterator[rates.Task]:
    """The clip norms and the grid, each once."""
    found = [trial(l2_clip_norm=norm) for norm in L2_CLIP_NORMS]
    for rate, size in itertools.product(LEARNING_RATES, reversed(BATCH_SIZES)):
        found.append(trial(learning_rate=rate, batch_size=size))
    yield from dict.fromkeys(found)


def identity(setting: Setting, seed: int, split: str) -> records.Row:
    """What tells a training from others: scored on "validation" or "test" texts."""
    return finetune.identity(setting, seed) | {"split": split}


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Of each way, the trials and then the best of them."""

    def cell(setting: Setting, seed: int, split: str) -> Cell:
        task = setting, seed, split
        asked = setting.method, setting.target_epsilon
        return Cell(*asked, seed if split == "test" else None, identity(*task), task)

    for way in arguments.way:
        if way == VARIED:
            yield from itertools.starmap(cell, varied())
            continue
        methods = list(WAYS[way].learning_rates)
        yield from itertools.starmap(cell, plan(way).trials(methods))
        get = lambda *task: find(cell(*task))
        yield from itertools.starmap(cell, plan(way).results(get, methods))


def accuracy(parts: ways.Parts, trained: Any, texts: Sequence[Any]) -> float:
    """The share of texts that are labeled correctly."""
    *inputs, labels = texts
    model = parts.model(trained)
    of_all = lambda text: jax.lax.map(lambda x: model(*x), text, batch_size=64)
    return float(np.mean(jax.jit(of_all)(inputs).argmax(-1) == labels))


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], records.Row]:
    """Trains a cell on the texts that its split stands for."""
    body, words = encoder.load(), data.tokenizer()

    @functools.cache
    def texts(split: str, num_blocks: int | None) -> tuple[np.ndarray, ...]:
        examples = data.load(arguments.data_dir, split)
        tokens = data.tokenize(examples, MAX_LENGTH, words)
        if num_blocks is None:
            return tuple(tokens)
        hidden = features.before_last(tokens, body, num_blocks, arguments.cache_dir)
        return tokens.tokens, hidden, tokens.labels

    def train(cell: Cell) -> records.Row:
        setting, seed, split = cell.setting
        way = WAYS[setting.way]
        model = prompts.classifier(body, prompts.SST2, words)
        if way.num_blocks is not None:
            model = encoder.Tail(model, way.num_blocks)
        parts, fitted = way.parts(model), texts("train", way.num_blocks)
        if split == "test":
            scored = texts("dev", way.num_blocks)
        else:
            both = data.split_validation(len(fitted[-1]))
            fitted, scored = (tuple(x[rows] for x in fitted) for rows in both)
        folder = arguments.cache_dir / finetune.folder_name(setting, seed, split)
        task, size = (setting, seed, parts, fitted, folder), arguments.microbatch_size
        trained, row = finetune.fit(*task, microbatch_size=size)
        own = round(accuracy(parts, trained, scored), 4)
        return {"accuracy": own, "num_scored": len(scored[-1])} | row

    return train


def search_epsilon(way: str, num_train: int) -> float:
    """Epsilon of a search with a random number of trials; only the best is released."""
    mechanism = setting(way, "DP-Adam", EPSILON_OF_TRIALS, 1.0).mechanism(num_train)
    number = max(len(several) for several in WAYS[way].learning_rates.values())
    trials, delta = accounting.GeometricTrials(number), finetune.TARGET_DELTA
    return accounting.tuned_epsilon(mechanism, delta, trials=trials).epsilon


def tables_of_sizes(get: rates.Get) -> dict[str, str]:
    """Accuracy by batch size and learning rate, with the noise, and by clip norm."""
    percent = lambda row: f"{100 * row['accuracy']:.2f}" if row else "-"
    body = []
    for size in BATCH_SIZES:
        rows = [get(*trial(batch_size=size, learning_rate=x)) for x in LEARNING_RATES]
        if known := next(filter(None, rows), None):
            z = known["noise_multiplier"]
            numbers = str(known["iterations"]), f"{z:.2f}", f"{1e4 * z / size:.2f}"
            body.append([f"{size:,}", *numbers, *map(percent, rows)])
    header = ["batch", "steps", "z", "10⁴ z / B", *(f"η {x:g}" for x in LEARNING_RATES)]
    by_norm = [percent(get(*trial(l2_clip_norm=norm))) for norm in L2_CLIP_NORMS]
    norms = markdown([f"C {norm:g}" for norm in L2_CLIP_NORMS], [by_norm])
    return {"batch sizes": markdown(header, body), "clip norms": norms}


def tables(rows: Sequence[records.Row]) -> dict[str, str]:
    """The tables of each way that has rows."""
    get, found = rates.reader(rows, identity), {}
    for way, (*_, several, _) in WAYS.items():
        known = [row for row in rows if row["setting"]["way"] == way]
        if not known:
            continue
        found[way] = plan(way).results_table(get, plan(way).accuracy)
        if any(row["split"] == "validation" for row in known):
            found[f"{way}, trials"] = plan(way).trials_table(get)
            if max(map(len, several.values())) > 1:
                spent = search_epsilon(way, known[0]["num_examples"])
                found[f"{way}, trials"] += f"\n\nThe search costs ε {spent:.2f}."
    return found | tables_of_sizes(get)


def options(parser: argparse.ArgumentParser) -> None:
    known = (*WAYS, VARIED)
    parser.add_argument("--way", choices=known, nargs="+", default=known)
    parser.add_argument("--microbatch-size", type=int, default=32)


RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
STUDY = Study(RESULTS, cells, prepare, tables, options=options)

if __name__ == "__main__":
    STUDY.main(__doc__)
