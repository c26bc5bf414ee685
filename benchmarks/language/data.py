"""SST-2, QNLI and E2E NLG, and the tokens of their texts.

    DIR/sst2/{train,dev}.tsv[.gz]     67,349 and 872 sentences of reviews
    DIR/qnli/dev.tsv[.gz]             5,463 pairs of a question and a sentence
    DIR/e2e/e2e-dataset.zip           42,061, 4,672 and 4,693 tables, each with a text

The first two have the columns of GLUE (https://gluebenchmark.com), whose folders
`SST-2` and `QNLI` are found too; the third is as its authors publish it
(https://github.com/tuetschek/e2e-dataset).
"""

import csv
import gzip
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import tokenizers

from benchmarks.language import encoder

FOLDERS = {"sst2": "SST-2", "qnli": "QNLI"}  # ours, and GLUE's
LABELS = {"sst2": ("0", "1"), "qnli": ("entailment", "not_entailment")}
TEXTS = {"sst2": ("sentence",), "qnli": ("question", "sentence")}

E2E = "e2e-dataset"
E2E_FILES = {"train": "trainset.csv", "dev": "devset.csv", "test": "testset_w_refs.csv"}

NUM_VALIDATION = 3_000  # of SST-2's training sentences


class Examples(NamedTuple):
    """Texts with labels, one or two of them for each label."""

    texts: tuple[tuple[str, ...], ...]
    labels: np.ndarray  # shape=(num_examples,), int32


class Tokens(NamedTuple):
    """The arguments that a loss has beside its parameters, all rows of one length."""

    # shape=(num_examples, T), int32, `encoder.PADDING` at the end
    tokens: np.ndarray | jax.Array
    types: np.ndarray | jax.Array  # shape=(num_examples, T), int32, 1 in second texts
    labels: np.ndarray | jax.Array  # shape=(num_examples,) or that of tokens, int32

    def take(self, indices: np.ndarray | slice) -> "Tokens":
        return Tokens(*(x[indices] for x in self))


def _read(path: pathlib.Path) -> bytes | None:
    """The file, or the same gzipped."""
    zipped = path.with_name(path.name + ".gz")
    if path.exists():
        return path.read_bytes()
    return gzip.decompress(zipped.read_bytes()) if zipped.exists() else None


def load(data_dir: pathlib.Path, task: str, split: str) -> Examples:
    """A labeled file of GLUE, in its order: "sst2" or "qnli", "train" or "dev".

    Raises:
      FileNotFoundError: if it is not in the folder.
      ValueError: if a row has another label than the task.
    """
    paths = [data_dir / name / f"{split}.tsv" for name in (task, FOLDERS[task])]
    content = next((found for path in paths if (found := _read(path))), None)
    if content is None:
        raise FileNotFoundError(
            f"Expected {paths[0]}, gzipped or not, got none. GLUE publishes it at"
            " https://gluebenchmark.com/tasks."
        )
    # Quotation marks are characters of the sentences.
    lines = io.StringIO(content.decode(), newline="\n")
    rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    known, column = LABELS[task], "label"
    if unknown := {row[column] for row in rows} - set(known):
        raise ValueError(f"Expected the labels {known} in {split}, got {unknown}.")
    labels = np.array([known.index(row[column]) for row in rows], np.int32)
    return Examples(tuple(tuple(r[name] for name in TEXTS[task]) for r in rows), labels)


def load_e2e(data_dir: pathlib.Path, split: str) -> list[tuple[str, str]]:
    """Tables, written as "name[The Vaults], eatType[pub]", each with a text.

    Those of "dev" and "test" come several times, with a text of another writer each.

    Raises:
      FileNotFoundError: if the archive is not in the folder.
    """
    path = data_dir / "e2e" / f"{E2E}.zip"
    if not path.exists():
        raise FileNotFoundError(
            f"Expected {path}, got none. It is published at"
            " https://github.com/tuetschek/e2e-dataset/releases."
        )
    with zipfile.ZipFile(path) as archive:
        content = archive.read(f"{E2E}/{E2E_FILES[split]}").decode()
    rows = csv.DictReader(io.StringIO(content, newline=""))
    return [(row["mr"], row["ref"]) for row in rows]


def references(rows: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """All texts of each table, in the order of the file."""
    found: dict[str, list[str]] = {}
    for table, text in rows:
        found.setdefault(table, []).append(text)
    return found


def split_validation(
    num_examples: int, num_validation: int = NUM_VALIDATION, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the training examples to fit, and of those to validate on.

    The same for every choice, so that no example is on both sides in the course of
    them. (SST-2 has phrases of its sentences beside them, so what is validated is
    closer to what was fit than the test set is.)
    """
    order = np.random.default_rng(seed).permutation(num_examples)
    validation, fit = np.split(order, [num_validation])
    return np.sort(fit), np.sort(validation)


def tokenizer(path: pathlib.Path | None = None) -> tokenizers.Tokenizer:
    """That of the weights, or of another file; it neither pads nor cuts off."""
    path = path or encoder.PACKAGE.path() / "tokenizer.json"
    found = tokenizers.Tokenizer.from_file(str(path))
    found.no_padding()
    found.no_truncation()
    return found


def tokenize(
    examples: Examples, max_length: int, tokenizer: tokenizers.Tokenizer
) -> Tokens:
    """Tokens of all texts, each cut off at `max_length` and padded up to it.

    A text is cut off for its own length alone, and of a pair the longer one first.
    Were it cut off for the length of others in its batch, one example could change the
    gradients of several, and the bound on sensitivity would not hold.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(max_length)
    tokenizer.encode_special_tokens = True  # as any words: "[PAD]" is no padding
    texts = [x[0] if len(x) == 1 else x for x in examples.texts]
    encoded = tokenizer.encode_batch(texts)
    shape = len(encoded), max_length
    tokens, types = np.full(shape, encoder.PADDING, np.int32), np.zeros(shape, np.int32)
    for i, each in enumerate(encoded):
        tokens[i, : len(each.ids)], types[i, : len(each.ids)] = each.ids, each.type_ids
    return Tokens(tokens, types, examples.labels)


def _name(examples: Examples, max_length: int, tokenizer: tokenizers.Tokenizer) -> str:
    content = [tokenizer.to_str(), max_length, examples.texts, examples.labels.tolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def cached(
    examples: Examples,
    max_length: int,
    cache_dir: pathlib.Path,
    tokenizer: tokenizers.Tokenizer,
) -> Tokens:
    """`tokenize`, kept in a file that is named for all that it follows from."""
    path = cache_dir / f"tokens-{_name(examples, max_length, tokenizer)}.npz"
    if path.exists():
        with np.load(path) as file:
            return Tokens(*(file[name] for name in Tokens._fields))
    found = tokenize(examples, max_length, tokenizer)
    cache_dir.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a call that is cut off leaves no whole file
    with part.open("wb") as file:
        np.savez_compressed(file, **found._asdict())
    part.rename(path)
    return found
