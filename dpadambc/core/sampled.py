"""How batches are drawn, for the mechanisms of examples and of nodes alike."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import sampling


class PoissonSampled(Mechanism):
    """Each example takes part with `sampling_prob`, whatever the others do."""

    sampling_prob: float

    def __post_init__(self):
        super().__post_init__()
        validate.probability(sampling_prob=self.sampling_prob)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.sampling_prob < 1

    def batches(
        self,
        rng: np.random.Generator,
        *,
        num_examples: int,
        batch_sizes: Sequence[int] | None = None,
    ) -> Iterator[Batch]:
        """One batch for each iteration, on the host, all of one size by default.

        Args:
          rng: the generator to draw from; its seed is secret, and fresh for each run.
          num_examples: the size of the data set.
          batch_sizes: several sizes to choose from, such as `sampling.padded_sizes`;
            see `sampling.poisson_batches`.

        Yields:
          One `Batch` of NumPy arrays a step.

        Raises:
          TypeError: if a size is not an int, or `rng` no generator.
          ValueError: if the sizes do not increase, or do not hold every batch.
        """
        self._check_size(num_examples)
        validate.generator(rng=rng)
        return self._batches(rng, num_examples, batch_sizes)

    def _batches(
        self,
        rng: np.random.Generator,
        num_examples: int,
        batch_sizes: Sequence[int] | None = None,
    ) -> Iterator[Batch]:
        return sampling.poisson_batches(
            rng,
            num_examples=num_examples,
            sampling_prob=self.sampling_prob,
            iterations=self.iterations,
            batch_sizes=batch_sizes,
        )

    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        return sampling.poisson_sample(
            key, num_examples=num_examples, sampling_prob=self.sampling_prob
        )


class FixedSizeSampled(Mechanism):
    """A uniform subset of `batch_size` examples, fresh at every step."""

    batch_size: int
    num_examples: int

    def __post_init__(self):
        super().__post_init__()
        validate.count(batch_size=self.batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=self.batch_size)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: it has none."""
        return False

    @property
    def _largest_batch(self) -> int | None:
        return self.batch_size

    def _batches(self, rng: np.random.Generator, num_examples: int) -> Iterator[Batch]:
        return sampling.fixed_size_batches(
            rng,
            num_examples=num_examples,
            batch_size=self.batch_size,
            iterations=self.iterations,
        )

    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        return sampling.fixed_size_sample(
            key, num_examples=num_examples, batch_size=self.batch_size
        )
