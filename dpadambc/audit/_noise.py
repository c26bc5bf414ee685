"""The noise that reaches the optimizer: its level, its distribution, its independence.

The noise is taken from the program of the update, at the additions that make private
what the optimizer gets. How much of the gradient arrives there is measured beside it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import (
    _arrays,
    _drawn,
    _flow,
    _later,
    _neighbors,
    _noise_tests,
    _recorder,
    _steps,
)
from dpadambc.audit._finding import Finding, combined, not_tested
from dpadambc.core.mechanism import Mechanism, check_independent_noise
from dpadambc.gradients import as_per_example

_CHECK = "noise"

Make = Callable[[jax.Array], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of an optimizer as a step, and what it is tried with."""

    make: Make
    params: optax.Params
    mechanism: Mechanism

    def init(self, key: jax.Array) -> Any:
        return key, self.make(key).init(self.params)

    def of_sum(self, state: Any, gradient: Any, form: Any = lambda sum: sum) -> Any:
        key, opt_state = state
        optimizer = self.make(key)
        updates, opt_state = optimizer.update(form(gradient), opt_state, self.params)
        return updates, (key, opt_state)

    def of_examples(self, state: Any, gradients: Any) -> Any:
        mask = jnp.zeros(1, bool)
        return self.of_sum(state, as_per_example(gradients, is_padding_example=mask))

    def trials(self, state: Any) -> tuple[_steps.Step, Any, list[Any]]:
        """The step, a gradient of zero, and those of neighbors of that."""
        mechanism = self.mechanism
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), self.params)
        errors = []
        for form in _arrays.forms_of_sums(mechanism):
            step = functools.partial(self.of_sum, form=form)
            try:
                jax.eval_shape(step, state, zero)
            except (TypeError, ValueError) as error:
                errors.append(error)
                continue
            return step, zero, _gradients(self.params, mechanism.sensitivity)
        one = lambda tree: jax.tree.map(lambda x: x[None], tree)
        large = _gradients(self.params, 1e3 * mechanism.l2_clip_norm)
        try:
            jax.eval_shape(self.of_examples, state, one(zero))
        except (TypeError, ValueError):
            raise errors[0] from None
        return self.of_examples, one(zero), list(map(one, large))

    def others_in_each_step(self, gradient: Any, number: jax.Array) -> Any:
        """Other gradients in each step, of which each number may be one example's."""
        size = self.mechanism.sensitivity
        move = lambda x: x + size * _neighbors.wave(x.shape, number)
        return jax.tree.map(move, gradient)


def _at_the_steepest(
    gradient: optax.Updates, response: _drawn.Response, norm: float
) -> list[optax.Updates]:
    """In one coordinate: that which is multiplied by most on its way to the noise."""
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


def _gradients(params: optax.Params, norm: float) -> list[optax.Updates]:
    """Of one norm: in all leaves, and in each alone."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    draws = [rng.normal(size=x.shape) for x in leaves]
    found = []
    for alone in (None, *range(min(len(leaves), 64))):
        g = [x if alone in (None, i) else 0 * x for i, x in enumerate(draws)]
        size = math.sqrt(sum(float(np.sum(x**2)) for x in g))
        if size:
            scaled = [jnp.asarray(norm / size * x, jnp.float32) for x in g]
            found.append(jax.tree.unflatten(structure, scaled))
    return found


def noise(make_optimizer: Make, params: optax.Params, mechanism: Mechanism) -> Finding:
    """What is added to the gradient before the optimizer sees it.

    It traces the program of the update, and records the random numbers that are added
    to the gradient, in runs with keys of their own and over three steps. It tests their
    level relative to the gradient that arrives there, their distribution and their
    dtype. It tests their independence over leaves, steps, runs, coordinates, the first
    state and the devices of a `jax.shard_map`. One longer run shows whether they fade
    or repeat. It also checks that no part of the gradient bypasses them.

    Each statistical test has a false-alarm rate of 1e-6; `fails_if` states what it
    misses but once in a thousand. It draws four million numbers, or those of four
    runs, and holds them in double: a gigabyte for a million parameters. The longer run
    has as many steps as the mechanism, at most 512, or twenty million numbers.

    What it cannot find: noise that repeats after more steps than that, or in one run of
    thousands; noise that several devices or microbatches add in parts counts as each
    part alone, unless all are added at one place.

    Args:
      make_optimizer: of a key, returns a transformation of a clipped sum with the noise
        in it, or one of gradients per example, such as `dp_adam`.
      params: what is trained, or arrays of the same shapes.
      mechanism: whose level of noise is claimed.

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
        state = _steps.start(update.init)
        step, zero, gradients = update.trials(state)
        steps = _steps.Steps(step, state, zero, update.others_in_each_step)
        is_of_sum = step != update.of_examples
        followed = steps.follow()
        if not followed.crossings:
            return without_crossings(followed)
        _, moved = _drawn.movements(steps, followed.crossings, [zero, *gradients])
        if is_of_sum and moved:
            steepest = _at_the_steepest(gradients[0], moved[0], mechanism.sensitivity)
            data = [zero, *steepest]
            moved += _drawn.movements(steps, followed.crossings, data)[1]
        if not is_of_sum:  # one example was added
            factor = _factor(mechanism)
            moved = [{path: factor * x for path, x in m.items()} for m in moved]
        drawn = _drawn.draw(steps, update.init, followed.crossings)
        drawn, moved = _drawn.once(drawn, moved)
        return combined(
            _CHECK,
            [
                *_noise_tests.all_tests(mechanism, followed, drawn, moved),
                _later.later(
                    steps,
                    followed,
                    mechanism,
                    drawn,
                    [zero, gradients[0]],
                    1.0 if is_of_sum else _factor(mechanism),
                ),
            ],
        )
    except (_steps.NotTraceable, _recorder.NotRecordable) as error:
        return not_tested(_CHECK, f"{error}")


def _factor(mechanism: Mechanism) -> float:
    """How far neighbors are apart, in units of one example and none."""
    return mechanism.sensitivity * mechanism.normalize_by / mechanism.l2_clip_norm


def without_crossings(followed: _steps.Followed) -> Finding:
    """Where no noise is added at all."""
    if followed.of(_flow.Label.OPAQUE):
        return not_tested(_CHECK, _noise_tests.UNFOLLOWED)
    if not followed.of(_flow.Label.DATA):
        return not_tested(_CHECK, "nothing that is kept depends on the data.")
    return combined(_CHECK, [_noise_tests.coverage(followed, {}, [])])
