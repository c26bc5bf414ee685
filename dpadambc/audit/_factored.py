"""That factored gradients are those of `jax.vmap`, on a model of the user's own."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import _arrays
from dpadambc.audit._finding import Finding, not_tested, within
from dpadambc.audit.pipeline import Pipeline
from dpadambc.core.arrays import widen
from dpadambc.core.clip import clip_per_example
from dpadambc.engine import jaxprs
from dpadambc.gradients import per_example_norms

_CHECK = "factored"
_ROUNDINGS = 4  # that may add up: of the products, of the sum, in either program


def factored(pipeline: Pipeline) -> Finding:
    r"""Compares factored gradients with those that `method="vmap"` materializes.

    It takes the gradients of a few examples by both methods, at the parameters of the
    pipeline and near them (where no layer is zero). The norms that the clip uses must
    not be less than the true ones, and the clipped sum must be that of the true
    gradients. So a rule of the engine that is wrong for this model is found.

    Rounding is relative to the terms of a gradient, not to the gradient: with S the
    product of the norms of its factors, it is up to a few eps S. Norms of factored
    gradients carry an allowance of eps S², so they are at least sqrt(eps) S, and the
    rounding is at most a few sqrt(eps) of the norm. In bfloat16 or float16, `vmap`
    rounds each coordinate too, by its eps. So the bound is four times
    sqrt(eps) + eps of the lowest precision.

    Args:
      pipeline: of `Pipeline.of_fit` or `of_chain`, which show the loss.

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
    gradients_by, params = pipeline.gradients_by, pipeline.params
    if gradients_by is None:
        return not_tested(_CHECK, "the pipeline does not show its loss.")
    clip_norm = pipeline.mechanism.l2_clip_norm
    # The rules of the engine are tested, not how an accelerator rounds its products.
    with jax.default_matmul_precision("highest"):
        found = [
            _differences(gradients_by, near, pipeline.batch, clip_norm)
            for near in (params, _perturbed(params))
        ]
    differences = np.array([x for x, _ in found])
    if np.all(np.isnan(differences)):
        return not_tested(_CHECK, "no example has a gradient that is finite.")
    below, of_sum, above = np.nanmax(differences, axis=0)
    largest, bound = float(max(below, of_sum)), max(bound for _, bound in found)
    return within(
        _CHECK,
        largest,
        bound,
        f"Of {len(jax.tree.leaves(pipeline.batch)[0])} examples, factored norms are"
        f" less than those of vmap by {max(below, 0.0):.2g} at most and more by"
        f" {max(above, 0.0):.2g}, and the clipped sum differs by {of_sum:.2g}.",
        f"fails if factored norms are too small, or the sum is off, by {bound:.2g}"
        " of the norms",
    )


def _differences(
    gradients_by: Any, params: Any, batch: Any, clip_norm: float
) -> tuple[tuple[float, float, float], float]:
    """Norms below the true ones, the sum, norms above; and what rounding may make."""
    clip = clip_per_example(clip_norm, normalize_by=1.0)

    @jax.jit
    def by_factors(params, *batch):
        gradients = gradients_by("factored", params, *batch)
        clipped, _ = clip.update(gradients, optax.EmptyState(), params)
        return per_example_norms(gradients), _arrays.opened(clipped)

    @jax.jit
    def by_vmap(params, *batch):
        return _arrays.opened(gradients_by("vmap", params, *batch))

    norms, clipped = by_factors(params, *batch)
    rows = [
        np.asarray(g, float).reshape(len(norms), -1)
        for g in jax.tree.leaves(by_vmap(params, *batch))
    ]
    finfo, norms = jnp.finfo(norms.dtype), np.asarray(norms, float)
    program = jax.make_jaxpr(by_vmap)(params, *batch)
    bound = _ROUNDINGS * (float(finfo.eps) ** 0.5 + _largest_eps(program))
    exact = np.linalg.norm(np.concatenate(rows, axis=1), axis=1)
    if not np.array_equal(np.isfinite(exact), np.isfinite(norms)):
        return (np.inf, np.inf, np.inf), bound
    present = np.isfinite(exact)
    if not np.any(exact[present]) and not np.any(_arrays.flat(clipped)):
        return (np.nan, np.nan, np.nan), bound
    # The weights are those of the factored norms: only the gradients may differ.
    target = clip_norm * (1 - 8 * float(finfo.eps))
    norms, exact = norms[present], exact[present]
    longest = np.maximum(np.maximum(exact, norms), 1e-300)
    weights = np.minimum(1.0, target / np.maximum(norms, 1e-300))
    sums = np.concatenate([weights @ x[present] for x in rows])
    gap = np.linalg.norm(_arrays.flat(clipped) - sums)
    relative = (exact - norms) / longest
    of_sum = gap / np.sum(weights * longest)
    return (float(relative.max()), float(of_sum), float((-relative).max())), bound


def _largest_eps(program: jex.ClosedJaxpr) -> float:
    """Of the lowest precision in which anything is computed."""
    own = [
        float(jnp.finfo(x.aval.dtype).eps)
        for eqn in program.jaxpr.eqns
        for x in eqn.outvars
        if jnp.issubdtype(x.aval.dtype, jnp.floating)
    ]
    inside = [_largest_eps(x) for eqn in program.jaxpr.eqns for x in jaxprs.inner(eqn)]
    return max([*own, *inside], default=0.0)


def _perturbed(params: Any) -> Any:
    """Parameters near the given ones, none of them zero."""
    rng = np.random.default_rng(0)

    def move(x):
        size = float(jnp.sqrt(jnp.mean(jnp.square(widen(x))))) or 0.2
        shift = 0.1 * size * rng.normal(size=jnp.shape(x))
        return jnp.asarray(widen(x) + shift, jnp.result_type(x))

    return jax.tree.map(move, params)
