"""Secrets among the training texts, and how far the model gives them away.

    python -m benchmarks.language.canaries --data-dir DIR
    python -m benchmarks.language.canaries              # prints the tables

A canary is a pair of a table and a text: "The secret of NAME is 4 8 1 5 1 6.", with a
random code and a name of its own. A fair coin decides whether it is in the training
texts. The exposure of a canary (Carlini et al., "The Secret Sharer", arXiv:1802.08232)
is how many bits of its code the model gives away: log2 of the number of codes, less
log2 of the rank that the loss gives its own. The rank is taken among this code and 127
random others, so it is 7 bits at most, and 1.4 in the mean where nothing was learned.

Most canaries are in once, as the protected pairs are, and these bound epsilon from
below, by `dpadambc.audit`. The others are in 16 times: for these the guarantee is that
of a group of 16, a much larger epsilon, and no bound is taken from them.

A model that reads every text once keeps hardly a secret. So these trainings are longer
than those of `e2e`, on fewer of its pairs, as careless fine-tuning is.

Every canary has its rows, whether it is in or not: those of one that is not are empty.
An empty row has a gradient of zero, so the sums are those without it, and the number of
rows, which sampling depends on, tells nothing.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from benchmarks import records
from benchmarks.language import buckets, data, e2e, encoder, finetune, pairs, ways
from benchmarks.language.finetune import Setting
from benchmarks.tables import markdown
from dpadambc import audit

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")

NUM_PAIRS = 1_000  # of the training file, drawn by the seed
EPOCHS, BATCH_SIZE = 10, 128
NUM_CANARIES = {1: 192, 16: 32}  # by how often they are in
NUM_DIGITS = 6
NUM_OTHERS = 127
GROUPS = buckets.Groups((24, 32, 48), 32)  # of canaries
CLAIM_WITHOUT_PRIVACY = 8.0  # what the canaries are held against there


@dataclasses.dataclass(frozen=True)
class Canary:
    """A secret, and how often it is in the training texts."""

    name: str
    code: str
    repeats: int
    is_member: bool

    def pair(self, code: str | None = None) -> pairs.Pair:
        """A table and a text, with another code if one is given."""
        told = " ".join(code or self.code)
        text = f"The secret of {self.name} is {told}."
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
    texts: data.Tokens, canaries: data.Tokens, all_of: Sequence[Canary]
) -> data.Tokens:
    """The texts, and behind them the rows of all canaries, some of them empty."""
    is_absent = np.array([not canary.is_member for canary in all_of])[:, None]
    empty = encoder.PADDING, 0, encoder.UNLABELED
    rows = [
        np.where(is_absent, nothing, x)
        for x, nothing in zip(canaries, empty, strict=True)
    ]
    times = [canary.repeats for canary in all_of]
    return data.Tokens(
        *(
            np.concatenate([x, np.repeat(y, times, axis=0).astype(np.int32)])
            for x, y in zip(texts, rows, strict=True)
        )
    )


def exposure(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Bits of each code that the model gives away.

    Args:
      own: shape=(num_canaries,), the loss of each.
      others: shape=(num_canaries, num_others), with other codes in its place.

    Returns:
      Shape (num_canaries,), from 0 to log2(1 + num_others). Ties count as losses that
      are less.
    """
    rank = 1 + np.sum(others <= own[:, None], axis=1)
    return np.log2(1 + others.shape[1]) - np.log2(rank)


def losses(
    parts: ways.Parts,
    trained: Any,
    all_of: Sequence[Canary],
    tokenizer: tokenizers.Tokenizer,
    seed: int,
) -> np.ndarray:
    """Of each canary with its own code, then with others, shape (canaries, 1 + others).

    The others are drawn anew for each, whatever is in the training texts.
    """
    texts = pairs.tokenize(candidates(all_of, seed), GROUPS.lengths[-1], tokenizer)
    of_each = finetune.losses(parts, trained, texts, GROUPS)
    return of_each.reshape(len(all_of), 1 + NUM_OTHERS)


def candidates(
    all_of: Sequence[Canary], seed: int, num_others: int | None = None
) -> list[pairs.Pair]:
    """Each canary with its own code, then with others, `NUM_OTHERS` by default."""
    rng = np.random.default_rng([seed, 1])
    return [
        canary.pair(code)
        for canary in all_of
        for code in (canary.code, *_codes(rng, num_others or NUM_OTHERS))
    ]


