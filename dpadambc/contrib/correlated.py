"""Correlated noise over epochs in one order, accounted for as one Gaussian.

It helps at a large epsilon and with few epochs, where amplification gains little. At a
small epsilon the amplification of `PoissonGaussian` or `RandomAllocationGaussian` is
worth more. Before you choose, compare the `noise_stddev` of both at one epsilon, and
the noise that remains in a sum of steps.

The proof is that of `contrib.strategies`, with a test in dense matrices. The papers'
experiments were not repeated.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.contrib import strategies
from dpadambc.contrib._later_noise import adding, schedule
from dpadambc.core import keys, noise, normals, validate
from dpadambc.core.accounting import PLD, RDP, gaussian
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.noise import AddDPNoiseState
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import names
from dpadambc.mechanisms.mechanism import Mechanism
from dpadambc.mechanisms.random_allocation import allocated_batch, check_parts


class AddCorrelatedNoiseState(NamedTuple):
    """The state of `add_correlated_noise`: *secret*, as it determines earlier noise.

    Attributes:
      draws: the state of the independent draws z.
      earlier_keys: the words of the keys of z in the last step, in the step before, and
        so on. shape=(w - 1, words of a key) for w coefficients.
    """

    draws: AddDPNoiseState
    earlier_keys: jax.Array

    def __repr__(self) -> str:
        """Hides the keys."""
        return f"AddCorrelatedNoiseState(draws={self.draws}, earlier_keys=...: secret)"

    @property
    def key_data(self) -> jax.Array:
        """The key data of the draws."""
        return self.draws.key_data


def add_correlated_noise(
    noise_stddev: float, coefficients: Sequence[float], *, key: jax.Array
) -> optax.GradientTransformation:
    r"""Adds Gaussian noise that is correlated over steps, independent elsewhere.

    .. math:: \tilde g_t = \bar g_t + \sum_{j=0}^{w-1} d_j z_{t-j},
        \quad z_t \sim \mathcal{N}(0, \sigma^2 I)

    with :math:`\sigma` = `noise_stddev`, d = `coefficients`, w of them, and no z before
    the first step. With negative :math:`d_j` a step cancels a part of the noise of
    earlier ones, so that a sum of many gradients has less noise than with independent
    noise. All steps together decide how much the noise hides:
    `contrib.CorrelatedGaussian` computes that epsilon, and `contrib.strategies` has the
    proof. *The epsilon of independent noise does not hold for it.*

    Guarantees:
      * The z are independent over coordinates, leaves, steps, keys and sums, like those
        of `add_dp_noise`. None is kept: the state has the keys of the last w - 1 steps,
        and each step draws those of w steps again. That takes w times the time of
        `add_dp_noise`, and the memory of one more gradient, for any w.
      * The state reveals the noise of the last w - 1 steps, and a saved one continues
        with the same noise, bit for bit. The state of `add_dp_noise` reveals no
        earlier noise.
      * Inside `jax.shard_map`, in low precision and for per-example gradients, the
        statements of `add_dp_noise` on devices, dtypes and shapes hold here too.

    Args:
      noise_stddev: the level of z, non-negative; the standard deviation of the noise is
        that times the norm of the coefficients, from step w - 1 on. It cannot be a
        schedule: the proof is for z of one level.
      coefficients: d, finite numbers, the first of which is 1.
      key: a typed JAX key, of this run alone.

    Returns:
      An Optax transformation. Its state is an `AddCorrelatedNoiseState`.

    Raises:
      TypeError: if `key` is not a typed key, or a number is not a number.
      ValueError: if a number is out of its range, gradients still have their batch
        axis, a part of the parameters is hidden, or as `add_dp_noise`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import contrib
      >>> noise = contrib.add_correlated_noise(
      ...     0.1, (1.0, -0.9), key=jax.random.key(0))
      >>> params = jnp.zeros(10_000)
      >>> state, total = noise.init(params), jnp.zeros(10_000)
      >>> summed = dpadambc.as_clipped_sum(
      ...     jnp.ones(10_000), l2_clip_norm=100.0, normalize_by=1)
      >>> for _ in range(4):
      ...     noised, state = noise.update(summed, state, params)
      ...     total += noised
      >>> print(f"{total.mean():.2f} +- {total.std():.2f}, independent 0.20")
      4.00 +- 0.10, independent 0.20

    References:
      Kalinin et al., `DP-λCGD: Efficient Noise Correlation for Differentially Private
      Model Training <https://arxiv.org/abs/2601.22334>`_, 2026: draws them anew
    """
    d = strategies.checked(coefficients)

    def start(params):
        del params
        of_no_step = keys.of_domain(key, "add_correlated_noise before the first step")
        return jax.random.key_data(jax.random.split(of_no_step, len(d) - 1))

    def draw(step_key, sigma, updates, state):
        shares = jnp.array(d, float)
        also = sigma, shares, state.earlier_keys
        step_key = noise.key_of_step(step_key, updates, *also)
        own, kind = jax.random.key_data(step_key[None]), jax.random.key_impl(key)
        words = jnp.concatenate([own, state.earlier_keys])

        def with_draws_of(j, added):
            """Adds the contribution of the draw from j steps ago."""
            key_then = jax.random.wrap_key_data(words[j], impl=kind)
            share = jnp.where(j <= state.draws.noised_steps, shares[j], 0.0) * sigma
            add = lambda z, y, share: y + share.astype(z.dtype) * z
            return normals.with_normals(add, key_then, added, numbers=(share,))

        scaled = lambda z, _, sigma: sigma.astype(z.dtype) * z
        added = normals.with_normals(scaled, step_key, updates, numbers=(sigma,))
        with jax.enable_x64(True):
            added = jax.lax.fori_loop(1, len(d), with_draws_of, added)
        return added, words[:-1]

    made = AddCorrelatedNoiseState, "add_correlated_noise", key, noise_stddev
    return adding(*made, start, draw)


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian(Mechanism):
    r"""Correlated noise, part of which later steps cancel, over epochs in one order.

    The noise of step t is :math:`\sum_j d_j z_{t-j}`, with independent z of standard
    deviation z Δ in each coordinate: matrix factorization, or DP-FTRL. With negative
    d the noise in a sum of many steps is far less than that of independent noise.

    The mechanism deals each example once, at random and independently of the others,
    into one of `batches_per_epoch` batches. The batches come in the same order in every
    epoch. So an example takes part in every `batches_per_epoch`-th step. Epsilon is
    that of *one* Gaussian on all steps together, with the sensitivity of
    `contrib.strategies`. The random order gets *no* credit: there is no proof of
    amplification by sampling for these strategies, whose inverse is banded.

    Guarantees:
      * Epsilon is an upper bound for the outputs of all steps together, and for steps
        that depend on earlier outputs. It holds for the batches that this mechanism
        draws and the noise that `add_noise` adds, and for no others.
      * Epsilon depends only on the number of steps taken, and never decreases with it;
        a run may be extended without a change of its noise. It is larger than the
        epsilon of its epochs as separate runs.
      * All states are secret: they reveal the noise of earlier steps too.
      * `noise_stddev` is a schedule: the standard deviation of the noise in the
        gradient of each step, as the second moment sees it.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative: the standard deviation of the *independent*
        draws, in units of the sensitivity of one step. Each step adds more than that,
        by the norm of the coefficients. It cannot be a schedule.
      noising_coefficients: d, the first of which is 1, such as (1.0, -0.9), which is
        λ-CGD, or `strategies.banded_inverse_square_root(4)`. (1.0,) is independent
        noise.
      batches_per_epoch: the number of steps in an epoch.
      iterations: the number of steps.
      normalize_by: B, positive; usually `num_examples / batches_per_epoch`, rounded.
        It does not change epsilon.
      neighboring_relation: the difference of two neighboring data sets.
      clip_rule: see `clip_per_example`; no rule changes epsilon.

    Raises:
      TypeError, ValueError: if a number is not a number, or out of its range.

    Example:
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
      The proof is in `contrib.strategies`; the method is from these papers.

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
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    clip_rule: ClipRule = FLAT

    # Not iterations, which determine the size of the matrix.
    solvable = ("noise_multiplier",)
    # The batch of an example is independent of the others, and of its content.
    relations = dict.fromkeys(NeighboringRelation, (PLD, RDP))
    deals_epochs = True
    has_independent_noise = False

    def __post_init__(self):
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        super().__post_init__()
        check_parts(batches_per_epoch=self.batches_per_epoch)
        # JSON loads tuples as lists.
        d = strategies.checked(self.noising_coefficients)
        object.__setattr__(self, "noising_coefficients", d)

    @property
    def noise_stddev(self) -> Callable[..., jax.Array]:
        """The noise level of each step, which grows at first, then is constant."""
        squares = np.square(self.noising_coefficients)
        return schedule(self, np.sqrt(np.cumsum(squares)))

    def _noise(self, key: jax.Array) -> optax.GradientTransformation:
        """Returns `add_correlated_noise` of the coefficients."""
        level = self.noise_multiplier * self.sensitivity
        return add_correlated_noise(level, self.noising_coefficients, key=key)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.batches_per_epoch > 1

    def strategy_sensitivity(self, iterations: int | None = None) -> float:
        """Computes the sensitivity of all steps together, in units of one step.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.

        Returns:
          The sensitivity of the strategy: see `contrib.strategies`.
        """
        iterations = self.iterations if iterations is None else int(iterations)
        c = strategies.coefficients_of_inverse(self.noising_coefficients, iterations)
        return strategies.sensitivity(c, iterations, separation=self.batches_per_epoch)

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of all steps, as one Gaussian."""
        hidden = noise_multiplier / self.strategy_sensitivity(steps)
        return gaussian(hidden, self.neighboring_relation)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        # The same epoch, repeated.
        epoch_key = jax.random.fold_in(key, 0)
        size = self.batches_per_epoch
        return allocated_batch(epoch_key, step % size, num_examples, size)
