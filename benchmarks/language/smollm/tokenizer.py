"""The tokenizer of a GGUF file: byte-pair encoding of bytes, each digit on its own."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_CONTROL = 3  # the type of tokens that no text has


def tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """That of SmolLM2; words of a text never make its control tokens.

    Raises:
      ValueError: if the file is for another kind.
    """
    kind = tuple(metadata[f"tokenizer.ggml.{name}"] for name in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"Expected a tokenizer of ('gpt2', 'smollm'), got {kind}.")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    found = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [x for x, of in zip(tokens, types, strict=True) if of == _CONTROL]
    found.add_special_tokens(control)
    found.encode_special_tokens = True  # as any words
    return found
