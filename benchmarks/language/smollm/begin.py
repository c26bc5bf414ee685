"""Where a training begins: the blocks that it trains, and those before them."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from benchmarks.language.smollm import hidden, texts, weights
from benchmarks.language.smollm.model import Llama, joined, merged, some_blocks

RANK = 8
GROUP_SIZE = 16  # of texts whose loss is computed together


class Begin(NamedTuple):
    """A pretrained model in two pieces."""

    tokenizer: tokenizers.Tokenizer
    first: Llama | None  # the blocks before, if only the last ones are trained
    parts: texts.Parts
    cache_dir: pathlib.Path  # of hidden states

    def examples(self, rows: texts.Texts) -> tuple[Any, ...]:
        """What the loss takes of each text: hidden states too, where blocks are cut."""
        if self.first is None:
            return tuple(rows)
        return *rows, hidden.extract(rows.tokens, self.first, self.cache_dir)

    def whole(self, trained: Any) -> Llama:
        """The model with all blocks, and without adapters."""
        tuned = merged(self.parts.model(trained))
        return joined(self.first, tuned) if self.first else tuned

    def losses(self, trained: Any, rows: texts.Texts) -> np.ndarray:
        """The loss of each text, summed over its tokens, shape (num_texts,)."""
        examples, number, found = self.examples(rows), len(rows.first), []
        for at in range(0, number, GROUP_SIZE):
            indices = np.resize(np.arange(number)[at : at + GROUP_SIZE], GROUP_SIZE)
            group = (x[indices] for x in examples)
            state = trained, self.parts.frozen
            losses = _losses(self.parts.graph, self.parts.length, *state, *group)
            found.append(np.asarray(losses))
        return np.concatenate(found)[:number]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(
    graph: Any, length: int, trained: Any, frozen: Any, *examples: Any
) -> jax.Array:
    parts = texts.Parts(graph, trained, frozen, length)
    one = lambda *text: jnp.sum(parts.losses(trained, frozen, *text))
    return jax.vmap(one)(*examples)


def begin(
    load: Callable[..., weights.Pretrained],
    way: str,
    last: int | None,
    cache_dir: pathlib.Path,
) -> Begin:
    """A training of what `load` gives.

    Args:
      load: a function of a rank, and of whether all but the adapters is frozen.
      way: "lora" trains adapters, "full" all parameters.
      last: how many of the last blocks are trained; None is all.
      cache_dir: of hidden states.
    """
    is_lora = way == "lora"
    start = load(rank=RANK if is_lora else 0, is_frozen=is_lora)
    model, first = start.model, None
    if last is not None:
        whole = load(rank=0, is_frozen=True).model
        first = some_blocks(whole, slice(None, -last))
        model = some_blocks(model, slice(-last, None))
    parts = texts.split(model, way, is_whole=last is None)
    return Begin(start.tokenizer, first, parts, cache_dir)
