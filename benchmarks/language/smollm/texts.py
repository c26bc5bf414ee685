"""Tables with their texts in one row of tokens, and what a model writes about a table.

    name The Vaults, eat type pub
    The Vaults is a pub near Burger King.<|im_end|>

The model is trained on the second line alone. A row has `PADDING` at the end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

from benchmarks.language import decoding, pairs
from benchmarks.language.smollm.model import KeysAndValues, Llama

PADDING = 0  # <|endoftext|>
END = 2  # <|im_end|>

# Of 42,061 rows 98.1 % are no longer than 80, and 99.2 % of the texts than 48.
LENGTH, TABLE_LENGTH, TEXT_LENGTH = 80, 48, 48


class Texts(NamedTuple):
    """The arguments that the loss has beside its parameters."""

    tokens: np.ndarray  # shape=(num_texts, length), int32
    first: np.ndarray  # shape=(num_texts,), int32, where the text begins

    def take(self, indices: np.ndarray | slice) -> "Texts":
        return Texts(*(x[indices] for x in self))


def _rows(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    found = np.full((len(rows), length), PADDING, np.int32)
    for row, ids in zip(found, rows, strict=True):
        row[: len(ids)] = ids[:length]
    return found


def _table_ids(
    tables: Sequence[str], tokenizer: tokenizers.Tokenizer
) -> list[list[int]]:
    lines = [pairs.in_words(table) + "\n" for table in tables]
    return [each.ids for each in tokenizer.encode_batch(lines)]


def tokenize(
    rows: Sequence[pairs.Pair], tokenizer: tokenizers.Tokenizer, length: int = LENGTH
) -> Texts:
    """Each pair in a row, cut off for its own length alone."""
    tables = _table_ids([table for table, _ in rows], tokenizer)
    texts = tokenizer.encode_batch([text for _, text in rows])
    both = [a + b.ids + [END] for a, b in zip(tables, texts, strict=True)]
    return Texts(_rows(both, length), np.array(list(map(len, tables)), np.int32))


def tokenize_tables(
    tables: Sequence[str], tokenizer: tokenizers.Tokenizer
) -> np.ndarray:
    """Shape (num_tables, TABLE_LENGTH)."""
    return _rows(_table_ids(tables, tokenizer), TABLE_LENGTH)


def text_losses(
    model: Llama,
    hidden: jax.Array,
    tokens: jax.Array,
    first: jax.Array,
    length: int = TEXT_LENGTH,
) -> jax.Array:
    """Cross-entropy of the tokens of the text, shape (length,), 0 of padding.

    Logits are made where the text is, and nowhere else.
    """
    places = first + jnp.arange(min(length, len(tokens)))
    labels = jnp.take(tokens, places, mode="fill", fill_value=PADDING)
    before = hidden[jnp.clip(places - 1, 0, len(tokens) - 1)]
    logits = model.write(before).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where(labels != PADDING, losses, 0.0)


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
        """`text_losses` from tokens, or from hidden states (T, width) if given."""
        model = nnx.merge(self.graph, trained, frozen)
        start = x[0].astype(jnp.float32) if x else model.embed_tokens(tokens)
        hidden, _ = model.through(start)
        return text_losses(model, hidden, tokens, first, self.length)

    def loss_fn(self, trained: Any, frozen: Any, *text: jax.Array) -> jax.Array:
        """The mean over the tokens of one text; zero of an empty row."""
        tokens, first, *_ = text
        losses = self.losses(trained, frozen, *text)
        number = jnp.sum(tokens != PADDING) - first
        return jnp.sum(losses) / jnp.clip(number, 1, self.length)


def split(model: Llama, way: str, is_whole: bool = True) -> Parts:
    """What is trained, and what is not.

    Args:
      model: with adapters, if the way is "lora".
      way: "lora", or "full": of the last blocks of a model all but its table of tokens.
      is_whole: whether the model has all blocks.
    """
    table = nnx.PathContains("embed_tokens")
    of_blocks = nnx.All(nnx.Param, nnx.Not(table))
    trained = {"lora": nnx.LoRAParam, "full": nnx.Param if is_whole else of_blocks}
    graph, of_it, frozen = nnx.split(model, trained[way], ...)
    return Parts(graph, of_it, frozen)


class Table(NamedTuple):
    """What all texts about a table have in common."""

    kept: KeysAndValues  # shape=(num_blocks, P, num_kv_heads, head_width) each
    length: jax.Array  # shape=(), of the table
    logits: jax.Array  # shape=(num_tokens,), of the first token of a text


def _read(model: Llama, tokens: jax.Array) -> Table:
    hidden, kept = model.through(model.embed_tokens(tokens))
    length = jnp.sum(tokens != PADDING)
    return Table(kept, length, model.write(hidden[length - 1][None])[0])


def _room(table: Table, length: int) -> KeysAndValues:
    longer = lambda x: jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, 0)])
    return jax.tree.map(longer, table.kept)


def _go_on(
    model: Llama,
    table: Table,
    kept: KeysAndValues,
    place: jax.Array,
    token: jax.Array,
) -> tuple[KeysAndValues, jax.Array]:
    return model.go_on(token, kept, table.length + place)


WRITER = decoding.Writer(_read, _room, _go_on)


def write(
    model: Llama,
    tables: Sequence[str],
    tokenizer: tokenizers.Tokenizer,
    width: int,
    length: int = TEXT_LENGTH,
) -> list[str]:
    """A text about each table, by beam search of this width."""
    written = decoding.write_all(
        model,
        tokenize_tables(tables, tokenizer),
        width=width,
        length=length,
        end=END,
        writer=WRITER,
    )
    return [tokenizer.decode(row[row != PADDING].tolist()).strip() for row in written]