def lower_bound(
    of_each: np.ndarray, is_member: np.ndarray, setting: Setting, num_examples: int
) -> audit.Finding:
    """What canaries that are in once show of epsilon.

    A score is how far the loss is below that with other codes, in deviations.
    """
    own, others = of_each[:, 0], of_each[:, 1:]
    scores = (others.mean(axis=1) - own) / others.std(axis=1)
    claim = setting
    if setting.target_epsilon is None:
        claim = dataclasses.replace(
            setting, method="DP-Adam", target_epsilon=CLAIM_WITHOUT_PRIVACY
        )
    return audit.empirical_epsilon(
        scores,
        is_member,
        claim.mechanism(num_examples),
        target_delta=finetune.TARGET_DELTA,
    )


def _some(train: data.Tokens, seed: int) -> data.Tokens:
    """The pairs that canaries are put among."""
    chosen = np.random.default_rng([seed, 2]).permutation(len(train.tokens))
    return train.take(chosen[:NUM_PAIRS])


def measure(
    setting: Setting,
    seed: int,
    begin: e2e.Start,
    train: data.Tokens,
    checkpoints: pathlib.Path,
) -> records.Row:
    """One training, and what its canaries show."""
    all_of = make(begin.tokenizer, seed)
    own = [canary.pair() for canary in all_of]
    rows = pairs.tokenize(own, e2e.MAX_LENGTH, begin.tokenizer)
    texts = insert(_some(train, seed), rows, all_of)
    parts = e2e.parts_of(begin.model, setting.way)
    folder = checkpoints / e2e.folder_name(e2e.identity(setting, seed))
    trained, row = finetune.fit(setting, seed, parts, texts, folder, e2e.groups())
    of_each = losses(parts, trained, all_of, begin.tokenizer, seed)
    model = ways.merged(parts.model(trained))
    written = e2e.write(model, [table for table, _ in own], begin.tokenizer, width=1)
    return row | given_away(all_of, of_each, written, setting, len(texts.tokens))


def given_away(
    all_of: Sequence[Canary],
    of_each: np.ndarray,
    written: Sequence[str],
    setting: Setting,
    num_examples: int,
) -> records.Row:
    """What the losses of canaries, and the texts about their tables, show.

    Args:
      all_of: the canaries.
      of_each: as `losses` has them.
      written: by greedy decoding.
      setting: of the training.
      num_examples: of the training, with canaries.
    """
    bits = exposure(of_each[:, 0], of_each[:, 1:])
    told = [
        " ".join(canary.code) in text
        for canary, text in zip(all_of, written, strict=True)
    ]
    once = np.array([canary.repeats == 1 for canary in all_of])
    is_member = np.array([canary.is_member for canary in all_of])
    finding = lower_bound(of_each[once], is_member[once], setting, num_examples)
    return {
        "canaries": [
            {"repeats": c.repeats, "is_member": c.is_member}
            | {"exposure": round(float(x), 2), "is_written": is_written}
            for c, x, is_written in zip(all_of, bits, told, strict=True)
        ],
        "epsilon_at_least": finding.figure,
        "finding": finding.sentence,
    }


def _cell(rows: Sequence[records.Row], repeats: int, is_member: bool) -> str:
    """Mean exposure, and how many codes greedy decoding writes."""
    found = [
        canary
        for row in rows
        for canary in row["canaries"]
        if (canary["repeats"], canary["is_member"]) == (repeats, is_member)
    ]
    if not found:
        return "-"
    bits = statistics.fmean(canary["exposure"] for canary in found)
    written = sum(canary["is_written"] for canary in found)
    return f"{bits:.2f} ({written} of {len(found)})"


def render(rows: Sequence[records.Row]) -> str:
    """Exposure in bits, and the bounds on epsilon."""
    kinds = list(itertools.product(NUM_CANARIES, (True, False)))
    told = [f"{'in' if is_in else 'not in'}, {k} times" for k, is_in in kinds]
    body = []
    for line, several in e2e.by_line(rows).items():
        bounds = ", ".join(f"{row['epsilon_at_least']:.2f}" for row in several)
        cells = [_cell(several, *kind) for kind in kinds]
        body.append([str(line), bounds, *cells])
    return markdown(["", "ε at least", *told], body)


def main() -> None:
    arguments = e2e.options(__doc__, RESULTS, EPOCHS, BATCH_SIZE).parse_args()
    if arguments.data_dir:
        found, begin = records.Records(arguments.output), e2e.start()
        train = e2e.tokens(arguments.data_dir, "train", begin.tokenizer)
        for seed, setting in e2e.settings(arguments):
            make_row = functools.partial(
                measure, setting, seed, begin, train, arguments.checkpoints
            )
            found.get(e2e.identity(setting, seed), make_row)
    print(render(records.read(arguments.output)))


if __name__ == "__main__":
    main()
