"""A language model that writes a text about another one, out of an encoder's weights.

    [CLS] table [SEP] text [SEP]        types 0 ... 0 1 ... 1

The positions of the first text see all of it, as in the encoder, and nothing of the
second; those of the second see the first, and of the second what is before them. So
one pass gives the logits of every next token (Dong et al., "Unified Language Model",
arXiv:1905.03197). The parameters are those of the encoder, and a head as BERT was
trained with. Its table of words is the encoder's, one array to read and to write with;
the library keeps the gradient of that factored too.

MiniLM has read much English, but was never trained to write any, and its head is lost.
The bias begins with what the vocabulary tells of English: the token that is number i in
the order of how often they come has a share of about 1 / i (Zipf's law).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.language.encoder import PADDING, UNLABELED, Encoder, layer_norm


def is_hidden(tokens: jax.Array, types: jax.Array) -> jax.Array:
    """Which positions (axis 1) each position (axis 0) does not see, shape (T, T)."""
    place = jnp.arange(len(tokens))
    is_later = place[None] > place[:, None]
    return (tokens == PADDING)[None] | ((types == 1)[None] & is_later)


class Head(nnx.Module):
    """Logits, from hidden states and the table of words."""

    def __init__(self, width: int, num_tokens: int, *, rngs: nnx.Rngs):
        kernel_init = nnx.initializers.normal(0.02)
        self.linear = nnx.Linear(width, width, kernel_init=kernel_init, rngs=rngs)
        self.norm = layer_norm(width, rngs)
        # Some hundred characters come first, in no order.
        self.bias = nnx.Param(-jnp.log(100.0 + jnp.arange(num_tokens)))

    def __call__(self, hidden: jax.Array, words: nnx.Embed) -> jax.Array:
        """Shape (T, num_tokens), from shape (T, width)."""
        x = self.norm(jax.nn.gelu(self.linear(hidden), approximate=False))
        return words.attend(x) + self.bias[...][None]


class Generator(nnx.Module):
    """Logits of the next token, at every position of a pair of texts."""

    def __init__(self, encoder: Encoder, *, rngs: nnx.Rngs):
        words = encoder.words
        self.encoder = encoder
        self.head = Head(words.features, words.num_embeddings, rngs=rngs)

    @property
    def blocks(self) -> nnx.List:
        return self.encoder.blocks

    def write(self, hidden: jax.Array) -> jax.Array:
        """Logits, shape (T, num_tokens), from hidden states, shape (T, width)."""
        return self.head(hidden, self.encoder.words)

    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """Shape (T, num_tokens).

        Args:
          tokens: shape (T,), integers; `PADDING` at the end.
          types: shape (T,), integers: zeros for the first text, ones for the second.
        """
        x, hidden = self.encoder.embed(tokens, types), is_hidden(tokens, types)
        for block in self.blocks:
            x = block(x, hidden)
        return self.write(x)


def labels(tokens: np.ndarray, types: np.ndarray) -> np.ndarray:
    """The next token, where that is of the second text, shape (num_pairs, T)."""
    found = np.full_like(tokens, UNLABELED)
    found[:, :-1] = np.where(types[:, 1:] == 1, tokens[:, 1:], UNLABELED)
    return found
