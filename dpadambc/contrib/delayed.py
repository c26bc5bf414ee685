"""Divide per-example gradients by an old second moment before they are clipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.contrib import _around
from dpadambc.contrib.scaling import scale_examples
from dpadambc.core import validate
from dpadambc.core.clip import check_gradients
from dpadambc.transforms.dtypes import wide_zeros_like


class DelayedPreconditionerState(NamedTuple):
    """State of `delayed_preconditioner`: sums and squares of private gradients only.

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


def is_preconditioned(
    count: jax.typing.ArrayLike,
    interval: jax.typing.ArrayLike,
    preconditioned_interval: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """Whether the step after `count` others is one of a preconditioned phase.

    Args:
      count: how many steps were taken before it.
      interval: steps of a plain phase, which comes first.
      preconditioned_interval: steps of the phase after it; as many by default.

    Returns:
      A bool, of the shape of `count`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.transforms import delayed
      >>> print(delayed.is_preconditioned(jnp.arange(6), 1, 2).astype(int))
      [0 1 1 0 1 1]
    """
    if preconditioned_interval is None:
        preconditioned_interval = interval
    return jnp.asarray(count) % (interval + preconditioned_interval) >= interval


def _check_interval(**named: Any) -> None:
    """A whole number, which `optax.inject_hyperparams` gives as an array."""
    ((name, value),) = named.items()
    if not isinstance(value, jax.Array):
        validate.count(least=1, **named)
    elif not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"Expected {name} to be an int, got {value!r}.")
    else:
        validate.positive(**named)


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
    r"""Private gradients of what is divided by a delayed second moment first: DP².

    Adam divides the noise along with the gradient. This divides each example's gradient
    *before* the clip, so that small coordinates do not drown in noise. The divisor must
    not depend on the examples of this step. It is an average over earlier private
    gradients, so it has less noise than any of them. Two phases take turns, of
    :math:`s_1` plain and :math:`s_2` preconditioned steps, with B, z and the noise of
    the wrapped private gradient:

    .. math::

      D &= 1 \text{ (plain)}, \qquad D = \sqrt v + \mathrm{eps}
        \text{ (preconditioned)} \\
      \tilde g &= \frac{1}{B} \Bigl(
        \sum_i \mathrm{clip}(g_i / D, C) + \mathcal{N}(0, z^2 C^2 I) \Bigr),
        \qquad C = C_1 \text{ or } C_2 \\
      G &\leftarrow G + \tilde g \text{ in plain steps; at the end of their phase} \\
      v &\leftarrow \mathrm{decay} \cdot v + (1 - \mathrm{decay}) (G / s_1)^2, \qquad
      G \leftarrow 0

    The wrapped transformation clips at :math:`C_1` always: gradients are divided by
    :math:`D C_2 / C_1`, and what comes out is multiplied by :math:`C_2 / C_1`, which is
    the same thing. :math:`(G / s_1)^2` has the variance of the noise in it,
    :math:`\sigma^2 / s_1`; a longer phase has less of it, and an older v.

    Guarantees:
      * Each release has the sensitivity and the noise of the wrapped transformation,
        whatever v is: it clips what it is given. Given the releases before, v is a
        constant, and each example's scaled gradient is a function of that example and
        of constants, as its gradient was. So a step is the same Gaussian mechanism of
        other vectors of norm at most :math:`C_1`, chosen by what was released, and
        epsilon is that of adaptive composition: the mechanism's, unchanged.
      * The state is made of private gradients alone: what it keeps is post-processing.
      * An example whose gradient is NaN, infinite or, divided, overflows float32
        contributes exactly zero, and changes no other. Masks are asked for as without
        it.
      * It is refused around a transformation without `add_dp_noise`.

    A gradient that is divided coordinate by coordinate has no factored form. So both
    phases materialize the gradients of all examples of a batch, in at least float32.
    This takes per-example gradients, so `training.fit`, which hands over a sum, cannot
    use it.

    Args:
      private_gradient: `privatize(mechanism, key=key)`, or clip and noise of your own.
      interval: :math:`s_1`, the steps of a plain phase.
      preconditioned_interval: :math:`s_2`; :math:`s_1` by default.
      l2_clip_norm: :math:`C_1`, at which `private_gradient` clips. Of another number
        the steps would be clipped at another :math:`C_2`, no less privately.
      preconditioned_clip_norm: :math:`C_2`, in the unit of gradients that are divided
        by their size: the root of the number of parameters is a large one.
      decay: of the average over phases.
      eps: least divisor, positive.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.
      Its updates are in at least float32.

    Raises:
      ValueError: if a number is out of its range, gradients are not per example, or
        what is wrapped adds no noise.
      TypeError: as `privatize`, or if `private_gradient` is no transformation, or an
        interval no whole number.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import transforms
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=10.0, noise_multiplier=0.0, sampling_prob=1.0,
      ...     iterations=2, normalize_by=2)
      >>> tx = contrib.delayed_preconditioner(
      ...     dpadambc.privatize(mechanism, key=jax.random.key(0)), interval=1,
      ...     l2_clip_norm=10.0, preconditioned_clip_norm=1.0, decay=0.0)
      >>> params, x = jnp.zeros(2), jnp.array([[4.0, 0.04], [2.0, 0.02]])
      >>> state = tx.init(params)
      >>> grads = dpadambc.per_example_grad(lambda w, x: w @ x)(
      ...     params, x, is_padding_example=jnp.zeros(2, bool))
      >>> for _ in range(2):  # coordinates of one size after a phase
      ...     private, state = tx.update(grads, state, params)
      ...     print(private.round(2))
      [3.   0.03]
      [0.69 0.69]

    References:
      Li et al., `Differentially Private Adaptive Optimization with Delayed
      Preconditioners <https://arxiv.org/abs/2212.00309>`_, 2023, Algorithm 1
    """
    _around.refuse_other_things(private_gradient)
    _check_interval(interval=interval)
    if preconditioned_interval is not None:
        _check_interval(preconditioned_interval=preconditioned_interval)
    validate.positive(l2_clip_norm=l2_clip_norm)
    validate.positive(preconditioned_clip_norm=preconditioned_clip_norm)
    validate.decay(decay=decay)
    validate.positive(eps=eps)
    inner = optax.with_extra_args_support(private_gradient)
    unit = preconditioned_clip_norm / l2_clip_norm

    def init_fn(params):
        inner_state = inner.init(params)
        _around.check(inner_state)
        zeros = wide_zeros_like(params)
        return DelayedPreconditionerState(
            count=jnp.zeros([], jnp.int32),
            accumulator=zeros,
            nu=optax.tree.zeros_like(zeros),
            inner_state=inner_state,
        )

    def update_fn(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        at = lambda count: is_preconditioned(count, interval, preconditioned_interval)
        divides, is_end = at(state.count), ~at(state.count) & at(state.count + 1)

        def factor(v):
            return jnp.where(divides, 1 / (unit * (jnp.sqrt(v) + eps)), 1)

        def averaged(v, total):
            return decay * v + (1 - decay) * jnp.square(total / interval)

        scaled = scale_examples(updates, jax.tree.map(factor, state.nu))
        private, inner_state = inner.update(
            scaled, state.inner_state, params, **extra_args
        )
        private = jax.tree.map(lambda g: jnp.where(divides, unit * g, g), private)
        total = optax.tree.where(
            divides, state.accumulator, optax.tree.add(state.accumulator, private)
        )
        nu = optax.tree.where(is_end, jax.tree.map(averaged, state.nu, total), state.nu)
        total = optax.tree.where(is_end, optax.tree.zeros_like(total), total)
        return private, DelayedPreconditionerState(
            count=jnp.asarray(optax.safe_increment(state.count)),
            accumulator=optax.tree.cast_like(total, state.accumulator),
            nu=optax.tree.cast_like(nu, state.nu),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
