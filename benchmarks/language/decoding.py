"""Texts by beam search, with the keys and values of all earlier positions kept.

The search keeps `width` beginnings of a text. Each step goes on with every token, and
keeps those with the greatest log probability by token; a text that has ended is no
longer changed, and stays while it is among them. A width of one is greedy decoding.

A `Writer` is of one table and one text, without a batch axis, as models are.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.language.encoder import PADDING
from benchmarks.language.generator import Generator

GROUP_SIZE = 64  # tables; twice as many on an accelerator

KeysAndValues = list[tuple[jax.Array, jax.Array]]  # of each block


class Writer(NamedTuple):
    """How a kind of model writes a text about a table.

    Attributes:
      read: of the model and the tokens of a table, shape (P,), `PADDING` at the end;
        returns what all texts about it have in common, with the `logits` of the first
        token, shape (num_tokens,).
      room: of that and the length of a text; what is kept of an empty text.
      go_on: of the model, the table, what is kept, a place in the text and the token
        that is put there; returns what is kept then, and the logits of the next token.
    """

    read: Callable[[Any, jax.Array], Any]
    room: Callable[[Any, int], Any]
    go_on: Callable[..., tuple[Any, jax.Array]]


class Table(NamedTuple):
    """What all texts about a table have in common."""

    kept: KeysAndValues  # shape=(P, num_heads, width of a head) each
    is_padding: jax.Array  # shape=(P,), bool
    logits: jax.Array  # shape=(num_tokens,), of the first token of a text


class Beam(NamedTuple):
    """Beginnings of a text, the best first."""

    kept: Any  # each array with the beginnings along axis 0
    logits: jax.Array  # shape=(width, num_tokens), of their next token
    tokens: jax.Array  # shape=(width, N), `PADDING` at the end
    total: jax.Array  # shape=(width,), of log probabilities
    is_ended: jax.Array  # shape=(width,), bool


def read(model: Generator, tokens: jax.Array) -> Table:
    """The table, shape (P,), `PADDING` at the end."""
    is_padding = tokens == PADDING
    x, kept = model.encoder.embed(tokens, jnp.zeros_like(tokens)), []
    for block in model.blocks:
        query, key, value = block.attention.project(x)
        kept.append((key, value))
        attended = block.attention.attend(query, key, value, is_padding)
        x = block.after_attention(x, attended)
    last = jnp.sum(~is_padding) - 1
    return Table(kept, is_padding, model.write(x[last][None])[0])


def go_on(
    model: Generator,
    table: Table,
    kept: KeysAndValues,
    place: jax.Array,
    token: jax.Array,
) -> tuple[KeysAndValues, jax.Array]:
    """Puts a token at this place of the text; then the logits of the next one."""
    first = jnp.sum(~table.is_padding) + place
    x = model.encoder.embed(token[None], jnp.ones((1,), jnp.int32), first)
    is_later = jnp.arange(len(kept[0][0])) > place
    hidden, longer = jnp.concatenate([table.is_padding, is_later]), []
    for block, of_table, of_text in zip(model.blocks, table.kept, kept, strict=True):
        query, *new = block.attention.project(x)
        own = [old.at[place].set(x[0]) for old, x in zip(of_text, new, strict=True)]
        both = map(lambda *x: jnp.concatenate(x), of_table, own)
        x = block.after_attention(x, block.attention.attend(query, *both, hidden))
        longer.append(tuple(own))
    return longer, model.write(x)[0]


def _room(table: Table, length: int) -> KeysAndValues:
    room = lambda x: jnp.zeros((length, *x.shape[1:]), x.dtype)
    return jax.tree.map(room, table.kept)


ENCODER = Writer(read, _room, go_on)


def _start(writer: Writer, table: Any, width: int, length: int) -> Beam:
    """One beginning, which is empty; the others are impossible."""
    repeat = lambda x: jnp.broadcast_to(x, (width, *x.shape))
    return Beam(
        jax.tree.map(repeat, writer.room(table, length)),
        jnp.broadcast_to(table.logits, (width, *table.logits.shape)),
        jnp.full((width, length), PADDING),
        jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf),
        jnp.zeros(width, bool),
    )


def _chosen(beam: Beam, end: int) -> tuple[jax.Array, Beam]:
    """The best that one more token makes: these tokens, and what they are put to."""
    log_probs = jax.nn.log_softmax(beam.logits.at[:, PADDING].set(-jnp.inf))
    nothing = jnp.where(jnp.arange(log_probs.shape[1]) == PADDING, 0.0, -jnp.inf)
    log_probs = jnp.where(beam.is_ended[:, None], nothing[None], log_probs)
    total = beam.total[:, None] + log_probs
    lengths = jnp.sum(beam.tokens != PADDING, axis=1) + ~beam.is_ended
    mean = total / lengths[:, None]
    _, best = jax.lax.top_k(mean.ravel(), len(beam.total))
    parent, token = jnp.divmod(best, log_probs.shape[1])
    found = jax.tree.map(lambda x: x[parent], beam)
    is_ended = found.is_ended | (token == end)
    return token, found._replace(total=total.ravel()[best], is_ended=is_ended)


def _longer(
    writer: Writer, model: Any, table: Any, beam: Beam, place: jax.Array, end: int
) -> Beam:
    """The best beginnings with a token more, at this place."""
    token, beam = _chosen(beam, end)
    each = jax.vmap(lambda kept, token: writer.go_on(model, table, kept, place, token))
    kept, logits = each(beam.kept, token)
    tokens = beam.tokens.at[:, place].set(token)
    return beam._replace(kept=kept, logits=logits, tokens=tokens)


def beam_search(
    model: Any,
    tables: jax.Array,
    *,
    width: int,
    length: int,
    end: int,
    writer: Writer = ENCODER,
) -> jax.Array:
    """A text about each table.

    Args:
      model: that writes them.
      tables: their tokens, shape (num_tables, P), `PADDING` at the end.
      width: how many beginnings are kept.
      length: at which a text ends in any case.
      end: the token that ends it.
      writer: of models of this kind.

    Returns:
      Tokens, shape (num_tables, length), with `end` if the text has ended, and then
      `PADDING`.
    """
    about = jax.vmap(functools.partial(writer.read, model))(tables)
    beams = jax.vmap(lambda table: _start(writer, table, width, length))(about)

    def step(state: tuple[jax.Array, Beam]) -> tuple[jax.Array, Beam]:
        place, beams = state
        longer = lambda table, beam: _longer(writer, model, table, beam, place, end)
        return place + 1, jax.vmap(longer)(about, beams)

    is_open = lambda state: (state[0] < length) & ~jnp.all(state[1].is_ended)
    state = jax.lax.while_loop(is_open, step, (jnp.zeros((), jnp.int32), beams))
    return state[1].tokens[:, 0]


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("width", "length", "end", "writer")
)
def _write(graph: Any, state: Any, tables: jax.Array, **options: Any) -> jax.Array:
    return beam_search(nnx.merge(graph, state), tables, **options)


def write_all(model: Any, tables: np.ndarray, **options: Any) -> np.ndarray:
    """`beam_search` about all tables, a group at a time."""
    size = GROUP_SIZE if jax.default_backend() == "cpu" else 2 * GROUP_SIZE
    graph, state = nnx.split(model)
    found = []
    for first in range(0, len(tables), size):
        group = np.resize(np.arange(len(tables))[first : first + size], size)
        found.append(_write(graph, state, tables[group], **options))
    return np.concatenate(found)[: len(tables)]
