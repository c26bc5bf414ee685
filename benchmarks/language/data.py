"""SST-2 and E2E NLG, and the tokens of their texts.

    DIR/sst2/{train,dev}.tsv[.gz]     67,349 and 872 sentences of reviews
    DIR/e2e/e2e-dataset.zip           42,061, 4,672 and 4,693 tables, each with a text

The first is that of GLUE (https://gluebenchmark.com), whose folder `SST-2` is found
too; the second is as its authors publish it
(https://github.com/tuetschek/e2e-dataset).
"""

import csv
import gzip
import io
import pathlib
import zipfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from benchmarks.language import encoder

E2E_FILES = {"train": "trainset.csv", "dev": "devset.csv", "test": "testset_w_refs.csv"}
NUM_VALIDATION = 3_000  # of SST-2's training sentences


class Examples(NamedTuple):
    """Texts with labels, one or two of them for each label."""

    texts: tuple[tuple[str, ...], ...]
    labels: np.ndarray  # shape=(num_examples,), int32


class Tokens(NamedTuple):
    """The arguments that a loss has beside its parameters, all rows of one length."""

    tokens: np.ndarray  # shape=(num_examples, T), int32, `encoder.PADDING` at the end
    types: np.ndarray  # shape=(num_examples, T), int32, 1 in second texts
    labels: np.ndarray  # shape=(num_examples,), int32


def load(data_dir: pathlib.Path, split: str) -> Examples:
    """SST-2's labeled sentences, "train" or "dev", in the order of the file.

    Raises:
      FileNotFoundError: if it is not in the folder.
      ValueError: if a row has another label.
    """
    name, folders = f"{split}.tsv", (data_dir / "sst2", data_dir / "SST-2")
    found = [path for folder in folders for path in sorted(folder.glob(f"{name}*"))]
    if not found:
        raise FileNotFoundError(
            f"Expected {folders[0] / name}, gzipped or not, got none. GLUE publishes it"
            " at https://gluebenchmark.com/tasks."
        )
    path = found[0]
    open_it = gzip.open if path.suffix == ".gz" else open
    # Quotation marks are characters of the sentences.
    with open_it(path, "rt", encoding="utf-8", newline="\n") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if unknown := {row["label"] for row in rows} - {"0", "1"}:
        raise ValueError(f"Expected the labels 0 and 1 in {split}, got {unknown}.")
    labels = np.array([row["label"] for row in rows]).astype(np.int32)
    return Examples(tuple((row["sentence"],) for row in rows), labels)


def load_e2e(data_dir: pathlib.Path, split: str) -> list[tuple[str, str]]:
    """Tables, written as "name[The Vaults], eatType[pub]", each with a text.

    Those of "dev" and "test" come several times, with a text of another writer each.

    Raises:
      FileNotFoundError: if the archive is not in the folder.
    """
    path = data_dir / "e2e/e2e-dataset.zip"
    if not path.exists():
        raise FileNotFoundError(
            f"Expected {path}, got none. It is published at"
            " https://github.com/tuetschek/e2e-dataset/releases."
        )
    with zipfile.ZipFile(path) as archive:
        content = archive.read(f"e2e-dataset/{E2E_FILES[split]}").decode()
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
    them.
    """
    order = np.random.default_rng(seed).permutation(num_examples)
    validation, fit = np.split(order, [num_validation])
    return np.sort(fit), np.sort(validation)


def tokenizer() -> tokenizers.Tokenizer:
    """That of MiniLM."""
    path = encoder.PACKAGE.path() / "tokenizer.json"
    return tokenizers.Tokenizer.from_file(str(path))


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
    tokenizer.enable_padding(length=max_length, pad_id=encoder.PADDING)
    tokenizer.encode_special_tokens = True  # as any words: "[PAD]" is no padding
    encoded = tokenizer.encode_batch(
        [x[0] if len(x) == 1 else x for x in examples.texts]
    )
    tokens = np.array([text.ids for text in encoded], np.int32)
    types = np.array([text.type_ids for text in encoded], np.int32)
    return Tokens(tokens, types, examples.labels)
