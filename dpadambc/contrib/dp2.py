r"""DP²: divide per-example gradients by an old second moment before they are clipped.

The formulas are those of Algorithm 1 of the paper, and the defaults those of its public
code. The published results were not reproduced. In the equal trials of
`benchmarks/methods`, `dp2_rmsprop` is behind DP-SGD, by up to 13 points where a model
is linear.

Why epsilon is the mechanism's, unchanged. The wrapped transformation clips its input at
:math:`C_1` always: gradients are divided by :math:`D C_2 / C_1`, and the private
gradient is multiplied by :math:`C_2 / C_1`. Given the earlier releases the divisor is a
constant, and each example's scaled gradient is a function of that example and of
constants, as its gradient was. So a step is the same Gaussian mechanism of other
vectors of norm at most :math:`C_1`, chosen by earlier releases, and epsilon is that of
adaptive composition. The state is made of private gradients alone: post-processing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.contrib.scaling import check_noise, scale_examples
from dpadambc.core import validate
from dpadambc.core.clip import check_gradients
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.privatize import privatize
from dpadambc.mechanisms import names
from dpadambc.transforms.dtypes import check_decay, descent, wide_zeros_like


class DelayedPreconditionerState(NamedTuple):
    """The state of `delayed_preconditioner`: sums and squares of private gradients.

    Attributes:
      count: the number of steps. shape=(), int32.
      accumulator: the sum of the private gradients of a plain phase.
      nu: the delayed second moment.
      inner_state: the state of the transformation inside.
    """

    count: jax.Array
    accumulator: optax.Updates
    nu: optax.Updates
    inner_state: Any


def _check_interval(**named: Any) -> None:
    """A whole number, which `optax.inject_hyperparams` gives as an array."""
    ((_, value),) = named.items()
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer):
        validate.positive(**named)
    else:
        validate.count(least=1, **named)


def is_preconditioned(
    count: jax.typing.ArrayLike,
    interval: jax.typing.ArrayLike,
    preconditioned_interval: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """Returns whether the step after `count` others is one of a preconditioned phase.

    Args:
      count: the number of steps taken before it.
      interval: the steps of a plain phase, which comes first.
      preconditioned_interval: the steps of the phase after it; as many by default.

    Returns:
      A bool, of the shape of `count`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.contrib import dp2
      >>> print(dp2.is_preconditioned(jnp.arange(6), 1, 2).astype(int))
      [0 1 1 0 1 1]
    """
    if preconditioned_interval is None:
        preconditioned_interval = interval
    return jnp.asarray(count) % (interval + preconditioned_interval) >= interval


@names.explained
def delayed_preconditioner(
    private_gradient: optax.GradientTransformation,
    *,
    interval: int,
    preconditioned_interval: int | None = None,
    l2_clip_norm: jax.typing.ArrayLike,
    preconditioned_clip_norm: jax.typing.ArrayLike,
    decay: jax.typing.ArrayLike = 0.9,
    eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides per-example gradients by a delayed second moment, privately: DP².

    This divides each example's gradient *before* the clip, so that small coordinates do
    not drown in noise. :math:`s_1` plain and :math:`s_2` preconditioned steps take
    turns, with B, z and the noise of the wrapped private gradient:

    .. math::

      D, C &= 1, C_1 \text{ (plain)} \;\text{or}\; \sqrt v + \mathrm{eps}, C_2 \\
      \tilde g &= \tfrac{1}{B} \bigl(
        \sum_i \mathrm{clip}(g_i / D, C) + \mathcal{N}(0, z^2 C^2 I) \bigr) \\
      G &\leftarrow G + \tilde g \text{ in plain steps; at the end of their phase} \\
      v &\leftarrow \mathrm{decay} \cdot v + (1 - \mathrm{decay}) (G / s_1)^2, \;
        G \leftarrow 0

    It materializes all gradients, and has no place in `training.fit`.

    Guarantees:
      * Epsilon is the mechanism's: this module's docstring has the proof.
      * The state is made of private gradients alone.
      * An example with a NaN or infinite quotient contributes exactly zero.

    Args:
      private_gradient: `privatize(mechanism, key=key)`, or your own clip and noise.
      interval: :math:`s_1`, the steps of a plain phase.
      preconditioned_interval: :math:`s_2`; :math:`s_1` by default.
      l2_clip_norm: :math:`C_1`, at which `private_gradient` clips.
      preconditioned_clip_norm: :math:`C_2`, in the unit of divided gradients.
      decay: the decay rate of the average over phases.
      eps: the least divisor, positive.

    Returns:
      An Optax transformation of per-example gradients, in at least float32.

    Raises:
      ValueError: if a number is out of its range, or `private_gradient` has no noise.

    Example:
      >>> import dpadambc, jax, jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=10.0, noise_multiplier=0.0, sampling_prob=1.0, iterations=2,
      ...     normalize_by=2)
      >>> tx = contrib.delayed_preconditioner(
      ...     dpadambc.privatize(mechanism, key=jax.random.key(0)), interval=1,
      ...     l2_clip_norm=10.0, preconditioned_clip_norm=1.0, decay=0.0)
      >>> params = jnp.zeros(2)
      >>> grads = dpadambc.as_per_example(
      ...     jnp.array([[4, 0.04], [2, 0.02]]), is_padding_example=jnp.zeros(2, bool))
      >>> state = tx.init(params)
      >>> for _ in range(2):  # coordinates of one size after a phase
      ...     private, state = tx.update(grads, state, params)
      ...     print(private.round(2))
      [3.   0.03]
      [0.69 0.69]

    References:
      Li et al., `Differentially Private Adaptive Optimization with Delayed
      Preconditioners <https://arxiv.org/abs/2212.00309>`_, 2023, Algorithm 1
    """
    _check_interval(interval=interval)
    if preconditioned_interval is not None:
        _check_interval(preconditioned_interval=preconditioned_interval)
    validate.positive(l2_clip_norm=l2_clip_norm)
    validate.positive(preconditioned_clip_norm=preconditioned_clip_norm)
    check_decay(decay=decay)
    validate.positive(eps=eps)
    inner = optax.with_extra_args_support(private_gradient)
    unit = preconditioned_clip_norm / l2_clip_norm

    def init_fn(params):
        inner_state = inner.init(params)
        check_noise(inner_state)
        zeros = wide_zeros_like(params)
        nu, count = optax.tree.zeros_like(zeros), jnp.zeros([], jnp.int32)
        return DelayedPreconditionerState(count, zeros, nu, inner_state)

    def update_fn(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        at = lambda count: is_preconditioned(count, interval, preconditioned_interval)
        divides, is_end = at(state.count), ~at(state.count) & at(state.count + 1)
        factor = lambda v: jnp.where(divides, 1 / (unit * (jnp.sqrt(v) + eps)), 1)
        average = lambda v, g: decay * v + (1 - decay) * jnp.square(g / interval)
        scaled = scale_examples(updates, jax.tree.map(factor, state.nu))
        before = state.inner_state
        private, inner_state = inner.update(scaled, before, params, **extra_args)
        private = jax.tree.map(lambda g: jnp.where(divides, unit * g, g), private)
        total = optax.tree.add(state.accumulator, private)
        total = optax.tree.where(divides, state.accumulator, total)
        nu = optax.tree.where(is_end, jax.tree.map(average, state.nu, total), state.nu)
        total = optax.tree.where(is_end, optax.tree.zeros_like(total), total)
        count = jnp.asarray(optax.safe_increment(state.count))
        kept = optax.tree.cast_like((total, nu), (state.accumulator, state.nu))
        return private, DelayedPreconditionerState(count, *kept, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def dp2_rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    interval: int,
    preconditioned_clip_norm: jax.typing.ArrayLike,
    preconditioned_learning_rate: optax.ScalarOrSchedule | None = None,
    preconditioned_interval: int | None = None,
    decay: jax.typing.ArrayLike = 0.9,
    eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes DP²-RMSProp: divide by a delayed second moment, clip, add noise, step.

    Phases of DP-SGD alternate with phases of divided gradients, as in
    `delayed_preconditioner`. The two seldom want the same learning rate: for IMDB the
    authors' code has rates of 0.1 and 3, clip norms of 0.5 and 5, eps 1e-7, and phases
    of half an epoch.

    Args:
      learning_rate: the rate of the phases of DP-SGD, a number or a schedule of all
        steps.
      mechanism: the public numbers, such as a `PoissonGaussian`; its clip norm is for
        the phases of DP-SGD.
      key: a typed key for the noise; a new one for each run.
      interval: the steps of a phase of DP-SGD.
      preconditioned_clip_norm: the clip norm of the other phases.
      preconditioned_learning_rate: the rate of the other phases, a number or a schedule
        of all steps; `learning_rate` by default.
      preconditioned_interval: the steps of the other phases; `interval` by default.
      decay: the decay rate of the second moment, which is updated once in two phases.
      eps: a number added to its root, positive.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is no mechanism, `key` no typed key, or an interval no
        int.
      ValueError: if a number is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5,
      ...     iterations=40, normalize_by=64)
      >>> optimizer = dpadambc.contrib.dp2_rmsprop(
      ...     1.0, mechanism, key=jax.random.key(0), interval=10,
      ...     preconditioned_learning_rate=0.1, preconditioned_clip_norm=2.0)
      >>> x = jax.random.normal(jax.random.key(1), (128, 2)) * jnp.array([[1.0, 0.1]])
      >>> y = x @ jnp.array([1.0, -2.0])
      >>> per_example = dpadambc.per_example_grad(lambda w, x, y: (w @ x - y) ** 2)
      >>> @jax.jit
      ... def step(params, state, batch):
      ...     grads = per_example(
      ...         params, *batch.gather((x, y)),
      ...         is_padding_example=batch.is_padding_example)
      ...     updates, state = optimizer.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> for i in range(mechanism.iterations):
      ...     batch = mechanism.sample_step(jax.random.key(2), i, num_examples=128)
      ...     params, state = step(params, state, batch)
      >>> bool(jnp.mean((x @ params - y) ** 2) < 0.1 * jnp.mean(y**2))
      True

    References:
      Li et al., `Differentially Private Adaptive Optimization with Delayed
      Preconditioners <https://arxiv.org/abs/2212.00309>`_, 2023, Algorithm 1
    """

    def schedule(count):
        at: Any = lambda rate: rate(count) if callable(rate) else rate
        divides = is_preconditioned(count, interval, preconditioned_interval)
        return jnp.where(divides, at(preconditioned_learning_rate), at(learning_rate))

    rate = learning_rate if preconditioned_learning_rate is None else schedule
    preconditioner = delayed_preconditioner(
        privatize(mechanism, key=key),
        interval=interval,
        preconditioned_interval=preconditioned_interval,
        l2_clip_norm=mechanism.l2_clip_norm,
        preconditioned_clip_norm=preconditioned_clip_norm,
        decay=decay,
        eps=eps,
    )
    return descent(rate, preconditioner)
