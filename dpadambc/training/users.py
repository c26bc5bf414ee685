"""Privacy for users with several rows: all rows of a user are one example.

Epsilon is for one example. A user in ten rows can move the sum ten times as far as one
row does, so the rows of a user are put into one example, whose gradient is clipped
once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import leaves, validate
from dpadambc.core.step import takes_key

Loss = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class _RowsLoss:
    """The mean loss over the rows of one user, as `with_rows` makes it.

    Args:
      loss_fn: the loss of one row.
      has_frozen: whether its second argument is the `frozen` of `fit`.
    """

    loss_fn: Loss
    has_frozen: bool

    def __call__(self, *arguments: Any) -> jax.Array:
        """Computes the loss of an example of `group_by_user`."""
        return self._mean(arguments, None)

    def _mean(self, arguments: tuple[Any, ...], key: jax.Array | None) -> jax.Array:
        num_shared = 2 if self.has_frozen else 1
        shared, (*rows, is_padding_row) = arguments[:num_shared], arguments[num_shared:]
        _check_rows(is_padding_row)
        row_keys = {}
        if key is not None:
            row_keys["key"] = jax.random.split(key, len(is_padding_row))
        of_row = lambda row, row_key: self.loss_fn(*shared, *row, **row_key)
        losses = jax.vmap(of_row)(rows, row_keys)
        if jnp.shape(losses) != is_padding_row.shape:
            raise ValueError(
                "Expected loss_fn to return a number for each row, got shape"
                f" {jnp.shape(losses)[1:]}."
            )
        used = jnp.where(is_padding_row, 0, losses)
        return used.sum() / (~is_padding_row).sum()


@dataclasses.dataclass(frozen=True)
class _RandomRowsLoss(_RowsLoss):
    """The mean loss over the rows of one user, with a key for each row."""

    def __call__(self, *arguments: Any, key: jax.Array) -> jax.Array:
        """Computes the loss of an example of `group_by_user`, with a key."""
        return self._mean(arguments, key)


def _kind(x: Any) -> str:
    """Returns the kind of a user id; a bool and bytes are neither "int" nor "str"."""
    is_whole = isinstance(x, int | np.integer) and not isinstance(x, bool)
    return "int" if is_whole else "str" if isinstance(x, str) else type(x).__name__


def _as_ids(user_ids: Any) -> np.ndarray:
    """Raises unless ids are whole numbers or strings, one for each row.

    A missing id is often NaN, which differs from itself: each such row would be a
    separate user. As text it would merge several people into one user.
    """
    if isinstance(user_ids, np.ma.MaskedArray | jax.Array):
        raise TypeError(
            f"Expected user_ids as NumPy has them, got {type(user_ids).__name__}: a"
            " mask would be lost, and JAX cuts off whole numbers of 64 bits."
        )
    is_column = hasattr(user_ids, "dtype")
    # NumPy would convert a list that has some text to text.
    ids = np.asarray(user_ids) if is_column else np.asarray(user_ids, object)
    several = ids.dtype == object or ids.dtype.kind in "UT"  # text, also of NumPy 2
    kinds = set(map(_kind, ids.ravel())) if several else {_kind(ids.dtype.type())}
    if ids.ndim != 1 or (len(ids) and kinds not in ({"int"}, {"str"})):
        raise TypeError(
            "Expected user_ids to be whole numbers or strings, one for each row, got"
            f" shape {ids.shape} and {' and '.join(sorted(kinds))}. Leave out the rows"
            " of which the user is not known, and decode bytes."
        )
    return ids


def _rows_of_users(ids: np.ndarray, max_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of each user, and which of them are padding."""
    order = np.argsort(ids, kind="stable")
    _, first, counts = np.unique(ids[order], return_index=True, return_counts=True)
    place = np.arange(max_rows)
    is_padding = place >= counts[:, None]
    return order[first[:, None] + np.where(is_padding, 0, place)], is_padding


