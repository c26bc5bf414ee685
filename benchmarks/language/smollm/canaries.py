"""What a model gives away of secrets in the texts that it was fine-tuned on.

    python -m benchmarks.language.smollm.canaries --data-dir DIR --epsilon none 8
    python -m benchmarks.language.smollm.canaries       # prints the table

A canary is a pair of a table and a text: "The secret of NAME is 4 8 1 5 1 6.", with a
random code and a name of its own. A fair coin decides whether it is in the training
texts; the rows of one that is not are empty, with a gradient of zero, so that the
number of rows tells nothing. The exposure of a canary (Carlini et al., "The Secret
Sharer", arXiv:1802.08232) is log2 of the number of codes, less log2 of the rank that
the loss gives its own, here among this code and 31 random others.

Those that are in once, as the protected pairs are, bound epsilon from below, by
`dpadambc.audit`. For those that are in 16 times the guarantee is that of a group. A
model that reads every text once keeps hardly a secret: these trainings are longer, on
fewer pairs, as careless fine-tuning is.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers

from benchmarks import records
from benchmarks.language import data, finetune
from benchmarks.language.smollm import e2e, texts
from benchmarks.study import Cell, Study
from benchmarks.tables import markdown
from dpadambc import audit

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")

NUM_PAIRS = 1_000  # of the training file, drawn by the seed
NUM_CANARIES = {1: 192, 16: 32}  # by how often they are in
NUM_DIGITS, NUM_OTHERS = 6, 31
LENGTH = 40  # of a canary, in tokens
CLAIM_WITHOUT_PRIVACY = 8.0  # what the canaries are held against there


@dataclasses.dataclass(frozen=True)
class Canary:
    """A secret, and how often it is in the training texts."""

    name: str
    code: str
    repeats: int
    is_member: bool

    def pair(self, code: str | None = None) -> texts.Pair:
        """A table and a text, with another code if one is given."""
        text = f"The secret of {self.name} is {' '.join(code or self.code)}."
        return f"name[{self.name}], secret[yes]", text


def _codes(rng: np.random.Generator, number: int) -> list[str]:
    digits = rng.integers(10, size=(number, NUM_DIGITS))
    return ["".join(map(str, row)) for row in digits]


def make(tokenizer: tokenizers.Tokenizer, seed: int) -> list[Canary]:
    """All of them, with names of two words that are a token each."""
    rng = np.random.default_rng([seed, 0])
    repeats = [k for k, number in NUM_CANARIES.items() for _ in range(number)]
    known = sorted(tokenizer.get_vocab())
    words = [x for x in known if len(x) > 3 and set(x) <= set(string.ascii_lowercase)]
    names = rng.choice(words, (len(repeats), 2), replace=False)
    codes = _codes(rng, len(repeats))
    is_member = rng.random(len(repeats)) < 0.5
    return [
        Canary(" ".join(name), code, k, bool(member))
        for name, code, k, member in zip(names, codes, repeats, is_member, strict=True)
    ]


def insert(
    rows: texts.Texts, all_of: Sequence[Canary], tokenizer: tokenizers.Tokenizer
) -> texts.Texts:
    """The texts, and behind them those of canaries, which are empty of no members."""
    repeated = [canary for canary in all_of for _ in range(canary.repeats)]
    own = texts.tokenize([canary.pair() for canary in repeated], tokenizer)
    members = np.array([canary.is_member for canary in repeated])
    tokens = np.where(members[:, None], own.tokens, texts.PADDING)
    both = zip(rows, (tokens, np.where(members, own.first, 0)), strict=True)
    return texts.Texts(*(np.concatenate(pair).astype(np.int32) for pair in both))


def exposure(of_each: np.ndarray) -> np.ndarray:
    """Bits of each code that the model gives away, from 0 to log2(num_codes).

    Of losses, shape (num_canaries, num_codes), that of its own code first. Ties count
    as losses that are less.
    """
    rank = np.sum(of_each <= of_each[:, :1], axis=1)
    return np.log2(of_each.shape[1]) - np.log2(rank)


def lower_bound(
    of_each: np.ndarray,
    is_member: np.ndarray,
    setting: finetune.Setting,
    num_examples: int,
) -> audit.Finding:
    """What canaries that are in once show of epsilon.

    A score is how far the loss is below that with other codes, in deviations.
    """
    own, others = of_each[:, 0], of_each[:, 1:]
    scores = (others.mean(axis=1) - own) / others.std(axis=1)
    if setting.target_epsilon is None:
        claim = {"method": "DP-Adam", "target_epsilon": CLAIM_WITHOUT_PRIVACY}
        setting = dataclasses.replace(setting, **claim)
    mechanism, delta = setting.mechanism(num_examples), finetune.TARGET_DELTA
    return audit.empirical_epsilon(scores, is_member, mechanism, target_delta=delta)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], records.Row]:
    """Trains among some of the pairs, and finds what the canaries show."""
    pairs = data.load_e2e(arguments.data_dir, "train")

    def rows_of(start: texts.Begin, seed: int) -> texts.Texts:
        chosen = np.random.default_rng([seed, 2]).permutation(len(pairs))[:NUM_PAIRS]
        some = texts.tokenize([pairs[i] for i in chosen], start.tokenizer)
        return insert(some, make(start.tokenizer, seed), start.tokenizer)

    def given_away(start: texts.Begin, trained: Any, cell: Cell) -> records.Row:
        setting, seed = cell.setting
        all_of, rng = make(start.tokenizer, seed), np.random.default_rng([seed, 1])
        candidates = [
            canary.pair(code)
            for canary in all_of
            for code in (canary.code, *_codes(rng, NUM_OTHERS))
        ]
        rows = texts.tokenize(candidates, start.tokenizer, LENGTH)
        of_each = start.losses(trained, rows).reshape(len(all_of), -1)
        names = [canary.pair()[0] for canary in all_of]
        written = texts.write(start.whole(trained), names, start.tokenizer, width=1)
        told = zip(all_of, exposure(of_each), written, strict=True)
        repeats = np.array([canary.repeats for canary in all_of])
        is_member = np.array([canary.is_member for canary in all_of])
        num_examples = min(NUM_PAIRS, len(pairs)) + int(repeats.sum())
        once = of_each[repeats == 1], is_member[repeats == 1]
        finding = lower_bound(*once, setting, num_examples)
        return {
            "canaries": [
                {"repeats": canary.repeats, "is_member": canary.is_member}
                | {"exposure": round(float(bits), 2)}
                | {"is_written": " ".join(canary.code) in text}
                for canary, bits, text in told
            ],
            "epsilon_at_least": finding.figure,
            "finding": finding.sentence,
        }

    return e2e.trainer(arguments, rows_of, given_away)


def _cell(canaries: Sequence[records.Row]) -> str:
    """Mean exposure, and how many codes greedy decoding writes."""
    if not canaries:
        return "-"
    bits = statistics.fmean(canary["exposure"] for canary in canaries)
    written = sum(canary["is_written"] for canary in canaries)
    return f"{bits:.2f} ({written} of {len(canaries)})"


def table(rows: Sequence[records.Row]) -> str:
    """Exposure in bits, and the bounds on epsilon."""
    kinds = list(itertools.product(NUM_CANARIES, (True, False)))
    body = []
    for several in e2e.by_setting(rows):
        of, made = (
            several[0]["setting"],
            [x for row in several for x in row["canaries"]],
        )
        epsilon = of["target_epsilon"]
        private = "" if epsilon is None else f", ε {epsilon:g}"
        size = f"{of['epochs']:g} epochs of {of['batch_size']:,}"
        name = (
            f"{of['way']}, {of['method']}{private}, {size}, η {of['learning_rate']:g}"
        )
        bounds = ", ".join(f"{row['epsilon_at_least']:.2f}" for row in several)
        grouped = (
            [x for x in made if (x["repeats"], x["is_member"]) == kind]
            for kind in kinds
        )
        body.append([name, bounds, *map(_cell, grouped)])
    told = [f"{'in' if is_in else 'not in'}, {k} times" for k, is_in in kinds]
    return markdown(["", "ε at least", *told], body)


STUDY = Study(
    RESULTS,
    e2e.cells,
    prepare,
    lambda rows: {"secrets": table(rows)},
    options=e2e.options(10, 128),
)

if __name__ == "__main__":
    STUDY.main(__doc__)
