"""The leaves of a tree of data: checks that JAX takes them, and safe messages.

JAX shows a value that it does not take in its error, with the rows of the people whom
the library protects. So data are checked before JAX sees them, and a message of the
library has a path, a type and a dtype, and no number of an array.
"""

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_INSTEAD = (
    "Give a mapping by dict(), a structured array as a dictionary of its fields, other"
    " numbers by astype(np.float32), tables, pictures and what is on disk by"
    " np.asarray, text as numbers, settings by functools.partial(loss_fn, ...), and no"
    " None."
)
_INSTEAD_OF_PARAMS = (
    "Train arrays alone, of Equinox eqx.partition(model, eqx.is_inexact_array)[0], and"
    " combine them with the rest in the loss; give a mapping by dict()."
)

_MOST_SHOWN = 4


def is_batched(data: Any) -> bool:
    """Whether it is the `.batch` of a data set of Grain."""
    kind = type(data)
    return kind.__module__.startswith("grain.") and kind.__name__.startswith("Batch")


def not_data(data: Any, got: str) -> str:
    """Returns the message about data of another form than `fit` takes."""
    advice = (
        "Give tables by to_numpy(), lists by np.asarray, and examples of several"
        " lengths padded to one."
    )
    if isinstance(data, list):
        advice = (
            "Give a list of arrays as tuple(data), and stack a list of examples, such"
            " as by tuple(map(np.stack, zip(*data)))."
        )
    elif is_batched(data):
        advice = "Give the data set without .batch: the mechanism draws the batches."
    elif hasattr(data, "dataset"):  # as PyTorch's DataLoader has it
        advice = (
            "Give the dataset of the loader, data=loader.dataset: the mechanism draws"
            " the batches."
        )
    elif is_array(data):
        advice = "Give one array as the tuple (data,)."
    return (
        "Expected data to be a tuple of the arguments of loss_fn or a dictionary, of"
        " arrays of numbers with the examples along axis 0, or a source with __len__"
        f" and __getitem__, got {got}. {advice}"
    )


def _type_of(argument: Any) -> str:
    """Describes an array by dtype and shape, and a tree by its type and leaves."""
    types = [str(jax.typeof(x)) for x in jax.tree.leaves(argument)]
    if jax.tree_util.all_leaves([argument]):
        return types[0]
    listed = ", ".join(types[:_MOST_SHOWN]) + ", ..." * (len(types) > _MOST_SHOWN)
    return f"{type(argument).__name__} of {listed or 'nothing'}"


def _remedy(error: Exception) -> str:
    if isinstance(error, NameError) and error.name is None:  # an unknown axis
        return (
            "It has a collective over a batch, as BatchNorm(axis_name=...) has: take"
            " GroupNorm, LayerNorm or fixed statistics."
        )
    if "context mesh" in str(error):
        return "It closes over an array on an Explicit mesh: make that an argument."
    return (
        "Write the loss of one example, with an argument for each array of data, and"
        " give arrays with the examples along axis 0."
    )


@contextlib.contextmanager
def explained_call(arguments: Sequence[Any]) -> Iterator[None]:
    """Adds to an error in a loss the arguments that it was called with."""
    try:
        yield
    except Exception as error:
        types = ", ".join(map(_type_of, arguments))
        error.add_note(
            "Expected loss_fn to run on params and one example without a batch axis,"
            f" got this error from loss_fn({types}). {_remedy(error)}"
        )
        raise


def summary(value: Any) -> str:
    """Describes a value in a message: a number or a name, else its type."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if dtype is not None and shape != ():
        return f"an array of dtype {dtype} and shape {shape}"
    is_plain = value is None or isinstance(
        value, str | int | float | complex | type | enum.Enum
    )
    return repr(value) if is_plain or dtype is not None else type(value).__name__


def is_array(leaf: Any) -> bool:
    """Returns whether JAX takes a leaf; it inspects only the dtype of a NumPy array."""
    try:
        is_numpy = isinstance(leaf, np.ndarray)
        found = jax.typeof(np.empty_like(leaf, shape=0) if is_numpy else leaf)
    except (TypeError, ValueError, OverflowError):  # the last for a number too large
        return False
    return getattr(found.dtype, "kind", None) != "T"  # JAX holds text, and no more


def check(**named: Any) -> None:
    """Raises unless the leaves of trees are arrays, or numbers, that JAX takes."""
    for name, tree in named.items():
        of_data = lambda x, name=name: x is None and name.startswith("data")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=of_data):
            if not is_array(leaf):
                got, dtype = type(leaf).__name__, getattr(leaf, "dtype", None)
                if dtype is not None and getattr(dtype, "names", None) is None:
                    got = f"{got} of dtype {dtype}"
                instead = _INSTEAD_OF_PARAMS if name == "params" else _INSTEAD
                raise TypeError(
                    f"Expected {name}{jax.tree_util.keystr(path)} to be an array of"
                    f" numbers, of a dtype of JAX, got {got}. {instead}"
                )


def with_dictionaries(tree: Any) -> Any:
    """Replaces mappings that JAX does not take as trees by dictionaries.

    A tokenizer returns a `UserDict`, and `np.load` another mapping.
    """
    if not isinstance(tree, tuple | list | Mapping):
        return tree
    is_leaf = lambda x: isinstance(x, Mapping) and jax.tree_util.all_leaves([x])
    as_dict = lambda x: with_dictionaries(dict(x)) if is_leaf(x) else x
    return jax.tree.map(as_dict, tree)


def stacked(rows: Sequence[Any]) -> Any:
    """Stacks examples to one tree of arrays, with the examples along axis 0.

    Raises:
      TypeError: if they hold anything but numbers.
      ValueError: if they differ in structure or shapes.
    """
    rows = [with_dictionaries(row) for row in rows]
    structure = jax.tree.structure(rows[0])
    if any(jax.tree.structure(row) != structure for row in rows):
        raise ValueError("Expected data of examples with one structure, got several.")

    def column(path: Any, *leaves: Any) -> np.ndarray:
        place = f"data{jax.tree_util.keystr(path)}"
        kinds = {(type(x), getattr(x, "dtype", None)): x for x in leaves}
        for leaf in kinds.values():
            check(**{place: leaf})
        if len(shapes := set(map(np.shape, leaves))) > 1:
            raise ValueError(
                f"Expected {place} of one shape in all examples, got {sorted(shapes)}."
                " Pad them to one length."
            )
        values = np.stack(leaves)
        check(**{place: values})  # integers that are too large become objects
        return values

    return jax.tree_util.tree_map_with_path(column, *rows)
