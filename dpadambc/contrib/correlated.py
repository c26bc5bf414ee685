"""Correlated noise over epochs in one order, accounted for as one Gaussian."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.contrib import _noising, strategies
from dpadambc.contrib.correlated_noise import add_correlated_noise
from dpadambc.core import accounting, validate
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.privatize import Noise
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import _allocation_sampling, sampling

_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


class _Correlated(Noise):
    """Noise of which later steps take a part back."""

    def stddev(self, mechanism: Any) -> Callable[..., jax.Array]:
        """A schedule, which grows over the first steps and then is one number."""
        norms = np.sqrt(np.cumsum(np.square(mechanism.noising_coefficients)))
        level = mechanism.noise_multiplier * mechanism.sensitivity
        last = len(norms) - 1
        return lambda step: jnp.asarray(level * norms, float)[jnp.minimum(step, last)]

    def transformation(
        self, mechanism: Any, key: jax.Array
    ) -> optax.GradientTransformation:
        """`add_correlated_noise` of the mechanism's coefficients."""
        level = mechanism.noise_multiplier * mechanism.sensitivity
        return add_correlated_noise(level, mechanism.noising_coefficients, key=key)


_NOISE = _Correlated()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian(Mechanism):
    r"""Noise of which later steps take a part back, over epochs in one order.

    The noise of step t is :math:`\sum_j d_j z_{t-j}`, with independent z of standard
    deviation z Δ in each coordinate: matrix factorization, or DP-FTRL. With negative
    d the noise in a sum of many steps is far less than that of independent noise.

    The mechanism deals each example once, at random and independently of the others,
    into one of `batches_per_epoch` batches. The batches come in the same order in every
    epoch. So an example takes part in every `batches_per_epoch`-th step. Epsilon is
    that of *one* Gaussian on all steps together, with the sensitivity of
    `contrib.strategies`. The random order gets *no* credit: there is no proof of
    amplification by sampling for these strategies, whose inverse is banded.

    It helps at a large epsilon and with few epochs, where amplification gains little.
    At a small epsilon the amplification of `PoissonGaussian` or
    `RandomAllocationGaussian` is worth more. Before you choose, compare the
    `noise_stddev` of both at one epsilon, and the noise that remains in a sum of steps.

    With w coefficients, a step takes the time of w draws of the noise and the memory of
    one; see `contrib.add_correlated_noise`. All states are secret: they reveal the
    noise of earlier steps too.

    Guarantees:
      * Epsilon is an upper bound for the outputs of all steps together, and for steps
        that depend on earlier outputs. It holds for the batches that this mechanism
        draws and the noise that `add_noise` adds, and for no others.
      * It depends on `iterations` by steps that were taken alone, and never decreases
        with them; a run may be extended without a change of its noise. Its epsilon is
        that of all its steps together, and more than that of its epochs as runs of
        their own.
      * `noise_stddev` is a schedule: the standard deviation of the noise that is in
        the gradient of each step, which is what the second moment sees.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative: the standard deviation of the *independent*
        draws, in units of the sensitivity of one step. Each step adds more than it,
        by the norm of the coefficients. No schedule.
      noising_coefficients: d, the first of which is 1, such as (1.0, -0.9), which is
        λ-CGD, or `strategies.banded_inverse_square_root(4)`. (1.0,) is independent
        noise.
      batches_per_epoch: the number of steps in an epoch.
      iterations: the number of steps.
      normalize_by: B, positive; usually `num_examples / batches_per_epoch`, rounded.
        It does not change epsilon.
      neighboring_relation: what two neighboring datasets differ in.
      clip_rule: which share of each gradient is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import dpadambc
      >>> from dpadambc.contrib import CorrelatedGaussian, strategies
      >>> mechanism = CorrelatedGaussian.calibrate(
      ...     target_epsilon=8.0, target_delta=1e-5, l2_clip_norm=1.0,
      ...     noising_coefficients=strategies.banded_inverse_square_root(4),
      ...     batches_per_epoch=100, iterations=500, normalize_by=100)
      >>> print(f"noise multiplier {mechanism.noise_multiplier:.2f}")
      noise multiplier 1.71
      >>> print(f"{mechanism.noise_stddev(0):.4f} {mechanism.noise_stddev(3):.4f}")
      0.0171 0.0193

    References:
      * Denisov et al., `Improved Differential Privacy for SGD via Optimal Private
        Linear Operators on Adaptive Streams <https://arxiv.org/abs/2202.08312>`_, 2022
      * Kalinin et al., `Back to Square Roots <https://arxiv.org/abs/2505.12128>`_, 2025
      * Kalinin et al., `DP-λCGD <https://arxiv.org/abs/2601.22334>`_, 2026
    """

    l2_clip_norm: float
    # A schedule would change the strategy, and with it the sensitivity.
    noise_multiplier: float  # pyright: ignore[reportIncompatibleVariableOverride]
    noising_coefficients: tuple[float, ...]
    batches_per_epoch: int
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _ADD_OR_REMOVE_ONE
    clip_rule: ClipRule = FLAT

    # Not iterations, which decide how large the matrix is.
    _solvable = ("noise_multiplier",)
    # Who is dealt where is independent of the others, and of what is in an example.
    _relations = {
        _ADD_OR_REMOVE_ONE: ("pld", "rdp"),
        _REPLACE_ONE: ("pld", "rdp"),
        _REPLACE_SPECIAL: ("pld", "rdp"),
    }
    _refusal = "none."
    _deals_epochs = True
    _noise = _NOISE

    def __post_init__(self):
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        super().__post_init__()
        _allocation_sampling.check(0, self.batches_per_epoch, 1)
        # JSON has lists.
        d = _noising.check(self.noising_coefficients)
        object.__setattr__(self, "noising_coefficients", d)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.batches_per_epoch > 1

    def strategy_sensitivity(self, iterations: int | None = None) -> float:
        """What all steps together move, in units of what one step does.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.

        Returns:
          The sensitivity of the strategy: see `contrib.strategies`.
        """
        iterations = self.iterations if iterations is None else int(iterations)
        c = strategies.coefficients_of_inverse(self.noising_coefficients, iterations)
        return strategies.sensitivity(c, iterations, separation=self.batches_per_epoch)

    def _run_event(
        self, iterations: int, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        """All steps, as one Gaussian."""
        hidden = self.noise_multiplier / self.strategy_sensitivity(iterations)
        return self._gaussian(hidden, accountant)

    def _step_event(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        raise TypeError(
            "Expected the event of all steps, got one step of correlated noise: no"
            " number of single steps composes to the run."
        )

    def _batches(self, rng: np.random.Generator, num_examples: int) -> Iterator[Batch]:
        epoch = sampling.random_allocation_batches(
            rng,
            num_examples=num_examples,
            batches_per_epoch=self.batches_per_epoch,
            iterations=min(self.batches_per_epoch, self.iterations),
        )
        batches = list(epoch)
        return (batches[t % self.batches_per_epoch] for t in range(self.iterations))

    def _sample_step(
        self, run_key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> Batch:
        # The first epoch, again and again.
        return sampling.random_allocation_sample(
            run_key,
            step % self.batches_per_epoch,
            num_examples=num_examples,
            batches_per_epoch=self.batches_per_epoch,
        )

    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        raise TypeError(
            "Expected sample_step(run_key, step), with one key for all steps, got"
            " sample(key): all batches follow from one key, and with a key for each"
            " step an example would take part any number of times, which this epsilon"
            " does not cover. For independent steps use a PoissonGaussian."
        )