def group_by_user(data: Any, user_ids: Any, *, max_rows: int) -> tuple[Any, ...]:
    """Makes one example for each user, of the first rows that the user has.

    Guarantees:
      * The example of a user is a function of the rows of this user alone, in their
        order. So users whose rows differ, or one user more or less, change one example.
      * Every row that is used is in the example of one user.
      * Where an example may be added or removed, that is a user with all rows. One who
        changes some of them replaces an example: it moves the sum by up to 2 C.

    Args:
      data: arrays as for `fit`, with the rows along axis 0.
      user_ids: the user of each row, whole numbers or strings, shape (rows,). Two ids
        that differ are two users: write those of a person alike, and leave out the rows
        whose user is not known.
      max_rows: how many rows of a user are used at most; public, so not the largest
        number that a user has.

    Returns:
      Arrays for `fit`, with shape (users, max_rows, ...), and a last array that is True
      where a row is padding, shape (users, max_rows), bool. Padding is a copy of the
      first row of the same user. Users are in the order of their ids.

    Raises:
      TypeError: if ids are of another type, as missing ones often are; or if data holds
        a list, a table or text in place of an array of numbers.
      ValueError: if there are not as many ids as rows, or none.

    Example:
      >>> import numpy as np
      >>> from dpadambc import training
      >>> x, y = np.arange(5.0), np.array([0, 1, 0, 1, 1])
      >>> x, y, is_padding_row = training.group_by_user(
      ...     (x, y), ["bo", "al", "bo", "bo", "cy"], max_rows=2)
      >>> x.tolist()
      [[1.0, 1.0], [0.0, 2.0], [4.0, 4.0]]
      >>> is_padding_row.tolist()
      [[False, True], [False, False], [False, True]]
    """
    validate.count(least=1, max_rows=max_rows)
    ids = _as_ids(user_ids)
    data = leaves.with_dictionaries(data)
    leaves.check(data=data)
    for path, column in jax.tree_util.tree_leaves_with_path(data):
        name = f"data{jax.tree_util.keystr(path)}"
        if not isinstance(column, np.ndarray | jax.Array):
            raise TypeError(
                f"Expected {name} to be an array, got {type(column).__name__}."
            )
        if column.shape[:1] != ids.shape or not len(ids):
            raise ValueError(
                f"Expected one id for each row, at least one, got {len(ids)} ids for"
                f" {name} of shape {column.shape}."
            )
    rows, is_padding_row = _rows_of_users(ids, max_rows)
    grouped = jax.tree.map(lambda column: column[rows], data)
    several = grouped if isinstance(grouped, tuple) else (grouped,)
    return *several, is_padding_row


def with_rows(loss_fn: Loss, *, has_frozen: bool = False) -> _RowsLoss:
    """Returns the mean loss over the rows of one user.

    The gradient of the mean is clipped, so a user counts once, with any number of rows:
    epsilon is for a user.

    Args:
      loss_fn: the loss of one row: `(params, *row)`; with `has_frozen`, `(params,
        frozen, *row)`. With a keyword-only `key`, each row gets its own.
      has_frozen: whether the second argument is the `frozen` of `fit`.

    Returns:
      A loss of the same arguments for an example of `group_by_user`: rows, and a last
      argument that marks padding rows. It raises where the loss of a row is not a
      number.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(2_000, 3)).astype(np.float32)
      >>> data = training.group_by_user(
      ...     (x, x @ np.float32([1, 2, 3])), rng.integers(500, size=2_000), max_rows=4)
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=50)
      >>> loss_fn = lambda w, x, y: (w @ x - y) ** 2
      >>> result = training.fit(
      ...     training.with_rows(loss_fn), jnp.zeros(3), data, mechanism,
      ...     optax.adam(0.1), key=jax.random.key(0), target_delta=1e-5,
      ...     steps_per_call=100)
      >>> print(result.state.params.round(0))
      [1. 2. 3.]
    """
    kind = _RandomRowsLoss if takes_key(loss_fn) else _RowsLoss
    return kind(loss_fn, has_frozen)


def _check_rows(is_padding_row: Any) -> None:
    """Raises unless the array says which rows of a user are padding."""
    shape, dtype = jnp.shape(is_padding_row), jnp.result_type(is_padding_row)
    if len(shape) != 1 or dtype != jnp.bool_:
        raise TypeError(
            "Expected an example of training.group_by_user, whose last array says which"
            f" rows of the user are padding, bool of shape (max_rows,), got {dtype} of"
            f" shape {shape}. Give fit all that group_by_user returns, in its order."
        )
