"""Texts by beam search, with the keys and values of all earlier positions kept.

The search keeps `width` beginnings of a text. Each step goes on with every token, and
keeps those with the greatest log probability by token; a text that has ended is no
longer changed, and stays while it is among them. A width of one is greedy decoding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.language.smollm.model import KeysAndValues, Llama

PADDING = 0  # <|endoftext|>
END = 2  # <|im_end|>
GROUP_SIZE = 64  # tables


class Beam(NamedTuple):
    """Beginnings of a text about a table, the best first."""

    kept: KeysAndValues  # shape=(width, num_blocks, P + N, num_kv_heads, head_width)
    logits: jax.Array  # shape=(width, num_tokens), of their next token
    tokens: jax.Array  # shape=(width, N), `PADDING` at the end
    total: jax.Array  # shape=(width,), of log probabilities
    is_ended: jax.Array  # shape=(width,), bool


def _start(model: Llama, table: jax.Array, width: int, length: int) -> Beam:
    """One beginning, which is empty; the others are impossible."""
    hidden, kept = model.through(model.embed_tokens(table))
    last = hidden[jnp.sum(table != PADDING) - 1][None]
    repeat = lambda x: jnp.broadcast_to(x, (width, *x.shape))
    room = lambda x: jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, 0)])
    return Beam(
        jax.tree.map(lambda x: repeat(room(x)), kept),
        repeat(model.write(last)[0]),
        jnp.full((width, length), PADDING),
        jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf),
        jnp.zeros(width, bool),
    )


def _chosen(beam: Beam) -> tuple[jax.Array, Beam]:
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
    is_ended = found.is_ended | (token == END)
    return token, found._replace(total=total.ravel()[best], is_ended=is_ended)


def _longer(model: Llama, table: jax.Array, beam: Beam, place: jax.Array) -> Beam:
    """The best beginnings with a token more, at this place of the text."""
    token, beam = _chosen(beam)
    after = jnp.sum(table != PADDING) + place
    go_on = jax.vmap(lambda token, kept: model.go_on(token, kept, after))
    kept, logits = go_on(token, beam.kept)
    tokens = beam.tokens.at[:, place].set(token)
    return beam._replace(kept=kept, logits=logits, tokens=tokens)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("width", "length"))
def _write(
    graph: Any, state: Any, tables: jax.Array, *, width: int, length: int
) -> jax.Array:
    model = nnx.merge(graph, state)
    beams = jax.vmap(lambda table: _start(model, table, width, length))(tables)

    def step(state: tuple[jax.Array, Beam]) -> tuple[jax.Array, Beam]:
        place, beams = state
        longer = lambda table, beam: _longer(model, table, beam, place)
        return place + 1, jax.vmap(longer)(tables, beams)

    is_open = lambda state: (state[0] < length) & ~jnp.all(state[1].is_ended)
    state = jax.lax.while_loop(is_open, step, (jnp.zeros((), jnp.int32), beams))
    return state[1].tokens[:, 0]


def beam_search(
    model: Llama, tables: np.ndarray, *, width: int, length: int
) -> np.ndarray:
    """A text about each table, at most so long.

    From and to tokens: shape (num_tables, P), with `PADDING` at the end, to shape
    (num_tables, length), with `END` if the text has ended, and then `PADDING`.
    """
    graph, state = nnx.split(model)
    found = []
    for first in range(0, len(tables), GROUP_SIZE):
        rows = np.arange(first, min(first + GROUP_SIZE, len(tables)))
        group = np.resize(rows, GROUP_SIZE)
        found.append(_write(graph, state, tables[group], width=width, length=length))
    return np.concatenate(found)[: len(tables)]
