"""Where examples come from: arrays on the device, or anything with an index."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dpadambc.core.sampling import Batch


@runtime_checkable
class Source(Protocol):
    """Examples by their index, such as a data source or a `MapDataset` of Grain.

    The example under an index must be the same each time. Otherwise a step that is
    repeated after an interruption would add its noise to another gradient. Augmentation
    belongs in the loss; see `with_augmentations`. A person must be under one index
    alone: in a data set that is repeated, or has several rows of one person, the
    guarantee is for a row.
    """

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """One example: a tuple of the arguments of the loss, or a dictionary."""
        ...


def is_source(data: Any) -> bool:
    """Whether examples have to be fetched one by one, rather than being arrays."""
    containers = tuple | list | dict | np.ndarray | jax.Array
    return isinstance(data, Source) and not isinstance(data, containers)


def arguments(examples: Any) -> tuple[Any, ...]:
    """What the loss is called with: a dictionary is one argument."""
    return examples if isinstance(examples, tuple) else (examples,)


def _countable(size: int) -> int:
    if size > np.iinfo(np.int32).max:
        raise ValueError(
            f"Expected at most {np.iinfo(np.int32).max} examples, got {size}. Is the"
            " source repeated? Then each example is in it many times, and none is"
            " protected."
        )
    if not size:
        raise ValueError(
            "Expected at least one example, got none: the run would publish noise alone"
            " and spend epsilon."
        )
    return size


_ENCODE = (
    "Encode text and categories as numbers, by rules that do not depend on protected"
    " data: see the recipe for tables."
)


def num_examples(data: Any) -> int:
    """How many examples there are, the same in every array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if hasattr(leaf, "to_numpy"):  # a table of pandas or polars
            raise TypeError(
                f"Expected arrays of numbers, got {type(leaf).__name__} at"
                f" data{jax.tree_util.keystr(path)}. Give what its to_numpy() returns."
                f" {_ENCODE}"
            )
    if is_source(data):
        return _countable(len(data))
    if not isinstance(data, tuple | dict):
        raise TypeError(
            "Expected data to be a tuple of the arguments of loss_fn or a dictionary,"
            " of arrays with the examples along axis 0, or a source with __len__ and"
            f" __getitem__, got {type(data).__name__}. A single array x is given as"
            " (x,), a list of arrays as tuple(data)."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        _refuse_text(jax.tree_util.keystr(path), leaf)
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(sizes) != 1 or () in sizes:
        first: dict[tuple[int, ...], str] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(data):
            first.setdefault(jnp.shape(leaf), jax.tree_util.keystr(path))
        shapes = [f"{shape} at data{name}" for shape, name in first.items()]
        raise ValueError(
            "Expected arrays with the examples along axis 0, all of one length, got"
            f" {', '.join(shapes[:4]) or 'none'}. If the data are lists, turn them into"
            " arrays by np.asarray; examples of several lengths pad to one before, with"
            " what tells the loss where the padding is."
        )
    return _countable(*sizes.pop())


def _refuse_text(name: str, leaf: Any) -> None:
    """Raises where NumPy has no numbers."""
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm":
        raise TypeError(
            f"Expected arrays of numbers, got dtype {dtype} at data{name}. {_ENCODE}"
        )


def no_examples(batch: Batch) -> Batch:
    """A batch of the same shapes with nothing but padding."""
    shape = batch.indices.shape
    padding = np.ones(shape, bool)
    return Batch(np.full(shape, -1, np.int32), padding, batch.num_examples)


def one_example(data: Any) -> tuple[Any, ...]:
    """The arguments of the loss for one example, arrays or shapes."""
    if is_source(data):
        return arguments(_checked(data[0]))
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
    return arguments(jax.tree.map(shape, data))


def _checked(row: Any) -> Any:
    if not isinstance(row, tuple | dict):
        raise TypeError(
            "Expected the source to return the arguments of loss_fn as a tuple, or a"
            f" dictionary, got {type(row).__name__}."
        )
    return row


def fetch(source: Source, batch: Batch, sharding: NamedSharding | None = None) -> Any:
    """The examples of a batch, from the host, zeros where there is padding.

    With a sharding, each process fetches what its devices need.
    """
    padding = np.asarray(batch.is_padding_example)
    needed = ~padding & _is_local(padding.shape, sharding)
    chosen = np.asarray(batch.indices)[needed]
    rows = [_checked(source[int(i)]) for i in chosen] or [_checked(source[0])]

    def stacked(*leaves):
        values = np.stack(leaves)
        column = np.zeros((len(padding), *values.shape[1:]), values.dtype)
        if len(chosen):
            column[needed] = values
        if sharding is None:
            return column
        part = lambda index: column[index]
        return jax.make_array_from_callback(column.shape, sharding, part)

    try:
        return jax.tree.map(stacked, *rows)
    except ValueError:
        _check_alike(rows, chosen)
        raise


def _check_alike(rows: list[Any], indices: np.ndarray) -> None:
    """Raises unless all examples have arrays of the same names and shapes."""
    structure_of, shapes = jax.tree.structure, lambda row: jax.tree.map(np.shape, row)
    for index, row in zip(indices, rows, strict=False):
        own, first = (jax.tree.leaves(shapes(x)) for x in (row, rows[0]))
        if structure_of(row) != structure_of(rows[0]) or own != first:
            raise ValueError(
                "Expected every example of the source to have the same arrays, got"
                f" shapes {shapes(rows[0])} under {indices[0]} and {shapes(row)} under"
                f" {index}. Pad what has several lengths to one, with what tells the"
                " loss where the padding is."
            )


def _is_local(shape: tuple[int, ...], sharding: NamedSharding | None) -> np.ndarray:
    """Which rows are on the devices of this process."""
    if sharding is None:
        return np.ones(shape, bool)
    is_local = np.zeros(shape, bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        is_local[index] = True
    return is_local
