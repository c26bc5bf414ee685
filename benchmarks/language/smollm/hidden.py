"""Hidden states before the last blocks, kept in a file that is named for their origin.

    DIR/smollm-NAME.npy     shape=(num_texts, T, width), float16

What is frozen before the blocks that are trained is computed once for each text, and
the row of a text depends on it alone; zeros are where it is padded. A call that was cut
off goes on where it ended.
"""

import functools
import hashlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from flax import nnx

from benchmarks.language.smollm.model import Llama
from benchmarks.language.smollm.texts import PADDING

GROUP_SIZE = 32  # of texts that are about as long
LENGTH_STEP = 16


@functools.partial(jax.jit, static_argnums=0)
def _see(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    see = lambda row: model.through(model.embed_tokens(row))[0]
    return jax.vmap(see)(tokens).astype(jnp.float16)


def extract(tokens: np.ndarray, first: Llama, folder: pathlib.Path) -> np.ndarray:
    """The states after all blocks of the model, read from the file as they are used."""
    graph, state = nnx.split(first)
    content = hashlib.sha256(tokens.tobytes())
    for array in jax.tree.leaves(state):
        content.update(np.asarray(array).tobytes())
    path = folder / f"smollm-{content.hexdigest()[:16]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(tokens, graph, state, path)
    return np.load(path, mmap_mode="r")


def _write(tokens: np.ndarray, graph: Any, state: Any, path: pathlib.Path) -> None:
    draft, done = path.with_suffix(".draft.npy"), path.with_suffix(".done")
    shape = *tokens.shape, state["norm"]["scale"].shape[-1]
    start = int(done.read_text()) if done.exists() else 0
    options = {} if start else {"dtype": np.float16, "shape": shape}
    file = np.lib.format.open_memmap(draft, "r+" if start else "w+", **options)
    lengths = np.sum(tokens != PADDING, axis=1)
    order = np.argsort(lengths, kind="stable")
    steps = range(start, len(tokens), GROUP_SIZE)
    for at in rich.progress.track(steps, "hidden states"):
        group = order[at : at + GROUP_SIZE]
        longest = max(lengths[group].max(), 1)  # a row may be empty
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        rows = tokens[np.resize(group, GROUP_SIZE), :length]
        file[group, :length] = _see(graph, state, rows)[: len(group)]
        file.flush()
        done.write_text(str(at + GROUP_SIZE))
    del file
    draft.replace(path)
    done.unlink()
