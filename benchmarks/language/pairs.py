"""Tables with their texts as tokens, for a model that writes one about the other.

name[The Vaults], eatType[pub]      a table, as E2E has it
name The Vaults, eat type pub       what the model reads
the vaults is a pub near burger king.      what it writes, in lower case
"""

import re
from collections.abc import Sequence

import numpy as np
import tokenizers

from benchmarks.language import data, encoder, generator

Pair = tuple[str, str]  # a table and a text


def in_words(table: str) -> str:
    """A table without brackets, the names of its columns in words."""
    spaced = lambda match: re.sub("([A-Z])", r" \1", match[1]).lower() + " " + match[2]
    return re.sub(r"(\w[^\[\],]*)\[([^\]]*)\]", spaced, table)


def tokenize(
    pairs: Sequence[Pair], max_length: int, tokenizer: tokenizers.Tokenizer
) -> data.Tokens:
    """Pairs in a row each, with the tokens that are to be predicted as labels."""
    texts = tuple((in_words(table), text) for table, text in pairs)
    examples = data.Examples(texts, np.zeros(len(texts), np.int32))
    tokens, types, _ = map(np.asarray, data.tokenize(examples, max_length, tokenizer))
    return data.Tokens(tokens, types, generator.labels(tokens, types))


def num_labels(texts: data.Tokens) -> np.ndarray:
    """How many tokens of each text are predicted, shape (num_texts,)."""
    return np.sum(np.asarray(texts.labels) != encoder.UNLABELED, axis=1)


def tokenize_tables(
    tables: Sequence[str], max_length: int, tokenizer: tokenizers.Tokenizer
) -> np.ndarray:
    """What is before the text in a row, shape (num_tables, max_length), int32."""
    texts = tuple((in_words(table),) for table in tables)
    examples = data.Examples(texts, np.zeros(len(texts), np.int32))
    return np.asarray(data.tokenize(examples, max_length, tokenizer).tokens)


def spell(tokens: np.ndarray, tokenizer: tokenizers.Tokenizer) -> str:
    """A text, up to its end, without spaces around the marks that join words.

    Of E2E's development texts, 99.2 % have the words and marks of sacrebleu afterwards
    that they had before, in lower case and without accents.
    """
    kept = tokens[tokens != encoder.PADDING].tolist()
    return re.sub(r"(?<=\w) ([-'/]) (?=\w)", r"\1", tokenizer.decode(kept))
