"""What SmolLM2-135M gives away of secrets in the texts that it was fine-tuned on.

    python -m benchmarks.language.smollm.canaries --data-dir DIR --epsilon none 8
    python -m benchmarks.language.smollm.canaries       # prints the table

The canaries, their exposure and the bounds are those of `benchmarks.language.canaries`,
but a code is one of 32, so an exposure is 5 bits at most.
"""

import argparse
import functools
import pathlib

import numpy as np

from benchmarks import records
from benchmarks.language import canaries, data
from benchmarks.language.smollm import e2e, texts, tune, weights
from benchmarks.language.smollm.begin import begin

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
LENGTH = 40  # of a canary
NUM_OTHERS = 31  # codes


def insert(
    rows: texts.Texts, of_canaries: texts.Texts, members: np.ndarray
) -> texts.Texts:
    """The texts, and behind them those of canaries, which are empty of no members."""
    tokens = np.where(members[:, None], of_canaries.tokens, texts.PADDING)
    first = np.where(members, of_canaries.first, 0)
    both = zip(rows, (tokens, first), strict=True)
    return texts.Texts(*(np.concatenate(pair).astype(np.int32) for pair in both))


def measure(
    setting: tune.Setting, seed: int, ends: float, arguments: argparse.Namespace
) -> records.Row | None:
    """A training, and what its canaries show; nothing, if the time is over before."""
    load = functools.partial(weights.load, *arguments.weights or [weights.fetch()])
    start = begin(load, setting.way, setting.last, arguments.cache_dir)
    all_of = canaries.make(start.tokenizer, seed)
    chosen = np.random.default_rng([seed, 2])
    pairs = data.load_e2e(arguments.data_dir, "train")
    some = [pairs[i] for i in chosen.permutation(len(pairs))[: canaries.NUM_PAIRS]]
    repeated = [canary for canary in all_of for _ in range(canary.repeats)]
    rows = insert(
        texts.tokenize(some, start.tokenizer),
        texts.tokenize([canary.pair() for canary in repeated], start.tokenizer),
        np.array([canary.is_member for canary in repeated]),
    )
    trained, row = tune.fit(
        setting,
        seed,
        start.parts,
        start.examples(rows),
        arguments.checkpoints / e2e.folder_name(setting, seed),
        dtype=arguments.dtype,
        microbatch_size=arguments.microbatch_size,
        ends=ends,
    )
    if row is None:
        return None
    asked = canaries.candidates(all_of, seed, NUM_OTHERS)
    candidates = texts.tokenize(asked, start.tokenizer, LENGTH)
    of_each = start.losses(trained, candidates).reshape(len(all_of), -1)
    tables = [canary.pair()[0] for canary in all_of]
    written = texts.write(start.whole(trained), tables, start.tokenizer, width=1)
    num_examples = len(rows.first)
    return row | canaries.given_away(all_of, of_each, written, setting, num_examples)


def main() -> None:
    parser = e2e.options(__doc__, RESULTS, canaries.EPOCHS, canaries.BATCH_SIZE)
    e2e.run(parser.parse_args(), measure, canaries.render)


if __name__ == "__main__":
    main()
