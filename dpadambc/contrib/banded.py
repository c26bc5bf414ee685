r"""Noise that a banded strategy correlates, amplified by cyclic Poisson sampling.

*The theorem.* Let the strategy C have b bands, and each example take part in steps of
one residue modulo b alone, in each independently with probability q. Then all outputs
of T steps together are as private as :math:`\lceil T / b \rceil` steps of DP-SGD with
Poisson sampling by q and the noise multiplier :math:`z / \|c\|`.

*Proof.* Fix the assignment to parts, and all draws but those of one example, of part p:
they depend on neither its data nor its draws, and a bound for each of them holds for
their mixture. The outputs are post-processing of the rows of :math:`C G + z`, one after
the other. The sums of the others' gradients in a step follow from the rows before it,
so that row r is

.. math:: f_r(\text{rows before } r) + \sum_{j<b} c_j x_{r-j} + z_r

with x the contribution of the example in a step. It takes part only in steps :math:`p +
k b`. So in the block of rows from :math:`p + k b` to :math:`p + k b + b - 1` only one x
is not zero: that of the first step of the block, which is decided by earlier blocks and
one draw with q, and has a norm of Δ at most. Subtracting :math:`f_r`, row by row,
leaves :math:`(c_0, \dots, c_{b-1}) \otimes x + z` with probability q, and z otherwise:
the Gaussian mechanism with sensitivity :math:`\|c\| \Delta`, sampled by Poisson. A
block that the last step cuts has less of c, and rows before p do not contain the
example.

Blocks are composed adaptively. If another example replaces it, x is the contribution of
one or of the other, with the same draw. ∎

*When it helps.* It lies between `CorrelatedGaussian`, whose batches are not amplified,
and `PoissonGaussian`, whose noise is independent and which it equals for b = 1. More
bands reduce the noise of prefix sums, but each example then has fewer steps, sampled
with a larger probability, which amplifies less. Compare, at one epsilon and batch size,
the noise that is left in the sum of all steps.

The proof is this module's own, with a test by brute force. The papers' numerically
optimized strategies are not here.

References:
  Choquette-Choo et al., `(Amplified) Banded Matrix Factorization: A unified approach
  to private training <https://arxiv.org/abs/2306.08153>`_, 2023
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.contrib import strategies
from dpadambc.contrib._later_noise import adding, schedule
from dpadambc.core import keys, noise, normals, validate
from dpadambc.core.accounting import gaussian
from dpadambc.core.arrays import widen
from dpadambc.core.noise import AddDPNoiseState
from dpadambc.core.sampling import Batch, batch_of, padded_size, selection_bits
from dpadambc.mechanisms import names
from dpadambc.mechanisms.poisson import PoissonGaussian
from dpadambc.mechanisms.random_allocation import check_parts, uniform

# The number of steps in which the inverse of a strategy has to vanish.
_MOST_STEPS = 2**17
_NEGLIGIBLE = 1e-12
_LARGE = 1e30


@functools.lru_cache(maxsize=8)
def _norms_of_noise(c: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the noise of each step in units of one draw, until it stops growing."""
    steps = max(64, 4 * len(c))
    while steps <= max(_MOST_STEPS, 4 * len(c)):
        d = np.array(strategies.coefficients_of_inverse(c, steps))
        if not np.abs(d).max() < _LARGE:
            break
        squares = np.cumsum(np.square(d))
        half = steps // 2  # if as many as the bands are zero, all later are
        if squares[-1] - squares[half] <= _NEGLIGIBLE * squares[-1]:
            return tuple(np.sqrt(squares[: half + 1]).tolist())
        steps *= 2
    raise ValueError(
        "Expected strategy_coefficients whose inverse dies out, such as those of"
        " strategies.banded_square_root, got noise that grows with every step for"
        f" {c}."
    )


class AddBandedNoiseState(NamedTuple):
    """The state of `add_banded_noise`: *secret*, as it has the noise of earlier steps.

    Attributes:
      draws: the state of the independent draws z.
      earlier: the noise of the last step, of the step before, and so on.
    """

    draws: AddDPNoiseState
    earlier: tuple[optax.Updates, ...]

    def __repr__(self) -> str:
        """Hides the noise, which would reveal gradients."""
        return f"AddBandedNoiseState(draws={self.draws}, earlier=...: secret)"

    @property
    def key_data(self) -> jax.Array:
        """The key data of the draws."""
        return self.draws.key_data


