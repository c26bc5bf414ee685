"""That the correction takes out the noise that arrives there."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import _noise, _statistics, _steps
from dpadambc.audit._finding import Finding, not_tested, within
from dpadambc.contrib import (
    ScaleByAdafactorBCState,
    ScaleByAdemamixBCState,
)
from dpadambc.core import noise_level
from dpadambc.core.mechanism import Mechanism, check_mechanism
from dpadambc.transforms import (
    ScaleByAdamBCState,
    ScaleByRmsBCState,
)

_CHECK = "correction"
_STEPS = 24
_MOST_VALUES = 8_000_000
_ROUNDING = 1e-3
_STATES = (
    ScaleByAdafactorBCState,
    ScaleByAdamBCState,
    ScaleByAdemamixBCState,
    ScaleByRmsBCState,
)


def _is_correction(node: Any) -> bool:
    return isinstance(node, _STATES)


def _moments(opt_state: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Of each correction: the sums of second moments, and of what is subtracted."""
    found = []
    for node in jax.tree.leaves(opt_state, is_leaf=_is_correction):
        if _is_correction(node) and jax.tree.leaves(node.nu):
            levels = noise_level.per_leaf(node.noise_variance, node.nu)
            pairs = zip(jax.tree.leaves(node.nu), jax.tree.leaves(levels), strict=True)
            sums = [(jnp.sum(nu), level * nu.size) for nu, level in pairs]
            found.append(tuple(map(sum, zip(*sums, strict=True))))
    return found


def is_corrected(make_optimizer: _noise.Make, params: optax.Params) -> bool:
    """Whether the state of an optimizer has a correction, as of `scale_by_adam_bc`."""
    state = jax.eval_shape(
        lambda key: make_optimizer(key).init(params), jax.random.key(0)
    )
    return any(map(_is_correction, jax.tree.leaves(state, is_leaf=_is_correction)))


def correction(
    make_optimizer: _noise.Make, params: optax.Params, mechanism: Mechanism
) -> Finding:
    r"""Compares the noise that a correction subtracts with that in its second moment.

    A gradient of zero has the clean second moment 0, so that
    :math:`\mathbb{E}[\hat v - \hat \Phi]` must be 0: all of :math:`\hat v` is noise.
    The chain runs 24 steps with keys of its own in each of many runs, and the mean of
    :math:`\hat v` is compared with that of :math:`\hat \Phi`. Both include every stage
    between the noise and the correction. Of :math:`\hat \Phi` the share named
    `correction` is subtracted, which is no part of the state, and not looked at.

    Args:
      make_optimizer: as for `noise`: of a key, returns the chain with the noise in it.
      params: what is trained, or arrays of the same shapes.
      mechanism: whose gradients come in.

    Returns:
      A `Finding`: the largest deviation of mean v̂ from mean Φ̂, relative. *Not tested*
      if there is no correction, such as `scale_by_adam_bc`, in the chain.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.01,
      ...     iterations=100, normalize_by=64)
      >>> make_optimizer = lambda key: dpadambc.dp_adam_bc(0.1, mechanism, key=key)
      >>> audit.correction(make_optimizer, jnp.zeros(1_000), mechanism).passed
      True
      >>> def averaged(key):
      ...     adam_bc = dpadambc.adam_bc(0.1, mechanism.noise_stddev)
      ...     multi_steps = optax.MultiSteps(adam_bc, 4).gradient_transformation()
      ...     return optax.chain(dpadambc.privatize(mechanism, key=key), multi_steps)
      >>> audit.correction(averaged, jnp.zeros(1_000), mechanism).word
      'FAIL'
    """
    check_mechanism(mechanism)
    update = _noise.Update(make_optimizer, jax.tree.map(jnp.asarray, params), mechanism)
    try:
        step, zero, _ = update.trials(_steps.start(update.init))
    except _steps.NotTraceable as error:
        return not_tested(_CHECK, f"{error}")
    return _of_steps(update.init, step, zero)


def _of_steps(init: Any, step: Any, zero: Any) -> Finding:
    """The finding for a step, with data whose gradient is zero."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    if not jax.eval_shape(_moments, shapes):
        return not_tested(
            _CHECK, "no correction in the state, such as of scale_by_adam_bc."
        )
    nodes = jax.tree.leaves(shapes, is_leaf=_is_correction)
    size = sum(
        math.prod(x.shape)
        for node in nodes
        if _is_correction(node)
        for x in jax.tree.leaves(node.nu)
    )
    runs = int(np.clip(_MOST_VALUES // max(1, size * _STEPS), 32, 2_048))

    def one(key):
        advance = lambda state, _: (step(state, zero)[1], None)
        state = jax.tree.map(jnp.asarray, init(key))
        return _moments(jax.lax.scan(advance, state, length=_STEPS)[0])

    keys = jax.random.split(jax.random.key(1_312_333), runs)
    found = jax.jit(functools.partial(jax.lax.map, one))(keys)
    # Without noise the error is zero.
    worst = max(map(_compared, found), key=lambda x: abs(x[0] - 1) / max(x[1], 1e-12))
    ratio, error = worst
    bound = _ROUNDING + _statistics.normal_bound() * error
    power = _ROUNDING + _statistics.detected() * error
    return within(
        _CHECK,
        abs(ratio - 1),
        bound,
        f"The second moment has {ratio:.4g} of the noise that the correction knows of.",
        f"fails if the noise variance is off by {power:.2g}",
    )


def _compared(pair: tuple[jax.Array, jax.Array]) -> tuple[float, float]:
    """The mean of v̂ over that of Φ̂, and its standard error."""
    moments, subtracted = (np.asarray(x, float) for x in pair)
    if not np.any(subtracted):
        return math.inf, 1.0
    ratios = moments / np.mean(subtracted)
    return float(ratios.mean()), float(ratios.std(ddof=1) / math.sqrt(len(ratios)))
