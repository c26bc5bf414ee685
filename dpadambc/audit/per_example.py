"""Tests that each per-example value depends on its own example only."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import neighbors
from dpadambc.audit.finding import Finding, not_tested, within
from dpadambc.audit.pipeline import Pipeline
from dpadambc.core.arrays import widen
from dpadambc.core.clip import clip_per_example
from dpadambc.core.clipped_sum import materialize
from dpadambc.core.gradient import per_example_leaves, per_example_squared_norms
from dpadambc.engine import jaxprs, rounding, weighted
from dpadambc.engine.interface import Gradient

_ROUNDING = 1e-4  # relative: other rows may be summed in another order
_ROUNDINGS = 4  # products and sums of either program may add up


def isolation(fun: Callable[..., Any], params: Any, batch: neighbors.Batch) -> Finding:
    """Changes one example, and compares the outputs of the others.

    It replaces the first and the last example by another, a huge, an infinite and a NaN
    example. Batch normalization, a loss over pairs, subtracting a mean, or a sum over
    devices then changes the outputs of the others.

    Args:
      fun: a function of `(params, *batch)` that returns arrays with the examples along
        axis 0: losses, logits, per-example gradients.
      params: its first argument.
      batch: a tuple of pytrees of arrays, with at least two examples along axis 0.

    Returns:
      A `Finding`: the largest change of another example's output, relative to the
      largest value.

    Raises:
      ValueError: if `fun` returns an array without an axis of examples.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import audit
      >>> x = jax.random.normal(jax.random.key(0), (8, 3))
      >>> alone = lambda w, x: jnp.tanh(x @ w)
      >>> audit.isolation(alone, jnp.ones(3), (x,)).passed
      True
      >>> normalized = lambda w, x: alone(w, x - x.mean(0, keepdims=True))
      >>> audit.isolation(normalized, jnp.ones(3), (x,)).word
      'FAIL'
    """
    size = neighbors.num_examples(batch)
    batch = jax.tree.map(jnp.asarray, batch)

    def rows(batch):
        """Returns all outputs, one row for each example."""
        leaves = [np.asarray(x, float) for x in jax.tree.leaves(fun(params, *batch))]
        wrong = [x.shape for x in leaves if x.shape[:1] != (size,)]
        if wrong or not leaves:
            raise ValueError(
                f"Expected fun to return arrays with the {size} examples along axis 0,"
                f" got {wrong[0] if wrong else 'nothing'}. Return the loss of each"
                " example, not a mean over the batch."
            )
        return np.concatenate([x.reshape(size, -1) for x in leaves], axis=1)

    rng, start = np.random.default_rng(0), rows(batch)
    scale = np.abs(start[np.isfinite(start)]).max(initial=1e-30)
    worst, name, count = 0.0, "", 0
    for index in (0, size - 1):
        others = np.arange(size) != index
        for candidate in neighbors.candidates(batch, index, rng):
            changed = neighbors.with_row(batch, index, candidate.row)
            gap = np.abs(rows(changed) - start)[others]
            gap = np.where(np.isnan(start[others]), 0.0, gap)
            moved = float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0)) / scale
            count += 1
            if moved > worst:
                worst, name = moved, candidate.name
    sentence = "No example changes the output of others, but for rounding."
    if worst > _ROUNDING:
        sentence = (
            f"Replacing an example by one that is {name} changes the output of others"
            f" by {worst:.2g} of the largest value."
        )
    changes = f"changes it by {_ROUNDING:g} of that"
    fails_if = f"fails if one of {count} replacements {changes}"
    return within("isolation", worst, _ROUNDING, sentence, fails_if)


def factored(pipeline: Pipeline) -> Finding:
    r"""Compares factored gradients with those that `method="vmap"` materializes.

    It computes the gradients of a few examples by both methods, at the parameters of
    the pipeline and near them (where no layer is zero). The norms that the clip uses
    must not be less than the true ones, and the clipped sum must be that of the true
    gradients. So it finds a rule of the engine that is wrong for this model.

    Rounding is relative to the terms of a gradient, not to the gradient: with S the
    product of the norms of its factors, it is up to a few eps S. Norms of factored
    gradients carry an allowance of eps S², so they are at least sqrt(eps) S, and the
    rounding is at most a few sqrt(eps) of the norm. In bfloat16 or float16, `vmap`
    rounds each coordinate too, by its eps. So the bound is four times
    sqrt(eps) + eps of the lowest precision.

    Both methods compute the gradients by exact products. The clip multiplies as the
    device does, and may round. A difference within the bound of `engine.rounding` from
    an exact gradient does not count.

    Args:
      pipeline: a pipeline of `Pipeline.of_fit` or `of_chain`, which show the loss.

    Returns:
      A `Finding`: the largest difference, relative to the norms. *Not tested* if the
      pipeline does not show its loss, or no example has a gradient.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1,
      ...     iterations=100, normalize_by=6)
      >>> pipeline = audit.Pipeline.of_fit(
      ...     lambda w, x: jnp.tanh(x @ w).sum(), jnp.ones((5, 3)),
      ...     (jnp.ones((64, 4, 5)),), mechanism,
      ...     dpadambc.adam_bc(0.1, mechanism.noise_stddev))
      >>> audit.factored(pipeline).passed
      True
    """
    check, params = "factored", pipeline.params
    if pipeline.gradients_by is None:
        return not_tested(check, "the pipeline does not show its loss.")
    found = [_differences(pipeline, near) for near in (params, _perturbed(params))]
    differences = np.array([x for x, _ in found])
    if np.all(np.isnan(differences)):
        return not_tested(check, "no example has a gradient that is finite.")
    below, of_sum, above = np.nanmax(differences, axis=0)
    bound = max(bound for _, bound in found)
    sentence = (
        f"Of {len(jax.tree.leaves(pipeline.batch)[0])} examples, factored norms are"
        f" less than those of vmap by {max(below, 0.0):.2g} at most and more by"
        f" {max(above, 0.0):.2g}, and the clipped sum differs by {of_sum:.2g}."
    )
    fails_if = f"fails if norms are too small, or the sum is off, by {bound:.2g}"
    return within(check, float(max(below, of_sum)), bound, sentence, fails_if)


def _errors(units: rounding.Units, gradients: Sequence[Gradient]) -> jax.Array:
    """Bounds the error of a term of the sum over its weight, shape (batch,).

    The error is relative to the given gradient, in exact arithmetic: so the rounding of
    operands at the start of the clip counts too.
    """
    if units is rounding.FULL:
        return jnp.zeros(len(jax.tree.leaves(gradients)[0]))
    from_given = lambda x: dataclasses.replace(x, in_norm=x.error, in_sum=x.error)
    units = rounding.Units(from_given(units.wide), from_given(units.narrow))
    return weighted.norm(units, gradients).in_sum


def _differences(
    pipeline: Pipeline, params: Any
) -> tuple[tuple[float, float, float], float]:
    """Compares norms and sums of both methods; also bounds their rounding."""
    gradients_by: Any = pipeline.gradients_by
    batch, clip_norm = pipeline.batch, pipeline.mechanism.l2_clip_norm
    precision = pipeline.precision
    clip = clip_per_example(clip_norm, normalize_by=1.0, precision=precision)

    @jax.jit
    def clip_factored(gradients, params):
        squared_norms = per_example_squared_norms(gradients, precision)
        opened = [leaf.open() for leaf in per_example_leaves(gradients)]
        errors = rounding.on_device(_errors, precision, opened)
        clipped, _ = clip.update(gradients, optax.EmptyState(), params)
        return jnp.sqrt(squared_norms), errors, materialize(clipped)

    @jax.jit
    def by_vmap(params, *batch):
        return materialize(gradients_by("vmap", params, *batch))

    # Test the clip, not an accelerator's rounding of the model's products.
    with jax.default_matmul_precision("highest"):
        by_factors = jax.jit(functools.partial(gradients_by, "factored"))
        gradients, formed = by_factors(params, *batch), by_vmap(params, *batch)
        program = jax.make_jaxpr(by_vmap)(params, *batch)
    norms, errors, clipped = clip_factored(gradients, params)
    eps, norms = float(jnp.finfo(norms.dtype).eps), np.asarray(norms, float)
    clipped = neighbors.flat(clipped)
    flat = lambda g: np.asarray(g, float).reshape(len(norms), -1)
    rows = list(map(flat, jax.tree.leaves(formed)))
    bound = _ROUNDINGS * (eps**0.5 + _largest_eps(program))
    exact = np.linalg.norm(np.concatenate(rows, axis=1), axis=1)
    if not np.array_equal(np.isfinite(exact), np.isfinite(norms)):
        return (np.inf, np.inf, np.inf), bound
    present = np.isfinite(exact)
    if not np.any(exact[present]) and not np.any(clipped):
        return (np.nan, np.nan, np.nan), bound
    # The weights belong to the factored norms, so that only the gradients may differ.
    target = clip_norm * (1 - 8 * eps)
    norms, exact = norms[present], exact[present]
    errors = np.asarray(errors, float)[present]
    longest = np.maximum(np.maximum(exact, norms), 1e-300)
    weights = np.minimum(1.0, target / np.maximum(norms, 1e-300))
    sums = np.concatenate([weights @ x[present] for x in rows])
    distance = np.linalg.norm(clipped - sums) - np.sum(weights * errors)
    of_sum = max(distance, 0.0) / np.sum(weights * longest)
    below, above = (exact - errors - norms) / longest, (norms - exact) / longest
    return (float(below.max()), float(of_sum), float(above.max())), bound


def _largest_eps(program: jex.ClosedJaxpr) -> float:
    """Returns the eps of the lowest precision in a program."""
    outs: Any = [x for eqn in jaxprs.equations_in(program) for x in eqn.outvars]
    dtypes = {x.aval.dtype for x in outs if jnp.issubdtype(x.aval.dtype, jnp.floating)}
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def _perturbed(params: Any) -> Any:
    """Returns parameters near the given ones, none of them zero."""
    rng = np.random.default_rng(0)

    def move(x):
        size = float(jnp.sqrt(jnp.mean(jnp.square(widen(x))))) or 0.2
        shift = 0.1 * size * rng.normal(size=jnp.shape(x))
        return jnp.asarray(widen(x) + shift, jnp.result_type(x))

    return jax.tree.map(move, params)
