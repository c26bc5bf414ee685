"""Where a training begins: the blocks that it trains, and those before them."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from benchmarks.language import features
from benchmarks.language.smollm import texts, weights
from benchmarks.language.smollm.model import Llama, joined, merged, some_blocks

RANK = 8
GROUP_SIZE = 16  # of texts whose loss is computed together


def hidden_states(tokens: np.ndarray, first: Llama, folder: pathlib.Path) -> np.ndarray:
    """After all blocks of the model, shape (num_texts, T, width), kept in a file."""
    through = lambda model, row: model.through(model.embed_tokens(row))[0]
    see = lambda model, row: through(model, row).astype(jnp.float16)
    return features.extract("smollm", see, first, [tokens], folder)


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
        return *rows, hidden_states(rows.tokens, self.first, self.cache_dir)

    def whole(self, trained: Any) -> Llama:
        """The model with all blocks, and without adapters."""
        tuned = merged(self.parts.model(trained))
        return joined(self.first, tuned) if self.first else tuned

    def losses(self, trained: Any, rows: texts.Texts) -> np.ndarray:
        """The loss of each text, summed over its tokens, shape (num_texts,)."""

        @jax.jit
        def of_all(trained: Any, frozen: Any, examples: Any) -> jax.Array:
            one = lambda text: jnp.sum(self.parts.losses(trained, frozen, *text))
            return jax.lax.map(one, examples, batch_size=GROUP_SIZE)

        return np.asarray(of_all(trained, self.parts.frozen, self.examples(rows)))


def begin(
    load: Callable[..., weights.Pretrained],
    way: str,
    last: int | None,
    cache_dir: pathlib.Path,
) -> Begin:
    """A training of what `load` gives of a rank, and of whether the rest is frozen.

    The way "lora" trains adapters, "full" all parameters, of so many of the last
    blocks. The folder is of hidden states.
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
