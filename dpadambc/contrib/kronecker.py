"""A public linear map of each example's gradient, before the clip: DP-KFC.

The formulas were checked against secondary sources and public code, not against the
paper's text. Its authors average over positions in both moments, which differs by a
number for each layer; add an absolute damping; and give biases the matrix of their
kernel, in one product with it.

The map is a part of the loss of one example: its value stays, and reverse mode
multiplies the gradient. So every function of a loss takes this one, and the factored
engine sees a product of factors times a matrix, which is a product of factors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import at_least_float32, widen
from dpadambc.core.per_example import Arguments
from dpadambc.engine.convolution import Convolution
from dpadambc.engine.interface import Gradient, Shape, pytree
from dpadambc.engine.product import Product
from dpadambc.engine.rounding import EXACT
from dpadambc.engine.transform import factored_outputs


@pytree(data_fields=("matrix",))
class _Factor:
    """A symmetric matrix for some axes of a gradient, at each index of others."""

    matrix: jax.Array  # (shared, n, n)
    shared: Shape
    axes: Shape

    def times(self, gradient: jax.Array) -> jax.Array:
        """Multiplies these axes of the gradient by the matrix."""
        size = lambda axes: tuple(gradient.shape[i] for i in axes)
        own, shared, batch = self.axes, self.shared, tuple(range(len(self.shared)))
        columns = tuple(len(batch) + i for i in range(len(own)))
        matrix = self.matrix.reshape(*size(shared), *size(own), *size(own))
        matrix, axes = matrix.astype(gradient.dtype), ((own, columns), (shared, batch))
        exactly = jax.lax.Precision.HIGHEST
        out = jax.lax.dot_general(gradient, matrix, axes, precision=exactly)
        left = [i for i in range(gradient.ndim) if i not in (*shared, *own)]
        order = [*shared, *left, *own]
        return jnp.transpose(out, [order.index(i) for i in range(gradient.ndim)])


@pytree(data_fields=("factors",))
class KroneckerPreconditioner:
    """Matrices for the axes of each parameter; `kronecker_preconditioner` makes it.

    A pytree: as an argument of `jax.jit`, a new one of the same shapes recompiles
    nothing.

    Attributes:
      factors: for each parameter, one factor for each axis.
      names: the paths of the parameters.
      shapes: the shapes of the parameters.
    """

    factors: tuple[tuple[_Factor, ...], ...]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @property
    def untouched(self) -> tuple[str, ...]:
        """The parameters whose gradients are not multiplied."""
        pairs = zip(self.names, self.factors, strict=True)
        return tuple(name for name, factors in pairs if not factors)

    def __repr__(self) -> str:
        touched = len(self.names) - len(self.untouched)
        return f"KroneckerPreconditioner({touched} of {len(self.names)} parameters)"


class _Side(NamedTuple):
    """One factor of a gradient that is a product."""

    rows: jax.Array  # (shared, contracted, own)
    shared: Shape  # the axes of the gradient in both factors
    own: Shape  # the axes in this factor alone, in column order


def _sides(grad: Gradient) -> tuple[_Side, _Side] | None:
    """Returns the factors of a product, or of a convolution with its patches."""
    if isinstance(grad, Product):
        place = lambda names: tuple(grad.out_axes.index(i) for i in names)
        factors = (grad.a, grad.a_axes), (grad.g, grad.g_axes)
        matrices = [grad.matrix(x, axes) for x, axes in factors]
        a, g = (_Side(x, place(grad.shared), place(own)) for x, own in matrices)
        return a, g
    if not isinstance(grad, Convolution) or grad.window.groups > 1:
        return None
    x, start = grad.window.padded(grad.x), (0,) * len(grad.window.taps)
    order, first = grad.permutation, grad.num_stacked
    *others, last = (order.index(i) for i in range(len(order)))
    shared, own = tuple(others[:first]), tuple(others[first:])
    a = _Side(grad.patches(x, start, grad.window.taps), shared, own)
    return a, _Side(grad.grouped(grad.g), shared, (last,))


def _second_moment(side: _Side, max_size: int, scale: float) -> tuple[_Factor, ...]:
    """Sums the outer products of rows; returns none where they are too large."""
    rows = side.rows.astype(at_least_float32(side.rows.dtype))
    if rows.shape[-1] > max_size:
        return ()
    return (_Factor(scale * EXACT.product(rows, rows), side.shared, side.own),)


def _second_moments(grad: Gradient, max_size: int) -> tuple[_Factor, ...]:
    """Computes the second moments of both factors of a gradient, or of a vector.

    It takes the mean over positions of one factor and the sum of the other: their
    Kronecker product has the size of the gradient's own second moment.
    """
    if len(grad.shape) == 1:
        row = _Side(grad.dense()[None, None], (), (0,))
        return _second_moment(row, max_size, 1.0)
    sides = _sides(grad)
    if sides is None:
        return ()
    positions = max(sides[0].rows.shape[1], 1)
    first = _second_moment(sides[0], max_size, 1 / positions)
    return (*first, *_second_moment(sides[1], max_size, 1.0))


def _inverse_root(factor: _Factor, damping: jax.typing.ArrayLike) -> _Factor:
    """Computes the inverse square root of a second moment; one where that is zero."""
    values, vectors = jnp.linalg.eigh(factor.matrix)
    values = jnp.maximum(values, 0)
    least = damping * values.mean(-1, keepdims=True)
    scales = jnp.where(least > 0, jax.lax.rsqrt(values + least), 1)
    scaled = vectors * scales[:, None, :]
    matrix = EXACT.einsum(scaled, (0, 1, 3), vectors, (0, 2, 3), (0, 1, 2))
    return _Factor(matrix, factor.shared, factor.axes)


def _parameters(params: optax.Params) -> tuple[tuple[str, ...], tuple[Shape, ...]]:
    """Returns the names and the shapes of parameters."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = tuple(jax.tree_util.keystr(path) or "params" for path, _ in paths)
    return names, tuple(jnp.shape(leaf) for _, leaf in paths)


