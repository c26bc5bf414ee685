"""The noise that reaches the optimizer: its level, its distribution, its independence.

The noise comes from the program of the update, at the additions that make the
optimizer's gradient private. The change of that gradient by one example is measured
with it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import draws, neighbors
from dpadambc.audit.finding import Finding, not_tested
from dpadambc.audit.noise_tests import noise_finding
from dpadambc.audit.recorder import NotRecordable
from dpadambc.audit.steps import NotTraceable, Step, Steps, start
from dpadambc.clipping.vouched import as_clipped_sum, as_per_example
from dpadambc.core.mechanism import Mechanism
from dpadambc.mechanisms.checks import check_independent_noise

_CHECK = "noise"

MakeOptimizer = Callable[[jax.Array], optax.GradientTransformation]


class Update(NamedTuple):
    """The update of an optimizer as a step, and the gradients to try it with.

    Args:
      make_optimizer: a function of a key that returns the optimizer.
      params: the parameters, or arrays of the same shapes.
      mechanism: the mechanism whose noise is claimed.
    """

    make_optimizer: MakeOptimizer
    params: optax.Params
    mechanism: Mechanism

    def init(self, key: jax.Array) -> Any:
        """Returns the state before the first step."""
        return key, self.make_optimizer(key).init(self.params)

    def zero(self) -> optax.Updates:
        """Returns a gradient of zero."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), self.params)

    def step(self, state: Any) -> tuple[Step, bool]:
        """Returns a function of a state and arrays, and whether the arrays are a sum.

        The optimizer may take a clipped sum, as arrays or sealed, or per-example
        gradients: then the arrays are the gradient of one example.
        """

        def update(form, state, arrays):
            key, opt_state = state
            optimizer = self.make_optimizer(key)
            updates, opt_state = optimizer.update(form(arrays), opt_state, self.params)
            return updates, (key, opt_state)

        c, b = self.mechanism.l2_clip_norm, self.mechanism.normalize_by
        of_sum = lambda arrays: as_clipped_sum(arrays, l2_clip_norm=c, normalize_by=b)
        nobody = jnp.zeros(1, bool)  # is padding
        row = lambda arrays: jax.tree.map(lambda x: x[None], arrays)
        of_one = lambda arrays: as_per_example(row(arrays), is_padding_example=nobody)
        forms = lambda x: x, of_sum, of_one
        errors = []
        for form in forms:
            step = functools.partial(update, form)
            try:
                jax.eval_shape(step, state, self.zero())
            except (TypeError, ValueError) as error:
                errors.append(error)
            else:
                return step, form is not of_one
        raise errors[0]

    def gradients(self, norm: float) -> list[optax.Updates]:
        """Returns gradients of one norm: in all leaves, and in each alone."""
        leaves, structure = jax.tree.flatten(self.params)
        rng = np.random.default_rng(0)
        normal = [rng.normal(size=x.shape) for x in leaves]
        found = []
        for alone in (None, *range(min(len(leaves), 64))):
            g = [x if alone in (None, i) else 0 * x for i, x in enumerate(normal)]
            size = math.sqrt(sum(float(np.sum(x**2)) for x in g))
            if size:
                scaled = [jnp.asarray(norm / size * x, jnp.float32) for x in g]
                found.append(jax.tree.unflatten(structure, scaled))
        return found

    def varied(self, gradient: Any, number: jax.Array) -> Any:
        """Varies the gradient in each step, with one example in any number of it."""
        size = self.mechanism.sensitivity
        move = lambda x: x + size * neighbors.wave(x.shape, number)
        return jax.tree.map(move, gradient)


def _steepest(
    gradient: optax.Updates, response: draws.Response, norm: float
) -> list[optax.Updates]:
    """Returns a gradient in the coordinate with the largest factor before the noise."""
    leaves, structure = jax.tree.flatten(gradient)
    steepest = (0.0, 0, 0)
    for number, leaf in enumerate(leaves):
        flat = np.abs(np.ravel(np.asarray(leaf, float)))
        for arrived in response.values():
            if flat.any() and arrived.shape == flat.shape:
                gains = np.abs(arrived) / np.maximum(flat, 1e-300)
                where = int(np.argmax(gains))
                steepest = max(steepest, (float(gains[where]), number, where))
    gain, number, where = steepest
    if not gain:
        return []
    one = lambda x: jnp.zeros(x.size).at[where].set(norm).reshape(x.shape)
    found = [one(x) if i == number else 0 * x for i, x in enumerate(leaves)]
    return [jax.tree.unflatten(structure, found)]


