"""A smaller vocabulary, of the tokens with the lowest ids, and an encoder for it.

Logits of all 30,522 tokens cost as much as MiniLM's blocks. The ids of BERT's tokenizer
are in an order: special tokens, characters, and then words and pieces of words, those
that English has most often first. So the tokens below some id are a vocabulary that
nobody's private texts decide. Whatever it lacks is written in shorter pieces, down to
single letters, as the tokenizer does for words that it does not know.

    ids = vocabulary.common(tokenizer)
    tokenizer = vocabulary.reduced_tokenizer(tokenizer, ids)
    model = vocabulary.reduced_encoder(model, ids)
"""

import json

import numpy as np
import tokenizers
from flax import nnx

from benchmarks.language import encoder

# Of E2E's 4,672 development texts, all but one have no unknown token then. A table and
# a text have 59 tokens in the mean, 54 with all ids, and logits have 8,111 columns.
BELOW = 10_000


def _is_kept(token: str) -> bool:
    """Not a place that BERT left unused, nor a character of another script."""
    return not token.startswith("[unused") and all(ord(c) < 256 for c in token)


def common(tokenizer: tokenizers.Tokenizer, below: int = BELOW) -> np.ndarray:
    """The ids that are kept, rising, shape (num_tokens,)."""
    known = tokenizer.get_vocab()
    kept = (i for token, i in known.items() if i < below and _is_kept(token))
    return np.array(sorted(kept))


def reduced_tokenizer(
    tokenizer: tokenizers.Tokenizer, ids: np.ndarray
) -> tokenizers.Tokenizer:
    """A tokenizer into word pieces that knows these alone, numbered from zero."""
    spec = json.loads(tokenizer.to_str())
    new = {tokenizer.id_to_token(int(old)): i for i, old in enumerate(ids)}
    spec["model"]["vocab"] = new
    for token in spec["added_tokens"]:
        token["id"] = new[token["content"]]
    for token in spec["post_processor"]["special_tokens"].values():
        token["ids"] = [new[token["id"]]]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def reduced_encoder(model: encoder.Encoder, ids: np.ndarray) -> encoder.Encoder:
    """A copy whose table of words has the rows of these alone."""
    model = nnx.clone(model)
    rows = model.words.embedding[...][ids]
    model.words = nnx.Embed(*rows.shape, rngs=nnx.Rngs(0))
    model.words.embedding[...] = rows
    return model
