"""SmolLM2-135M, privately fine-tuned to write about the tables of E2E.

    python -m benchmarks.language.smollm --data-dir DIR --way lora --epsilon 8
    python -m benchmarks.language.smollm                # prints the tables

The model is public, pretrained, and dequantized from four bits. The protected unit is
one pair of a table and a text; batches are Poisson samples, delta is 1e-5. Rates are
compared by the loss on 1,000 pairs of the development file; each trial is a private
training of its own, and epsilon is that of one.

The protocol of the scores: the 630 tables of the test file, with seven or eight
references each; one text a table, greedy and by a beam of five, of 56 tokens at most;
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
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import records
from benchmarks.language import data, scores
from benchmarks.language.finetune import NOT_PRIVATE
from benchmarks.language.smollm import hidden, texts, tune, weights
from benchmarks.language.smollm.model import Llama, joined, merged, some_blocks
from benchmarks.ogbn_arxiv_gcn.table import markdown

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "e2e.jsonl"
NUM_VALIDATION = 1_000
GROUP_SIZE = 16  # of validation pairs
WIDTHS = {"greedy": 1, "beam": 5}
NUM_SAMPLES = 8
RANK = 8
L2_CLIP_NORM = 1.0
LEARNING_RATES = {"lora": 2e-3, "full": 2e-4}


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: Any, state: Any, tokens: jax.Array, first: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)

    def one(tokens: jax.Array, first: jax.Array) -> jax.Array:
        hidden, _ = model.through(model.embed_tokens(tokens))
        return jnp.sum(texts.text_losses(model, hidden, tokens, first))

    return jax.vmap(one)(tokens, first)


def losses(model: Llama, rows: texts.Texts) -> np.ndarray:
    """The loss of each text, summed over its tokens, shape (num_texts,)."""
    parts, number, found = nnx.split(model), len(rows.first), []
    for at in range(0, number, GROUP_SIZE):
        indices = np.resize(np.arange(number)[at : at + GROUP_SIZE], GROUP_SIZE)
        found.append(_losses(*parts, *rows.take(indices)))
    return np.concatenate(found)[:number]


def tested(
    start: weights.Pretrained, model: Llama, arguments: argparse.Namespace
) -> records.Row:
    """The loss by token of validation pairs, scores, and some of the texts."""
    development = texts.tokenize(
        data.load_e2e(arguments.data_dir, "dev"), start.tokenizer
    )
    _, chosen = data.split_validation(len(development.first), NUM_VALIDATION)
    validation = development.take(chosen)
    numbers = np.sum(validation.tokens != texts.PADDING, axis=1) - validation.first
    numbers = np.clip(numbers, 1, texts.TEXT_LENGTH)
    loss = np.sum(losses(model, validation)) / np.sum(numbers)
    test = data.references(data.load_e2e(arguments.data_dir, "test"))
    tables = list(test)[: arguments.tables]
    references = [test[table] for table in tables]
    found: records.Row = {
        "loss_per_token": round(float(loss), 4),
        "num_tables": len(tables),
    }
    written = {}
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
    setting: tune.Setting, seed: int, arguments: argparse.Namespace
) -> records.Row | None:
    """A training and its test; nothing, where its minutes were over before."""
    path = arguments.weights or weights.fetch()
    start = weights.load(path, RANK if setting.way == "lora" else 0)
    pairs = data.load_e2e(arguments.data_dir, "train")
    rows = texts.tokenize(pairs, start.tokenizer)
    examples: tuple[Any, ...] = tuple(rows)
    model, first = start.model, None
    if setting.last is not None:
        first = merged(some_blocks(model, slice(None, -setting.last)))
        model = some_blocks(model, slice(-setting.last, None))
        kept = hidden.extract(rows.tokens, first, arguments.cache_dir)
        examples = (*rows, kept)
    parts = texts.split(model, setting.way, is_whole=setting.last is None)
    trained, row = tune.fit(
        setting,
        seed,
        parts,
        examples,
        arguments.checkpoints / folder_name(setting, seed),
        dtype=arguments.dtype,
        minutes=arguments.minutes,
    )
    if row is None:
        return None
    tuned = merged(parts.model(trained))
    return row | tested(start, joined(first, tuned) if first else tuned, arguments)


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


def parser() -> argparse.ArgumentParser:
    """Of the command."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.language.smollm",
        description=(__doc__ or "").split("\n")[0],
    )
    add = found.add_argument
    add("--data-dir", type=pathlib.Path, help="of E2E; trains, where given")
    add("--way", choices=LEARNING_RATES, nargs="+", default=("lora",))
    add("--epsilon", type=_epsilon, nargs="+", default=(8.0,), help="3, 8 or none")
    add("--method", choices=tune.METHODS, nargs="+", default=(tune.AUTOMATIC,))
    add("--learning-rate", type=float, nargs="+", help="to compare")
    add("--epochs", type=float, default=2)
    add("--batch-size", type=int, default=1_024, help="expected")
    add("--last", type=int, help="train the last blocks, on hidden states")
    add("--seeds", type=int, default=1, help="how many")
    add("--tables", type=int, help="of the test file, for the scores; all by default")
    add("--minutes", type=float, default=float("inf"), help="then stop; resumes")
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    add("--dtype", choices=("float32", "bfloat16"), default=default)
    add("--weights", type=pathlib.Path, help="the file, if it is not to be fetched")
    add("--output", type=pathlib.Path, default=RESULTS)
    add("--checkpoints", type=pathlib.Path, default=FOLDER / "e2e_checkpoints")
    add("--cache-dir", type=pathlib.Path, default=weights.CACHE)
    return found


def main() -> None:
    arguments = parser().parse_args()
    if arguments.data_dir:
        found = records.Records(arguments.output)
        for seed, setting in settings(arguments):
            identity = {"setting": dataclasses.asdict(setting), "seed": seed}
            if found.find(identity) is None:
                row = train(setting, seed, arguments)
                if row is None:
                    print("Out of time; the same command goes on from here.")
                    return
                found.get(identity, lambda row=row: row)
    print(render(records.read(arguments.output)))


if __name__ == "__main__":
    main()