def noise(
    make_optimizer: MakeOptimizer, params: optax.Params, mechanism: Mechanism
) -> Finding:
    """Tests the noise that is added to the gradient before the optimizer sees it.

    It traces the program of the update, and records the random numbers that are added
    to the gradient, in runs with separate keys and over three steps. It tests their
    level relative to the gradient at the same place, their distribution and their
    dtype. It tests their independence over leaves, steps, runs, coordinates, the first
    state and the devices of a `jax.shard_map`. One longer run shows whether they fade
    or repeat. It also checks that no part of the gradient bypasses them.

    Each statistical test has a false-alarm rate of 1e-6; `fails_if` states the size of
    a defect that it misses once in a thousand. It draws four million numbers, or those
    of four runs, and holds them in double precision: a gigabyte for a million
    parameters. The longer run has as many steps as the mechanism, at most 512, or
    twenty million numbers.

    It cannot find noise that repeats after more steps than that, or in one run of
    thousands. If several devices or microbatches add parts of the noise, each part
    counts alone, unless all are added at one place.

    Args:
      make_optimizer: a function of a key that returns a transformation with the noise
        in it, of a clipped sum or, like `dp_adam`, of per-example gradients.
      params: the parameters, or arrays of the same shapes.
      mechanism: the mechanism whose level of noise is claimed.

    Returns:
      A `Finding` with a part for each test: level, coverage, distribution,
      independence, dtype, coordinates, later steps. *Not tested* if the update cannot
      be traced, draws from the host, or the mechanism has no noise.

    Raises:
      TypeError: if `mechanism` is no mechanism.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.01,
      ...     iterations=100, normalize_by=64)
      >>> def make_optimizer(key, level=mechanism.noise_stddev):
      ...     return optax.chain(dpadambc.add_dp_noise(level, key=key), optax.adam(0.1))
      >>> half = lambda key: make_optimizer(key, mechanism.noise_stddev / 2)
      >>> audit.noise(half, jnp.zeros(1_000), mechanism).word
      'FAIL'
    """
    check_independent_noise(mechanism)
    if not callable(mechanism.noise_multiplier) and not mechanism.noise_multiplier:
        return not_tested(_CHECK, "the mechanism has no noise.")
    update = Update(make_optimizer, jax.tree.map(jnp.asarray, params), mechanism)
    try:
        state = start(update.init)
        step, is_sum = update.step(state)
        steps = Steps(step, state, update.zero(), update.varied)
        return noise_finding(_measured(update, steps, is_sum))
    except (NotTraceable, NotRecordable) as error:
        return not_tested(_CHECK, f"{error}")


def _measured(update: Update, steps: Steps, is_sum: bool) -> draws.Measured:
    mechanism, followed, zero = update.mechanism, steps.follow(), steps.data
    crossings, noise, moved = followed.crossings, {}, []
    largest = mechanism.sensitivity if is_sum else 1e3 * mechanism.l2_clip_norm
    gradients, factor = update.gradients(largest), 1.0
    if not is_sum:  # one example is added; neighbors may be further apart
        factor = mechanism.sensitivity * mechanism.normalize_by / mechanism.l2_clip_norm
    if crossings:
        _, moved = draws.movements(steps, crossings, [zero, *gradients])
        if is_sum and moved:
            data = [zero, *_steepest(gradients[0], moved[0], largest)]
            moved += draws.movements(steps, crossings, data)[1]
        noise = draws.draw(steps, update.init, crossings)
        noise, moved = draws.once(noise, moved, factor)
    step = mechanism, steps, followed, steps.state
    return draws.Measured(*step, [zero, *gradients[:1]], factor, None, noise, moved)
