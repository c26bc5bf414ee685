"""Tables with their texts in rows of tokens, the loss of a text, and texts by a model.

    name[The Vaults], eatType[pub]      a table, as E2E has it

    name The Vaults, eat type pub
    The Vaults is a pub near Burger King.<|im_end|>

The model is trained on the last line alone. A row has `PADDING` at the end.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

from benchmarks.language import features
from benchmarks.language.smollm import decoding, weights
from benchmarks.language.smollm.decoding import END, PADDING
from benchmarks.language.smollm.model import Llama, joined, merged, some_blocks

# Of 42,061 rows 98.1 % are no longer than 80, and 99.2 % of the texts than 48.
LENGTH, TABLE_LENGTH, TEXT_LENGTH = 80, 48, 48
RANK = 8
GROUP_SIZE = 16  # of texts whose loss is computed together

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


def hidden_states(tokens: np.ndarray, first: Llama, folder: pathlib.Path) -> np.ndarray:
    """After all blocks of the model, shape (num_texts, T, width), kept in a file."""
    through = lambda model, row: model.through(model.embed_tokens(row))[0]
    see = lambda model, row: through(model, row).astype(jnp.float16)
    return features.extract("smollm", see, first, [tokens], folder)


class Begin(NamedTuple):
    """A pretrained model in two pieces."""

    tokenizer: tokenizers.Tokenizer
    first: Llama | None  # the blocks before, if only the last ones are trained
    parts: Parts
    cache_dir: pathlib.Path  # of hidden states

    def examples(self, rows: Texts) -> tuple[Any, ...]:
        """What the loss takes of each text: hidden states too, where blocks are cut."""
        if self.first is None:
            return tuple(rows)
        return *rows, hidden_states(rows.tokens, self.first, self.cache_dir)

    def whole(self, trained: Any) -> Llama:
        """The model with all blocks, and without adapters."""
        tuned = merged(self.parts.model(trained))
        return joined(self.first, tuned) if self.first else tuned

    def losses(self, trained: Any, rows: Texts) -> np.ndarray:
        """The loss of each text, summed over its tokens, shape (num_texts,)."""

        @jax.jit
        def of_all(trained: Any, frozen: Any, examples: Any) -> jax.Array:
            one = lambda text: jnp.sum(self.parts.losses(trained, frozen, *text))
            return jax.lax.map(one, examples, batch_size=GROUP_SIZE)

        return np.asarray(of_all(trained, self.parts.frozen, self.examples(rows)))


def begin(
    pretrained: weights.Pretrained, way: str, last: int | None, cache_dir: pathlib.Path
) -> Begin:
    """A training of adapters, "lora", or of all parameters, "full", of the last blocks.

    The folder is of hidden states after the blocks before them.
    """
    is_lora, first = way == "lora", None
    model = pretrained.model(RANK if is_lora else 0, is_frozen=is_lora)
    if last is not None:
        first = some_blocks(pretrained.model(is_frozen=True), slice(None, -last))
        model = some_blocks(model, slice(-last, None))
    parts = split(model, way, is_whole=last is None)
    return Begin(pretrained.tokenizer, first, parts, cache_dir)


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