def kronecker_preconditioner(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    *,
    public_examples: tuple[Any, ...],
    damping: jax.typing.ArrayLike = 1e-3,
    max_size: int = 4096,
) -> KroneckerPreconditioner:
    r"""Computes inverse roots of the second moments of kernels' gradients: DP-KFC.

    Reverse mode computes the gradient of a kernel as :math:`M = \sum_t a_t g_t^\top`,
    from activations and output gradients at T positions. K-FAC approximates its second
    moment by :math:`A \otimes G`, and so does this function, over examples that are
    *not* protected: public ones, or noise in their place, with random labels.

    .. math::

      A &= \mathbb{E} \, \frac{1}{T} \sum_t a_t a_t^\top, \qquad
      G = \mathbb{E} \sum_t g_t g_t^\top \\
      U_A &= (A + \gamma \bar\lambda_A I)^{-1/2}, \qquad
      U_G = (G + \gamma \bar\lambda_G I)^{-1/2}

    with the mean eigenvalue :math:`\bar\lambda`. `preconditioned` gives each example
    :math:`U_A M U_G`, in which no direction is large by the shape of the network alone.
    A vector has the root of its own second moment.

    Guarantees:
      * None for `public_examples`: the matrices have no noise, so the examples behind
        them have *no privacy at all*. Private ones would also break the sensitivity of
        the clip.
      * `params` may be released parameters of a private training.

    Args:
      loss_fn: the loss of one example, `loss_fn(params, *example)`.
      params: the parameters at which the moments are computed.
      public_examples: a tuple of batches, the arguments of `loss_fn` after the
        parameters, with the examples along axis 0.
      damping: :math:`\gamma`, positive, in the unit of the mean eigenvalue.
      max_size: the largest axis that gets a matrix. For the kernel of a convolution it
        is taps times channels.

    Returns:
      A `KroneckerPreconditioner`, in at least float32. `untouched` names the parameters
      without a matrix: those whose gradients are no product of two factors.

    Raises:
      ValueError: if a number is out of its range, the batches disagree in their size,
        or no parameter can be preconditioned.
      TypeError: if `public_examples` is no tuple.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> loss_fn = lambda w, x, y: jnp.sum((x @ w - y) ** 2)
      >>> noise = jax.random.normal(jax.random.key(0), (1000, 2))
      >>> labels = jax.random.normal(jax.random.key(1), (1000, 3))
      >>> found = contrib.kronecker_preconditioner(
      ...     loss_fn, jnp.zeros((2, 3)), public_examples=(noise, labels))
      >>> found
      KroneckerPreconditioner(1 of 1 parameters)

    References:
      Molina Van den Bosch et al., `DP-KFC: Data-Free Preconditioning for
      Privacy-Preserving Deep Learning <https://arxiv.org/abs/2605.13418>`_, 2026

      Grosse and Martens, `A Kronecker-factored Approximate Fisher Matrix for
      Convolution Layers <https://arxiv.org/abs/1602.01407>`_, 2016
    """
    validate.positive(damping=damping)
    validate.count(least=1, max_size=max_size)
    if not isinstance(public_examples, tuple):
        raise TypeError(
            "Expected public_examples to be a tuple of batches, the arguments of"
            f" loss_fn after the parameters, got {type(public_examples).__name__}."
        )
    num_examples = Arguments(0, None, None).check((params, *public_examples))
    names, shapes = _parameters(params)
    no_value_and_grad = lambda *args: (None, jax.grad(loss_fn)(*args))
    gradients_of = factored_outputs(no_value_and_grad, frozenset(), takes_cheaper=False)

    def moments_of(example):
        _, grads, *_ = gradients_of(params, *example)
        return tuple(_second_moments(grad, max_size) for grad in grads)

    def add(total, example):
        return jax.tree.map(jnp.add, total, moments_of(example)), None

    first = jax.tree.map(lambda x: x[0], public_examples)
    zeros = optax.tree.zeros_like(jax.eval_shape(moments_of, first))
    total, _ = jax.lax.scan(add, zeros, public_examples)
    if not jax.tree.leaves(total):
        raise ValueError(
            "Expected params with a kernel or a vector whose gradient is a product of"
            f" two factors, got {', '.join(names)}."
        )
    mean = jax.tree.map(lambda x: x / num_examples, total)
    is_factor = lambda x: isinstance(x, _Factor)
    root = lambda factor: _inverse_root(factor, damping)
    roots = jax.tree.map(root, mean, is_leaf=is_factor)
    return KroneckerPreconditioner(roots, names, shapes)


