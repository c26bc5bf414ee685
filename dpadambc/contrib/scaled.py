r"""Scale-then-privatize: divide gradients by a private second moment before the clip.

The algorithm was checked against the public code of jax_privacy, which names the paper
as its source, and not against the paper's text. There v belongs to the optimizer that
follows, and is not divided by :math:`1 - \mathrm{decay}^t`; `factored` does not exist.
In the equal trials of `benchmarks/methods`, with Adam after it, it is level with Adam
alone.

v contains the noise. If `mechanism.noise_stddev` is 1 or more, it grows without end. If
C is far below the root of the number of parameters, v shrinks until eps stops it, and
the result is DP-SGD of the clip norm :math:`C \cdot \mathrm{eps}`.

Why epsilon is the mechanism's, unchanged. The wrapped transformation clips the divided
gradients, so each release has its sensitivity and noise for any v. v is computed from
earlier releases alone, so given them it is a constant, and a step is the same Gaussian
mechanism of other vectors of norm at most C: adaptive composition. The gradients of the
step itself cannot get into the divisor: they are sealed until they are clipped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.contrib.scaling import OuterProduct, check_noise, scale_examples
from dpadambc.core import validate
from dpadambc.core.clip import check_gradients
from dpadambc.transforms.dtypes import check_decay, wide_zeros_like


class ScaleThenPrivatizeState(NamedTuple):
    """The state of `scale_then_privatize`: squares of private gradients only.

    Attributes:
      count: the number of steps. shape=(), int32.
      nu: an array for each parameter; if factored, its mean along each axis.
      inner_state: the state of the transformation inside.
    """

    count: jax.Array
    nu: Any
    inner_state: Any


def _axis_means(square: jax.Array) -> Any:
    """Computes, for each axis, the mean over the others."""
    if not square.ndim:
        return square
    axes = range(square.ndim)
    mean = lambda i: square.mean([j for j in axes if j != i])
    return OuterProduct(tuple(map(mean, axes)))


def _root(nu: Any) -> Any:
    """Returns the root of a second moment, or of the outer product of its means."""
    if not isinstance(nu, OuterProduct):
        return jnp.sqrt(nu)
    first, *others = nu.vectors
    roots = (jnp.sqrt(v / v.mean()) for v in others)
    return OuterProduct((jnp.sqrt(first), *roots))


def scale_then_privatize(
    private_gradient: optax.GradientTransformation,
    *,
    eps: jax.typing.ArrayLike,
    decay: jax.typing.ArrayLike = 0.999,
    factored: bool = False,
    scales_back: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides per-example gradients by their own size, privately, and scales back.

    Noise of one level in all coordinates drowns the small ones. This divides each
    example's gradient by the root of a second moment before the clip and the noise, and
    multiplies the sum by that root, so that the noise is proportional to it:

    .. math::

      D &= \sqrt{\hat v + \mathrm{eps}^2}, \qquad \hat v = v / (1 - \mathrm{decay}^t) \\
      \tilde g &= \tfrac{D}{B} \bigl(
        \sum_i \mathrm{clip}(g_i / D, C) + \mathcal{N}(0, z^2 C^2 I) \bigr) \\
      v &\leftarrow \mathrm{decay} \cdot v + (1 - \mathrm{decay}) \, \tilde g^2

    with B, z, C and the noise of the wrapped private gradient. The level of the noise
    differs by coordinate and step, so put no `adam_bc` behind it, except with
    `scales_back=False`. It has no place in `training.fit`, which hands over a sum.

    Guarantees:
      * Epsilon is the mechanism's: this module's docstring has the proof.
      * The state is made of private gradients alone.
      * An example with a NaN or infinite quotient contributes exactly zero.

    Args:
      private_gradient: `privatize(mechanism, key=key)`, or your own clip and noise.
      eps: the least divisor, positive, in the unit of the gradient.
      decay: the decay rate of the average over steps.
      factored: whether to keep v as its means along each axis, as Adafactor does, and
        the gradients of dense kernels and tables in their factors.
      scales_back: whether to multiply the private gradient by D.

    Returns:
      An Optax transformation of per-example gradients, in at least float32.

    Raises:
      ValueError: if a number is out of its range, or `private_gradient` has no noise.

    Example:
      >>> import dpadambc, jax, jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=100.0, noise_multiplier=0.0, sampling_prob=1.0,
      ...     iterations=3, normalize_by=1)
      >>> tx = contrib.scale_then_privatize(
      ...     dpadambc.privatize(mechanism, key=jax.random.key(0)), eps=1e-3,
      ...     decay=0.5, scales_back=False)
      >>> params = jnp.zeros(2)
      >>> grads = dpadambc.as_per_example(
      ...     jnp.array([[4.0, 0.4]]), is_padding_example=jnp.zeros(1, bool))
      >>> state = tx.init(params)
      >>> for _ in range(3):  # coordinates of one size after a step
      ...     private, state = tx.update(grads, state, params)
      ...     print(private.round())
      [100.  10.]
      [40. 40.]
      [1. 1.]

    References:
      Ganesh, McMahan and Thakurta, `On Design Principles for Private Adaptive
      Optimizers <https://arxiv.org/abs/2507.01129>`_, 2025
    """
    validate.positive(eps=eps)
    check_decay(decay=decay)
    inner = optax.with_extra_args_support(private_gradient)
    average_of = _axis_means if factored else lambda square: square
    is_moment = lambda x: isinstance(x, OuterProduct)

    def init_fn(params):
        inner_state = inner.init(params)
        check_noise(inner_state)
        nu = jax.tree.map(average_of, wide_zeros_like(params))
        return ScaleThenPrivatizeState(jnp.zeros([], jnp.int32), nu, inner_state)

    def update_fn(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        # In the first step nu is zero, so any divisor is right.
        weight = 1 - decay ** jnp.maximum(state.count, 1.0)
        squares = jax.tree.map(lambda v: v / weight + eps**2, state.nu)
        divisors = jax.tree.map(_root, squares, is_leaf=is_moment)
        inverses = jax.tree.map(lambda d: 1 / d, divisors)
        before, scaled = state.inner_state, scale_examples(updates, inverses)
        divided, inner_state = inner.update(scaled, before, params, **extra_args)

        dense = lambda divisor: divisor.dense() if is_moment(divisor) else divisor
        private = jax.tree.map(lambda g, d: g * dense(d), divided, divisors)
        squares = jax.tree.map(lambda g: average_of(jnp.square(g)), private)
        nu = jax.tree.map(lambda v, s: decay * v + (1 - decay) * s, state.nu, squares)
        count = jnp.asarray(optax.safe_increment(state.count))
        nu = optax.tree.cast_like(nu, state.nu)
        state = ScaleThenPrivatizeState(count, nu, inner_state)
        return private if scales_back else divided, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
