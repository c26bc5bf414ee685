"""Compares the noise that a correction subtracts with the noise in its input."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import statistics
from dpadambc.audit.finding import Finding, not_tested, within
from dpadambc.audit.noise import MakeOptimizer, Update
from dpadambc.audit.steps import NotTraceable, start
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import stddev_per_leaf
from dpadambc.mechanisms.checks import check_mechanism

_CHECK = "correction"
_STEPS = 24
_MOST_VALUES = 8_000_000
_ROUNDING = 1e-3


def _corrections(opt_state: Any) -> list[Any]:
    """Returns the corrections' states in an optimizer's state, with moments."""
    is_one = lambda node: hasattr(node, "nu") and hasattr(node, "noise_variance")
    found = filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one))
    return [node for node in found if jax.tree.leaves(node.nu)]


def _moments(node: Any) -> tuple[Any, Any]:
    """Sums the second moments of a correction, and the noise that it subtracts."""
    leaves = jax.tree.leaves(node.nu)
    levels = jax.tree.leaves(stddev_per_leaf(node.noise_variance, node.nu))
    noise = sum(v * nu.size for v, nu in zip(levels, leaves, strict=True))
    return sum(map(jnp.sum, leaves)), noise


def is_corrected(make_optimizer: MakeOptimizer, params: optax.Params) -> bool:
    """Returns whether an optimizer's state has a correction like `scale_by_adam_bc`."""
    init = lambda key: make_optimizer(key).init(params)
    return bool(_corrections(jax.eval_shape(init, jax.random.key(0))))


def correction(
    make_optimizer: MakeOptimizer, params: optax.Params, mechanism: Mechanism
) -> Finding:
    r"""Compares the noise that a correction subtracts with that in its second moment.

    A gradient of zero has the clean second moment 0, so that
    :math:`\mathbb{E}[\hat v - \hat \Phi]` must be 0: all of :math:`\hat v` is noise.
    The chain runs 24 steps with separate keys in each of many runs, and the mean of
    :math:`\hat v` is compared with that of :math:`\hat \Phi`. Both include every stage
    between the noise and the correction. The fraction of :math:`\hat \Phi` that is
    subtracted, the argument `correction`, is not in the state and is not checked.

    Args:
      make_optimizer: a function of a key that returns the chain with the noise in it.
      params: the parameters, or arrays of the same shapes.
      mechanism: the mechanism of the incoming gradients.

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
    update = Update(make_optimizer, jax.tree.map(jnp.asarray, params), mechanism)
    try:
        step, _ = update.step(start(update.init))
    except NotTraceable as error:
        return not_tested(_CHECK, f"{error}")
    shapes = jax.eval_shape(update.init, jax.random.key(0))
    if not (nodes := _corrections(shapes)):
        reason = "no correction in the state, such as of scale_by_adam_bc."
        return not_tested(_CHECK, reason)
    size = sum(x.size for node in nodes for x in jax.tree.leaves(node.nu))

    def one(key):
        advance = lambda state, _: (step(state, update.zero())[1], None)
        state = jax.tree.map(jnp.asarray, update.init(key))
        state, _ = jax.lax.scan(advance, state, length=_STEPS)
        return list(map(_moments, _corrections(state)))

    runs = int(np.clip(_MOST_VALUES // max(1, size * _STEPS), 32, 2_048))
    keys = jax.random.split(jax.random.key(1_312_333), runs)
    found = []
    for moments, noise in jax.jit(functools.partial(jax.lax.map, one))(keys):
        moments, noise = np.asarray(moments, float), np.asarray(noise, float)
        if not np.any(noise):
            found.append((math.inf, 1.0))
            continue
        ratios = moments / np.mean(noise)
        error = float(ratios.std(ddof=1) / math.sqrt(runs))
        found.append((float(ratios.mean()), error))
    # Without noise the error is zero.
    ratio, error = max(found, key=lambda x: abs(x[0] - 1) / max(x[1], 1e-12))
    bound = _ROUNDING + statistics.normal_bound() * error
    power = _ROUNDING + statistics.detected() * error
    sentence = f"The second moment has {ratio:.4g} of the predicted noise."
    fails_if = f"fails if the noise variance is off by {power:.2g}"
    return within(_CHECK, abs(ratio - 1), bound, sentence, fails_if)