@jax.custom_vjp
def _with_gradient_times(x: jax.Array, factors: tuple[_Factor, ...]) -> jax.Array:
    """Returns the array itself, whose gradient is multiplied by the matrices."""
    del factors
    return x


def _backward(factors, gradient):
    wide = widen(gradient)
    for factor in factors:
        wide = factor.times(wide)
    return wide.astype(gradient.dtype), jax.tree.map(jnp.zeros_like, factors)


_with_gradient_times.defvjp(lambda x, factors: (x, factors), _backward)


def preconditioned(
    loss_fn: Callable[..., Any], preconditioner: KroneckerPreconditioner
) -> Callable[..., Any]:
    r"""Returns the loss with its gradient multiplied by public matrices.

    .. math:: \nabla \tilde\ell(M) = U_A \, \nabla \ell(M) \, U_G

    Use it wherever a function takes a loss: `per_example_grad`, `clipped_grad`,
    `training.fit`, `explain`. Each example's gradient is multiplied before it is
    clipped. Its coordinates are then about one in size, so the root of the number of
    parameters is a large clip norm. The update is along the product, half of the way to
    K-FAC's :math:`A^{-1} M G^{-1}`, as in the paper.

    Guarantees:
      * The clip bounds the product, so sensitivity, noise and epsilon are the
        mechanism's for any matrices that are not made from the examples of the step;
        see `kronecker_preconditioner`.
      * An example whose product overflows contributes exactly zero.
      * Per-example gradients of dense kernels stay products of factors. Those of
        convolutions with overlapping patches are materialized, as `explain` shows.

    Args:
      loss_fn: the loss of one example, of the parameters first.
      preconditioner: from `kronecker_preconditioner`; it may change between steps.

    Returns:
      A function of the same arguments, with the same output. Reverse mode only.

    Raises:
      TypeError: if `preconditioner` is no `KroneckerPreconditioner`.
      ValueError: when called, if the parameters are not those of the preconditioner.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import contrib
      >>> loss_fn = lambda w, x: w @ x
      >>> public = (jnp.array([[30.0, 0.0], [0.0, 0.3]]),)
      >>> scaled = contrib.preconditioned(loss_fn, contrib.kronecker_preconditioner(
      ...     loss_fn, jnp.zeros(2), public_examples=public, damping=1e-9))
      >>> grads = dpadambc.per_example_grad(scaled)(
      ...     jnp.zeros(2), jnp.array([[30.0, 0.6]]))
      >>> print(dpadambc.materialize(grads).round(2))
      [[1.41 2.83]]

    References:
      Molina Van den Bosch et al., `DP-KFC: Data-Free Preconditioning for
      Privacy-Preserving Deep Learning <https://arxiv.org/abs/2605.13418>`_, 2026
    """
    if not isinstance(preconditioner, KroneckerPreconditioner):
        raise TypeError(
            "Expected preconditioner to be a KroneckerPreconditioner, got"
            f" {type(preconditioner)}."
        )

    @functools.wraps(loss_fn)
    def loss_of_preconditioned(params, *args, **kwargs):
        names, shapes = _parameters(params)
        if (names, shapes) != (preconditioner.names, preconditioner.shapes):
            expected = zip(preconditioner.names, preconditioner.shapes, strict=True)
            raise ValueError(
                f"Expected params of the preconditioner, {dict(expected)}, got"
                f" {dict(zip(names, shapes, strict=True))}."
            )
        leaves, structure = jax.tree.flatten(params)
        leaves = map(_with_gradient_times, leaves, preconditioner.factors)
        return loss_fn(structure.unflatten(leaves), *args, **kwargs)

    return loss_of_preconditioned
