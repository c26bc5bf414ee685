"""The examples of a run: arrays, or a source that is read by the index."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import leaves, mesh
from dpadambc.core.mesh import Layout
from dpadambc.core.sampling import Batch


def is_source(data: Any) -> bool:
    """Returns whether the data are a source, which gives an example by its index.

    A source has `__len__` and `__getitem__`, such as a `MapDataset` of Grain. The
    example at an index must be the same each time. Otherwise a step that is repeated
    after an interruption would add its noise to another gradient. Augmentation belongs
    in the loss; see `with_augmentations`. A person must be at one index alone: in a
    data set that is repeated, or has several rows of one person, the guarantee is for a
    row.
    """
    if isinstance(data, tuple | list | Mapping | np.ndarray | jax.Array):
        return False
    is_table = hasattr(data, "to_numpy")  # its rows have no index, or another
    if is_table or leaves.is_batched(data):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def arguments(examples: Any) -> tuple[Any, ...]:
    """Returns the arguments of the loss; a dictionary is one argument."""
    examples = leaves.with_dictionaries(examples)
    return examples if isinstance(examples, tuple) else (examples,)


def num_examples(data: Any) -> int:
    """Returns the number of examples, the same in every array."""
    if is_source(data):
        sizes = {(len(data),)}
    elif isinstance(data, tuple | Mapping):
        leaves.check(data=data)
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(data)}
    else:
        raise TypeError(leaves.not_data(data, type(data).__name__))
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "Expected data of arrays with the same examples along axis 0, got lengths"
            f" {', '.join(f'{x[0]:,}' if x else 'none' for x in sorted(sizes))}. Give"
            " each array one entry for each example."
        )
    ((size,),) = sizes
    if not 0 < size <= np.iinfo(np.int32).max:
        raise ValueError(
            f"Expected data with 1 to {np.iinfo(np.int32).max} examples, got {size}."
            " A source that is repeated has each example many times: give it once."
        )
    return size


def one_example(data: Any) -> tuple[Any, ...]:
    """Returns the arguments of the loss for one example, arrays or shapes."""
    if is_source(data):
        example = arguments(data[0])
        leaves.check(**{"data[i]": example})
        return example
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
    return arguments(jax.tree.map(shape, data))


class Fetched(NamedTuple):
    """A batch of a source, with zeros for padding."""

    examples: Any
    is_padding_example: Any


def fetch(source: Any, batch: Batch, layout: Layout) -> Fetched:
    """Fetches a batch from the host: each process reads only the examples it needs."""
    padding = np.asarray(batch.is_padding_example)
    is_needed = mesh.is_held_here(len(padding), layout) & ~padding
    chosen = np.asarray(batch.indices)[is_needed].tolist()
    columns = leaves.stacked([source[i] for i in chosen or [0]])

    def padded_column(values):
        found = np.zeros((len(padding), *values.shape[1:]), values.dtype)
        found[is_needed] = values[: len(chosen)]
        return mesh.split_on_host(found, layout)

    return Fetched(jax.tree.map(padded_column, columns), batch.is_padding_example)
