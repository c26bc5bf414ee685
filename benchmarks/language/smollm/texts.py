"""Tables with their texts in one row of tokens, and what a model writes about a table.

    name[The Vaults], eatType[pub]      a table, as E2E has it

    name The Vaults, eat type pub
    The Vaults is a pub near Burger King.<|im_end|>

The model is trained on the last line alone. A row has `PADDING` at the end.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

from benchmarks.language.smollm import decoding
from benchmarks.language.smollm.decoding import END, PADDING
from benchmarks.language.smollm.model import Llama

# Of 42,061 rows 98.1 % are no longer than 80, and 99.2 % of the texts than 48.
LENGTH, TABLE_LENGTH, TEXT_LENGTH = 80, 48, 48

Pair = tuple[str, str]  # a table and a text


class Texts(NamedTuple):
    """The arguments that the loss has beside its parameters."""

    tokens: np.ndarray  # shape=(num_texts, length), int32
    first: np.ndarray  # shape=(num_texts,), int32, where the text begins

    def take(self, indices: np.ndarray | slice) -> "Texts":
        return Texts(*(x[indices] for x in self))


def in_words(table: str) -> str:
    """A table without brackets, the names of its columns in words."""
    spaced = lambda match: re.sub("([A-Z])", r" \1", match[1]).lower() + " " + match[2]
    return re.sub(r"(\w[^\[\],]*)\[([^\]]*)\]", spaced, table)


def _rows(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    found = np.full((len(rows), length), PADDING, np.int32)
    for row, ids in zip(found, rows, strict=True):
        row[: len(ids)] = ids[:length]
    return found


def _table_ids(tables: Sequence[str], words: tokenizers.Tokenizer) -> list[list[int]]:
    lines = [in_words(table) + "\n" for table in tables]
    return [each.ids for each in words.encode_batch(lines)]


def tokenize(
    rows: Sequence[Pair], tokenizer: tokenizers.Tokenizer, length: int = LENGTH
) -> Texts:
    """Each pair in a row, cut off for its own length alone."""
    tables = _table_ids([table for table, _ in rows], tokenizer)
    texts = tokenizer.encode_batch([text for _, text in rows])
    both = [a + b.ids + [END] for a, b in zip(tables, texts, strict=True)]
    return Texts(_rows(both, length), np.array(list(map(len, tables)), np.int32))


class Parts(NamedTuple):
    """A model as the library's losses take it."""

    graph: nnx.GraphDef
    trained: nnx.State
    frozen: nnx.State
    length: int = TEXT_LENGTH  # of the longest text

    def model(self, trained: Any) -> Llama:
        return nnx.merge(self.graph, trained, self.frozen)

    def losses(
        self, trained: Any, frozen: Any, tokens: jax.Array, first: jax.Array, *x: Any
    ) -> jax.Array:
        """Cross-entropy of the tokens of the text, shape (length,), 0 of padding.

        From tokens, or from hidden states (T, width) if given. Logits are made where
        the text is, and nowhere else.
        """
        model = nnx.merge(self.graph, trained, frozen)
        start = x[0].astype(jnp.float32) if x else model.embed_tokens(tokens)
        hidden, _ = model.through(start)
        places = first + jnp.arange(min(self.length, len(tokens)))
        labels = jnp.take(tokens, places, mode="fill", fill_value=PADDING)
        before = hidden[jnp.clip(places - 1, 0, len(tokens) - 1)]
        logits = model.write(before).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(labels != PADDING, losses, 0.0)

    def loss_fn(self, trained: Any, frozen: Any, *text: jax.Array) -> jax.Array:
        """The mean over the tokens of one text; zero of an empty row."""
        tokens, first, *_ = text
        losses = self.losses(trained, frozen, *text)
        number = jnp.sum(tokens != PADDING) - first
        return jnp.sum(losses) / jnp.clip(number, 1, self.length)


def split(model: Llama, way: str, is_whole: bool = True) -> Parts:
    """What is trained, and what is not: by "lora" the adapters, by "full" all.

    Of a model without its first blocks, its table of tokens is frozen.
    """
    table = nnx.PathContains("embed_tokens")
    of_blocks = nnx.All(nnx.Param, nnx.Not(table))
    trained = {"lora": nnx.LoRAParam, "full": nnx.Param if is_whole else of_blocks}
    graph, of_it, frozen = nnx.split(model, trained[way], ...)
    return Parts(graph, of_it, frozen)


def write(
    model: Llama,
    tables: Sequence[str],
    tokenizer: tokenizers.Tokenizer,
    width: int,
    length: int = TEXT_LENGTH,
) -> list[str]:
    """A text about each table, by beam search of this width."""
    rows = _rows(_table_ids(tables, tokenizer), TABLE_LENGTH)
    written = decoding.beam_search(model, rows, width=width, length=length)
    return [tokenizer.decode(row[row != PADDING].tolist()).strip() for row in written]