def add_banded_noise(
    noise_stddev: float, strategy_coefficients: Sequence[float], *, key: jax.Array
) -> optax.GradientTransformation:
    r"""Adds Gaussian noise y whose combination over b steps is independent.

    .. math:: \tilde g_t = \bar g_t + y_t, \quad
        y_t = z_t - \sum_{j=1}^{b-1} c_j y_{t-j}, \quad
        z_t \sim \mathcal{N}(0, \sigma^2 I)

    with :math:`\sigma` = `noise_stddev`, c = `strategy_coefficients`, b of them, and no
    y before the first step. In matrices over all steps :math:`C y = z`, with the banded
    Toeplitz matrix C of the c: the strategy. With positive :math:`c_j` a step cancels a
    part of the noise of *all* earlier ones, so that a sum of many gradients has less
    noise than with independent noise. (In `add_correlated_noise` the inverse of the
    strategy is banded instead.) All steps together decide how much the noise hides:
    `contrib.BandedGaussian` has that epsilon. *The epsilon of independent noise does
    not hold for it.*

    Guarantees:
      * The z are those of `add_dp_noise`: independent over coordinates, leaves, steps
        and keys.
      * A state has the noise of b - 1 earlier steps, which reveals their gradients. It
        takes the memory of that many gradients in at least float32. A saved state
        continues with the same noise, bit for bit.
      * Inside `jax.shard_map`, in low precision and for per-example gradients, the
        statements of `add_dp_noise` on devices, dtypes and shapes hold here too.

    Args:
      noise_stddev: the level of z, non-negative; that of the noise y grows with the
        steps, by the norm of the first coefficients of the inverse of C. It cannot be a
        schedule: the proof is for z of one level.
      strategy_coefficients: c, finite numbers, the first of which is 1.
      key: a typed JAX key, of this run alone.

    Returns:
      An Optax transformation. Its state is an `AddBandedNoiseState`.

    Raises:
      TypeError: if `key` is not a typed key, or a number is not a number.
      ValueError: if a number is out of its range, gradients still have their batch
        axis, a part of the parameters is hidden, or as `add_dp_noise`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import contrib
      >>> noise = contrib.add_banded_noise(0.1, (1.0, 0.5), key=jax.random.key(0))
      >>> params = jnp.zeros(10_000)
      >>> state, total = noise.init(params), jnp.zeros(10_000)
      >>> summed = dpadambc.as_clipped_sum(
      ...     jnp.ones(10_000), l2_clip_norm=100.0, normalize_by=1)
      >>> for _ in range(4):
      ...     noised, state = noise.update(summed, state, params)
      ...     total += noised
      >>> print(f"{total.mean():.2f} +- {total.std():.2f}, independent 0.20")
      4.00 +- 0.15, independent 0.20

    References:
      Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
      <https://arxiv.org/abs/2306.08153>`_, 2023
    """
    _, *later = strategies.checked(strategy_coefficients, "strategy_coefficients")

    def start(params):
        zeros = lambda x: jnp.zeros_like(widen(x))
        return tuple(jax.tree.map(zeros, params) for _ in later)

    def draw(step_key, sigma, updates, state):
        also = sigma, jnp.array(later), state.earlier[:1]
        step_key = noise.key_of_step(step_key, updates, *also)

        def without_earlier(z, _, *earlier_and_sigma):
            *earlier, sigma = earlier_and_sigma
            taken_back = sum(
                c * y.astype(z.dtype) for c, y in zip(later, earlier, strict=True)
            )
            return sigma.astype(z.dtype) * z - taken_back

        added = normals.with_normals(
            without_earlier, step_key, updates, *state.earlier, numbers=(sigma,)
        )
        return added, (added, *state.earlier)[: len(later)]

    made = AddBandedNoiseState, "add_banded_noise", key, noise_stddev
    return adding(*made, start, draw)


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedGaussian(PoissonGaussian):
    r"""Banded noise, part of which later steps cancel, amplified by sampling.

    The noise y of step t is :math:`z_t - \sum_{j=1}^{b-1} c_j y_{t-j}`, with
    independent z of standard deviation z Δ in each coordinate: matrix factorization
    with the strategy c, which has b bands. The data are dealt at random into b parts
    that take turns. In each step the examples of one part take part, each with
    `sampling_prob`. So the contributions of an example in one step and in its next
    overlap in no row of the strategy, and the draw amplifies each of them: see this
    module for the proof.

    Guarantees:
      * Epsilon is an upper bound for the outputs of all steps together, and for steps
        that depend on earlier outputs. It is that of the batches that this mechanism
        draws, and of the noise that `add_noise` adds, and of no others: with
        `PoissonGaussian`'s batches an example could be in steps whose rows overlap.
      * A strategy never has more bands than there are parts: `parts` is their number.
        Its states, which have the noise of b - 1 steps, are secret.
      * Epsilon depends only on the number of steps taken, and never decreases with it;
        turns that have begun count in full for every part. A run may be extended from
        its saved state; a second run with new noise is another mechanism, and composed
        with the first.
      * `noise_stddev` is a schedule: the standard deviation of the noise in the
        gradient of each step, as the second moment sees it.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative: the standard deviation of the *independent*
        draws, in units of the sensitivity of one step. Each step but the first adds
        more than that. It cannot be a schedule.
      strategy_coefficients: c, the first of which is 1, such as
        `strategies.banded_square_root(4)`. Zeros at the end make more parts.
      sampling_prob: q, in [0, 1]: the probability that an example takes part in a
        step of its part. An expected batch size m is q n / b, so q is b m / n.
      iterations: the number of steps.
      normalize_by: B, positive; usually the expected batch size, rounded. It does not
        change epsilon.
      neighboring_relation: the difference of two neighboring data sets.
      clip_rule: see `clip_per_example`; no rule changes epsilon.

    Raises:
      TypeError, ValueError: if a number is not a number, or out of its range.

    Example:
      >>> from dpadambc.contrib import BandedGaussian, strategies
      >>> numbers = dict(target_epsilon=4.0, target_delta=1e-5, l2_clip_norm=1.0,
      ...     batch_size=500, num_examples=50_000, epochs=4)
      >>> mechanism = BandedGaussian.calibrate(
      ...     strategy_coefficients=strategies.banded_square_root(4), **numbers)
      >>> mechanism.parts, mechanism.sampling_prob, mechanism.iterations
      (4, 0.04, 400)
      >>> print(f"{mechanism.noise_multiplier:.2f}")
      1.04
      >>> print(f"{mechanism.noise_stddev(0):.5f} {mechanism.noise_stddev(399):.5f}")
      0.00209 0.00241

    References:
      * Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
        <https://arxiv.org/abs/2306.08153>`_, 2023
      * McKenna, `Scaling up the Banded Matrix Factorization Mechanism
        <https://arxiv.org/abs/2405.15913>`_, 2024
    """

    # A schedule would change the strategy, and with it the sensitivity.
    noise_multiplier: float  # pyright: ignore[reportIncompatibleVariableOverride]
    strategy_coefficients: tuple[float, ...]

    has_independent_noise = False

    def __post_init__(self):
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        super().__post_init__()
        # JSON loads tuples as lists.
        c = strategies.checked(self.strategy_coefficients, "strategy_coefficients")
        object.__setattr__(self, "strategy_coefficients", c)
        check_parts(parts=self.parts)
        _norms_of_noise(c)

    @property
    def noise_stddev(self) -> Callable[..., jax.Array]:
        """The noise level of each step, which grows at first, then is constant."""
        return schedule(self, _norms_of_noise(self.strategy_coefficients))

    def _noise(self, key: jax.Array) -> optax.GradientTransformation:
        """Returns `add_banded_noise` of the coefficients."""
        level = self.noise_multiplier * self.sensitivity
        return add_banded_noise(level, self.strategy_coefficients, key=key)

    @classmethod
    def _as_fields(cls, public_numbers: Mapping[str, Any]) -> dict[str, Any]:
        fields = super()._as_fields(public_numbers)
        size = public_numbers.get("batch_size")
        if size is None:
            return fields
        # A batch is drawn from one part alone.
        parts = len(fields.get("strategy_coefficients", (1.0,)))
        prob = parts * size / public_numbers["num_examples"]
        if prob > 1:
            raise ValueError(
                f"Expected batch_size of at most one of {parts} parts of the examples,"
                f" got {size}. Take fewer bands."
            )
        return {**fields, "sampling_prob": prob}

    @property
    def parts(self) -> int:
        """The number of parts of the data that take turns, one for each band."""
        return len(self.strategy_coefficients)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.parts > 1 or self.sampling_prob < 1

    @property
    def strategy_sensitivity(self) -> float:
        """The change by a participation, in units of one step: the norm of a column."""
        return float(np.linalg.norm(self.strategy_coefficients))

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the turns of each part: the rows that an example can be in."""
        hidden = noise_multiplier / self.strategy_sensitivity
        turn = gaussian(hidden, self.neighboring_relation)
        if self.sampling_prob < 1:
            turn = dp_accounting.PoissonSampledDpEvent(self.sampling_prob, turn)
        turns = math.ceil(steps / self.parts)
        return dp_accounting.SelfComposedDpEvent(turn, turns)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        """Draws from the part whose turn it is: cyclic Poisson sampling.

        The part of each example depends only on the key of the run, and the sample on
        the key and the step. So two participations of an example are a multiple of
        `parts` steps apart.
        """
        part_key = keys.of_domain(key, "parts of cyclic Poisson sampling")
        (part,) = uniform(part_key, num_examples, np.array([[self.parts]]))
        turns_key = keys.of_domain(key, "turns of cyclic Poisson sampling")
        step_key = jax.random.fold_in(turns_key, step)
        _, is_drawn = selection_bits(step_key, num_examples, self.sampling_prob)
        # The assignment to parts is as random as the sample from a part.
        size = padded_size(num_examples, self.sampling_prob / self.parts)
        return batch_of((part == step % self.parts) & is_drawn, size)
