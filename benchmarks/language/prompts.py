"""A classifier that can do something before it is trained: its classes in words.

MiniLM was trained to find which of many texts goes with a text, by logits of 20 times
the cosine of their embeddings. So the words that describe a class make its column of
the head: 20 times the mean of their embeddings. Such a start takes nothing from the
private texts, and private training, which has few steps and much noise, need not find
the head first. Li et al. (arXiv:2110.05679) have the same idea for a model trained
to fill in blanks: they ask which of two words fits in, and call it text infilling.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from benchmarks.language import data, encoder

SCALE = 20.0  # of the cosines, in MiniLM's own training
MAX_LENGTH = 16  # tokens

# Chosen before they were tried, and none was left out for how it did.
TEMPLATES = ("{}", "It was {}.", "This movie is {}.", "a {} film", "I found it {}.")
NEGATIVE = "bad", "terrible", "awful", "poor", "negative"
POSITIVE = "good", "great", "wonderful", "excellent", "positive"
NEGATIVE += "boring", "dull", "stupid", "worthless", "ugly"
POSITIVE += "enjoyable", "funny", "moving", "brilliant", "beautiful"


SST2 = tuple(
    [template.format(word) for template, word in itertools.product(TEMPLATES, words)]
    for words in (NEGATIVE, POSITIVE)
)


def embeddings(
    encode: encoder.Encoder, texts: Sequence[str], tokenizer: tokenizers.Tokenizer
) -> jax.Array:
    """Shape (num_texts, width), each of norm one."""
    labels = np.zeros(len(texts), np.int32)
    examples = data.Examples(tuple((text,) for text in texts), labels)
    tokens, types, _ = data.tokenize(examples, MAX_LENGTH, tokenizer)
    one = lambda tokens, types: encoder.embedding(encode(tokens, types), tokens)
    return jax.jit(jax.vmap(one))(tokens, types)


def classifier(
    encode: encoder.Encoder,
    classes: Sequence[Sequence[str]],
    tokenizer: tokenizers.Tokenizer | None = None,
) -> encoder.Classifier:
    """A classifier whose head is made of what describes each class."""
    texts = list(itertools.chain.from_iterable(classes))
    found = embeddings(encode, texts, tokenizer or data.tokenizer())
    ends = np.cumsum([len(each) for each in classes])[:-1]
    columns = [each.mean(0) for each in jnp.split(found, ends)]
    model = encoder.Classifier(encode, len(classes), rngs=nnx.Rngs(0))
    model.head.kernel[...] = SCALE * jnp.stack(columns, axis=1)
    return model
