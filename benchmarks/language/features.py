"""What MiniLM sees in each text before its last blocks and after them, kept in files.

    DIR/hidden-NAME.npy    shape=(num_texts, T, width), float16: before the last blocks
    DIR/pooled-NAME.npy    shape=(num_texts, width), float32: the mean after them

The names follow from the tokens and the weights. MiniLM has seen no label, and
the row of a text depends on it alone: private training begins after it.
"""

import functools
import hashlib
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from flax import nnx

from benchmarks.language import encoder
from benchmarks.language.data import Tokens

LENGTHS = (8, 12, 16, 24, 32, 48)  # to which groups are padded, and then that of all
GROUP_SIZE = 64


class Features(NamedTuple):
    hidden: np.ndarray  # stays on the disk until it is used
    pooled: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _see(num_blocks: int, weights: Any, tokens: jax.Array, types: jax.Array) -> Any:
    model = nnx.merge(*weights)

    def one(tokens, types):
        hidden = model.before(num_blocks, tokens, types)
        last = encoder.through(model.blocks[-num_blocks:], hidden, tokens)
        return hidden.astype(jnp.float16), encoder.mean_pool(last, tokens)

    return jax.vmap(one)(tokens, types)


def extract(
    texts: Tokens,
    cache_dir: pathlib.Path,
    model: encoder.Encoder,
    num_blocks: int = 1,
) -> Features:
    """Computes the rows unless they are in the cache; positions of padding are zero.

    Files are named for the tokens and the weights, so that features of a model that
    was trained on protected texts are not taken for those of the public one.
    """
    tokens, types = map(np.asarray, texts[:2])
    content = hashlib.sha256()
    for array in (tokens, types, *jax.tree.leaves(nnx.state(model))):
        content.update(np.asarray(array).tobytes())
    name = f"{num_blocks}-{content.hexdigest()[:16]}"
    paths = [cache_dir / f"{field}-{name}.npy" for field in Features._fields]
    if not all(path.exists() for path in paths):
        cache_dir.mkdir(parents=True, exist_ok=True)
        _write(tokens, types, model, num_blocks, paths)
    return Features(*(np.load(path, mmap_mode="r") for path in paths))


def _write(
    tokens: np.ndarray,
    types: np.ndarray,
    model: encoder.Encoder,
    num_blocks: int,
    paths: list[pathlib.Path],
) -> None:
    width = model.norm.num_features
    shapes = [((*tokens.shape, width), np.float16), ((len(tokens), width), np.float32)]
    drafts = [path.with_suffix(".draft.npy") for path in paths]
    files = [
        np.lib.format.open_memmap(draft, "w+", dtype, shape)
        for draft, (shape, dtype) in zip(drafts, shapes, strict=True)
    ]
    lengths = np.asarray(encoder.lengths(tokens))
    order = np.argsort(lengths, kind="stable")
    weights = nnx.split(model)
    for first in rich.progress.track(range(0, len(order), GROUP_SIZE), "MiniLM"):
        group = order[first : first + GROUP_SIZE]
        filled = np.resize(group, GROUP_SIZE)
        fitting = (x for x in LENGTHS if x >= lengths[group].max())
        length = min(next(fitting, tokens.shape[1]), tokens.shape[1])
        rows = tokens[filled, :length], types[filled, :length]
        hidden, pooled = _see(num_blocks, weights, *rows)
        files[0][group, :length] = np.asarray(hidden)[: len(group)]
        files[1][group] = np.asarray(pooled)[: len(group)]
    del files  # writes them out
    for draft, path in zip(drafts, paths, strict=True):
        draft.replace(path)
