"""The clipped sum of a batch of texts, each group padded only as far as it needs.

A text of SST-2 has 13 tokens in the mean, and 64 where all are padded to the longest.
The usual remedy, batches of texts of one length, is not open here: with Poisson
sampling every example is in a batch independently of all else, and a batch that is
chosen by length is no such sample, so the amplification would not hold. So:

1. The batch is drawn from all examples, whatever their lengths.
2. Within the step its rows are sorted by length, and cut into groups of as many
   neighbors.
3. Each group is computed at the least of a few lengths that holds its longest row.
4. The clipped sums of the groups are added, and the noise is drawn once, for the total.

*Why the sensitivity is what it was.* The gradient of a text is a function of its own
tokens: positions that are padding are not attended to, not pooled, and have a gradient
of zero, so it is the same at every padded length, but for rounding. So what a text adds
to the sum does not depend on the group it is in, and one example still moves the sum by
C at most. What a group must never do is to change what is in a row. Were there a fixed
number of places for each length, and what does not fit in were cut off or dropped, one
more text would push others over the edge: their gradients would change too, and the sum
by several times C. Here nothing is cut off and nothing dropped; the last of the lengths
is that of the whole array.

*Why the compiled program says nothing.* The lengths and the size of a group are public,
and chosen before the data are seen (powers of two, up to where all texts are cut off,
each for its own length). There is one program for each length, compiled beforehand.

*What remains.* How long a step takes depends on how many long texts were drawn, and is
not noised: whoever can time the steps learns something. The guarantee is for one who
sees what is released. Where the time is seen too, give one length only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.language import encoder
from dpadambc import ClippedSum

# Of a batch: tokens first, labels last. What has more than one axis, with positions in
# axis 1; labels may be one for each text, or one for each of its positions.
Texts = tuple[jax.Array | np.ndarray, ...]


class Groups(NamedTuple):
    """How a batch is cut up.

    Attributes:
      lengths: to which groups are padded, rising; the last is that of all texts.
      size: how many texts are in a group.
    """

    lengths: tuple[int, ...]
    size: int


def groups_of_backend(on_cpu: Groups, on_accelerator: Groups) -> Groups:
    """What suits the device: an accelerator has more to do at once, and in fewer ways.

    Padding costs it less than waiting, and each length takes a compiler of its own.
    """
    return on_cpu if jax.default_backend() == "cpu" else on_accelerator


def _grouped(
    texts: Texts, is_padding_example: jax.Array, size: int
) -> tuple[Texts, jax.Array, jax.Array]:
    """Rows by length, `size` in a group, what is padding first; and their lengths.

    Padding examples fill up the first group.
    """
    lengths = jnp.where(is_padding_example, 0, encoder.lengths(texts[0]))
    order = jnp.argsort(lengths)
    added = -len(order) % size
    order = jnp.concatenate([jnp.broadcast_to(order[:1], added), order])
    is_added = jnp.arange(len(order)) < added
    arrays = texts, is_padding_example, lengths
    texts, is_padding_example, lengths = jax.tree.map(lambda x: x[order], arrays)
    groups = texts, is_padding_example | is_added, jnp.where(is_added, 0, lengths)
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), groups)


def clipped_grad(
    loss_fn: Callable[..., jax.Array],
    *,
    groups: Groups,
    l2_clip_norm: float,
    normalize_by: float,
) -> Callable[..., Any]:
    """`dpadambc.clipped_grad` of a batch of texts, without most of the padding.

    Args:
      loss_fn: of `(trained, frozen, *text)`, where a text is its tokens, whatever else
        has its positions in axis 0, and its label, or those of its positions. Padding
        at the end must not change it.
      groups: how a batch is cut up.
      l2_clip_norm: C.
      normalize_by: B.

    Returns:
      A function of `(trained, frozen, texts, is_padding_example=)`. Texts are a tuple
      of what a text is, with the texts along axis 0.

    Raises:
      ValueError: if lengths do not rise, the texts are longer or shorter, or there is
        no mask.
    """
    lengths = groups.lengths
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"Expected lengths that rise, got {lengths}.")

    def at(length: int) -> Callable[..., optax.Updates]:
        def grad_fn(trained, frozen, texts, is_padding_example):
            whole = dpadambc.clipped_grad(
                loss_fn,
                l2_clip_norm=l2_clip_norm,
                normalize_by=normalize_by,
                batch_argnums=tuple(range(2, 2 + len(texts))),
            )
            shorter = (x[:, :length] if x.ndim > 1 else x for x in texts)
            return whole(
                trained, frozen, *shorter, is_padding_example=is_padding_example
            )

        return grad_fn

    branches = [at(length) for length in lengths]

    def grad_fn(
        trained: Any,
        frozen: Any,
        texts: Texts,
        *,
        is_padding_example: jax.Array | None = None,
    ) -> optax.Updates:
        if is_padding_example is None:
            raise ValueError(
                "Expected is_padding_example, got none: batches of a mechanism are"
                " padded, and without the mask padding counts as examples."
            )
        if texts[0].shape[1] != lengths[-1]:
            raise ValueError(
                "Expected the last of the lengths to be that of the texts,"
                f" {texts[0].shape[1]}, got {lengths[-1]}. What does not fit in"
                " must not be cut off here."
            )
        texts = tuple(map(jnp.asarray, texts))

        def add(total, group):
            texts, is_padding_example, of_each = group
            needed = jnp.searchsorted(jnp.array(lengths), of_each.max())
            clipped = jax.lax.switch(
                needed, branches, trained, frozen, texts, is_padding_example
            )
            return jax.tree.map(ClippedSum.plus, total, clipped, is_leaf=_is_sum), None

        of_no_text = dpadambc.as_clipped_sum(
            optax.tree.zeros_like(trained),
            l2_clip_norm=l2_clip_norm,
            normalize_by=normalize_by,
        )
        grouped = _grouped(texts, is_padding_example, groups.size)
        return jax.lax.scan(add, of_no_text, grouped)[0]

    return grad_fn


def _is_sum(leaf: Any) -> bool:
    return isinstance(leaf, ClippedSum)
