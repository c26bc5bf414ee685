"""What frozen blocks make of texts, kept in files that are named for their origin.

    DIR/hidden-1-NAME.npy    shape=(num_texts, T, width), float16
    DIR/pooled-1-NAME.npy    shape=(num_texts, width), float32

NAME follows from the tokens and the weights, so that features of a model that was
trained on protected texts are not taken for those of the public one. The row of a text
depends on it alone: private training begins after it. Rows of texts of like length are
computed together, and zeros are where they are padded.
"""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from flax import nnx

from benchmarks.language import encoder
from benchmarks.language.data import Tokens

GROUP_SIZE = 32  # of texts that are about as long
LENGTH_STEP = 8


def extract(
    name: str,
    see: Callable[..., jax.Array],
    model: nnx.Module,
    rows: Sequence[np.ndarray],
    folder: pathlib.Path,
) -> np.ndarray:
    """A row for each text, read from the file as it is used.

    It sees by the model from the rows of a text, tokens first, of shape (num_texts, T)
    each: an array with an axis of positions in front, or without one.
    """
    graph, state = nnx.split(model)
    content = hashlib.sha256()
    for array in (*rows, *jax.tree.leaves(state)):
        content.update(np.asarray(array).tobytes())
    path = folder / f"{name}-{content.hexdigest()[:16]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        of_one = lambda state, *row: see(nnx.merge(graph, state), *row)
        of_group = jax.jit(jax.vmap(of_one, (None, *(0 for _ in rows))))
        _write(functools.partial(of_group, state), rows, path)
    return np.load(path, mmap_mode="r")


def _write(
    see: Callable[..., jax.Array], rows: Sequence[np.ndarray], path: pathlib.Path
) -> None:
    draft, of = path.with_suffix(".draft.npy"), jax.eval_shape(see, *rows)
    file = np.lib.format.open_memmap(draft, "w+", dtype=of.dtype, shape=of.shape)
    lengths = np.asarray(encoder.lengths(rows[0]))
    order = np.argsort(lengths, kind="stable")
    for at in rich.progress.track(range(0, len(order), GROUP_SIZE), path.stem):
        group = order[at : at + GROUP_SIZE]
        longest = max(lengths[group].max(), 1)  # a row may be empty
        length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, rows[0].shape[1])
        found = see(*(x[np.resize(group, GROUP_SIZE), :length] for x in rows))
        places = (group, slice(length))[: found.ndim - 1]
        file[places] = found[: len(group)]
    file.flush()
    draft.replace(path)


def before_last(
    texts: Tokens, model: encoder.Encoder, num_blocks: int, folder: pathlib.Path
) -> np.ndarray:
    """What the last blocks of the encoder see of each text."""
    see = lambda model, *text: model.before(num_blocks, *text).astype(jnp.float16)
    return extract(f"hidden-{num_blocks}", see, model, texts[:2], folder)


def pooled(texts: Tokens, model: encoder.Encoder, folder: pathlib.Path) -> np.ndarray:
    """The mean of the hidden states of each text after all blocks."""
    see = lambda model, *text: encoder.mean_pool(model(*text), text[0])
    return extract("pooled-1", see, model, texts[:2], folder)
