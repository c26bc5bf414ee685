"""The sampling of a step: batches of static shape, drawn by Poisson sampling.

Epsilon holds only if nobody knows who takes part, so the key of a draw is secret.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from dpadambc.core import leaves, mesh
from dpadambc.core.arrays import shard_map_axes, varying_axes

# A batch has one static size. The chance that a sample does not fit is a failure
# probability on top of delta, so it must be negligible.
_OVERFLOW_PROB = 1e-15
# A sort compiles in a tenth of the time of `jnp.nonzero`, but runs longer for more
# rows.
_FEW = 2**14


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The examples of a step, as rows of the data set.

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
    num_examples: int = dataclasses.field(metadata={"static": True})

    def __iter__(self) -> Iterator[np.ndarray | jax.Array]:
        return iter((self.indices, self.is_padding_example))

    def gather(self, data: Any) -> Any:
        """Gathers the rows of arrays that take part, with zeros for padding.

        Args:
          data: a pytree of arrays with the examples along axis 0.

        Returns:
          The same tree, of arrays with `size` rows.

        Raises:
          ValueError: if an array has another number of rows than was sampled from; or,
            inside `jax.shard_map`, if each device has its own rows and all devices draw
            the same indices.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import dpadambc
          >>> mechanism = dpadambc.PoissonGaussian(
          ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5,
          ...     iterations=10, normalize_by=2)
          >>> batch = mechanism.sample_step(jax.random.key(0), 3, num_examples=4)
          >>> print(batch.gather({"x": jnp.array([10, 20, 30, 40])}))
          {'x': Array([10, 40,  0,  0], dtype=int32)}
        """
        self._check_devices(data)
        return jax.tree_util.tree_map_with_path(self._gather_one, data)

    def _gather_one(self, path: Any, x: Any) -> Any:
        if np.shape(x)[:1] != (self.num_examples,):
            raise ValueError(
                f"Expected data with {self.num_examples} rows, as the batch was drawn"
                f" from, got shape {np.shape(x)} at data{jax.tree_util.keystr(path)}."
            )
        if isinstance(x, np.ndarray) and isinstance(self.indices, np.ndarray):
            rows = x[np.where(self.is_padding_example, 0, self.indices)]
            rows[self.is_padding_example] = 0
            return rows
        leaves.check(**{f"data{jax.tree_util.keystr(path)}": x})
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return x[jnp.where(self.is_padding_example, 0, self.indices)]
        # An index of -1 would wrap around; an index past the end is filled.
        rows = jnp.where(self.is_padding_example, self.num_examples, self.indices)
        place = mesh.sharding_of_rows(x, len(rows))
        chosen = jnp.asarray(x).at[rows]
        return chosen.get(mode="fill", fill_value=0, out_sharding=place)

    def _check_devices(self, data: Any) -> None:
        """Raises where devices with their own rows all draw the same indices.

        The participants on one device would reveal those on another.
        """
        # A batch with room for all rows may be a constant, not a draw.
        if not shard_map_axes() or len(self.indices) >= self.num_examples:
            return
        drawn = varying_axes(self.indices)
        for x in jax.tree.leaves(data):
            if same := [name for name in varying_axes(x) if name not in drawn]:
                raise ValueError(
                    f"Expected a key of its own for each device along {same}, got one"
                    " for all. Draw with jax.random.fold_in(key,"
                    f" jax.lax.axis_index({same[0]!r}))."
                )


def padded_size(num_examples: int, prob: float) -> int:
    """Returns the size that a binomial batch exceeds with probability <= 1e-15."""
    return int(scipy.stats.binom.isf(_OVERFLOW_PROB, num_examples, prob))


def batch_of(takes_part: jax.Array, size: int) -> Batch:
    """Returns the batch of the selected examples, padded to a static size."""
    num = len(takes_part)
    if num <= _FEW:
        rows = jnp.sort(jnp.where(takes_part, jnp.arange(num), num))[:size]
        indices = jnp.where(rows < num, rows, -1)
    else:
        (indices,) = jnp.nonzero(takes_part, size=size, fill_value=-1)
    return Batch(indices.astype(jnp.int32), indices < 0, num)


def padded(batch: Batch, multiple: int) -> Batch:
    """Pads the batch up to a multiple of a number."""
    if not (more := -len(batch.indices) % multiple):
        return batch
    return Batch(
        jnp.pad(batch.indices, (0, more), constant_values=-1),
        jnp.pad(batch.is_padding_example, (0, more), constant_values=True),
        batch.num_examples,
    )


def selection_bits(
    key: jax.Array, num_examples: int, sampling_prob: float
) -> tuple[jax.Array, jax.Array]:
    """Draws one word for each example, and selects the example by it.

    Comparing 32-bit words selects with probability floor(q 2^32) / 2^32, at most q; a
    float32 uniform has 2^-23 steps, and would exceed a small q by far more.
    """
    bits = jax.random.bits(key, (num_examples,), jnp.uint32)
    threshold = int(float(sampling_prob) * 2**32)
    if threshold == 2**32:
        return bits, jnp.ones(num_examples, bool)
    return bits, bits < np.uint32(threshold)


def poisson_batch(key: jax.Array, num_examples: int, sampling_prob: float) -> Batch:
    """Draws each example independently, with one probability.

    A batch exceeds its static size with probability 1e-15 at most, which each step adds
    to the delta of the run.
    """
    _, takes_part = selection_bits(key, num_examples, sampling_prob)
    return batch_of(takes_part, padded_size(num_examples, sampling_prob))
