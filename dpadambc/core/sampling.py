"""A batch of static shape: which examples take part, and what is padding."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core.arrays import shard_map_axes, varying_axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "is_padding_example"),
    meta_fields=("num_examples",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Which examples take part, as rows of the data set.

    A padding entry has index -1. Take the rows with `gather`: an index of NumPy or JAX
    takes the last example there. *The mask must reach the clip*, which takes padding
    out of the sum: without it, that example counts as often as there is padding, and no
    bound on sensitivity holds.

    Attributes:
      indices: rows of the data set, -1 for padding. shape=(size,), int32.
      is_padding_example: True for padding. shape=(size,), bool.
      num_examples: the size of the data set.

    Example:
      >>> import numpy as np
      >>> import dpadambc
      >>> batch = dpadambc.Batch(
      ...     np.array([2, 0, -1]), np.array([False, False, True]), num_examples=4)
      >>> print(batch.gather(np.array([10, 20, 30, 40])), batch.is_padding_example)
      [30 10  0] [False False  True]
    """

    indices: np.ndarray | jax.Array
    is_padding_example: np.ndarray | jax.Array
    num_examples: int

    def __iter__(self) -> Iterator[np.ndarray | jax.Array]:
        return iter((self.indices, self.is_padding_example))

    def gather(self, data: Any) -> Any:
        """The rows of arrays that take part, zeros where there is padding.

        Args:
          data: a pytree of arrays with the examples along axis 0.

        Returns:
          The same tree, of arrays with `size` rows.

        Raises:
          ValueError: if an array has another number of rows than was sampled from; or,
            inside `jax.shard_map`, if each device has rows of its own and all draw the
            same of them.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from dpadambc.mechanisms import sampling
          >>> batch = sampling.poisson_sample(
          ...     jax.random.key(0), num_examples=4, sampling_prob=0.5)
          >>> print(batch.gather({"x": jnp.array([10, 20, 30, 40])}))
          {'x': Array([30, 40,  0,  0], dtype=int32)}
        """
        self._check_devices(data)
        return jax.tree_util.tree_map_with_path(self._gather_one, data)

    def _gather_one(self, path: Any, x: Any) -> Any:
        if jnp.shape(x)[:1] != (self.num_examples,):
            raise ValueError(
                f"Expected {self.num_examples} rows, as they were sampled from, got"
                f" shape {jnp.shape(x)} at data{jax.tree_util.keystr(path)}. An index"
                " beyond the rows would be read as another row."
            )
        if isinstance(x, np.ndarray) and isinstance(self.indices, np.ndarray):
            rows = x[np.where(self.is_padding_example, 0, self.indices)]
            rows[self.is_padding_example] = 0
            return rows
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return x[jnp.where(self.is_padding_example, 0, self.indices)]
        # An index of -1 would wrap around; one past the end is filled.
        rows = jnp.where(self.is_padding_example, self.num_examples, self.indices)
        return jnp.asarray(x).at[rows].get(mode="fill", fill_value=0)

    def _check_devices(self, data: Any) -> None:
        """Raises where devices with rows of their own all draw the same of them."""
        # A batch with room for all rows may have been drawn from nothing.
        if shard_map_axes() and len(self.indices) < self.num_examples:
            for path, x in jax.tree_util.tree_leaves_with_path(data):
                self._refuse_one_draw_of_many_devices(path, x)

    def _refuse_one_draw_of_many_devices(self, path: Any, x: Any) -> None:
        """Who takes part on one device would tell who does on another."""
        drawn = varying_axes(self.indices)
        same = [name for name in varying_axes(x) if name not in drawn]
        if same:
            raise ValueError(
                f"Expected devices along {same} to draw each for itself from the rows"
                f" of its own that it has of data{jax.tree_util.keystr(path)}, got one"
                " key for all: row 5 of each device takes part where that of another"
                " does, and epsilon is for examples drawn independently. Draw with"
                f" jax.random.fold_in(key, jax.lax.axis_index({same[0]!r}))."
            )
