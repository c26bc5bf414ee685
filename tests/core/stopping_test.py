"""A run that stops early costs all steps that it might have taken."""

import numpy as np
import optax
import pytest
from scipy import optimize, stats

from dpadambc import training
from tests.attacks import MECHANISM, fit, mechanism

pytestmark = pytest.mark.guarantee


def stop_at(step, **options):
    def callback(progress):
        if progress.iterations == step:
            raise training.Stop(**options)

    return callback


def test_a28_a_stop_that_may_depend_on_the_data_costs_all_steps():
    assert MECHANISM.iterations > 1
    everything = fit(callbacks=stop_at(1))
    taken = fit(callbacks=stop_at(1, is_public=True))
    assert everything.iterations == taken.iterations == 1
    assert everything.epsilon == MECHANISM.epsilon(1e-5) > taken.epsilon
    assert taken.epsilon == MECHANISM.epsilon(1e-5, iterations=1)
    assert everything.epsilon_of_this_run() == everything.spent.epsilon(1e-5)
    # Of several callbacks too.
    both = fit(callbacks=[lambda progress: None, stop_at(1)])
    assert (both.iterations, both.epsilon) == (1, everything.epsilon)
    assert everything.spent.runs[0].steps == MECHANISM.iterations
    # With a budget, all steps are those that it affords.
    target = MECHANISM.epsilon(1e-5, iterations=3)
    within = fit(callbacks=stop_at(1), target_epsilon=target)
    assert within.epsilon == target


@pytest.mark.slow
def test_a10_fewer_steps_than_were_planned_cost_those(tmp_path):
    """After a stop by what was released, the folder has the steps that were taken."""

    def stop(progress):
        if progress.iterations == 8:
            raise training.Stop

    few = mechanism(iterations=8)
    options = dict(optimizer=optax.adam(0.1), steps_per_call=8)
    saved = lambda: training.Checkpoints(tmp_path)
    stopped = fit(checkpoints=saved(), callbacks=stop, **options)
    again = fit(checkpoints=saved(), mechanism=few, **options)
    assert stopped.iterations == again.iterations == 8
    assert stopped.epsilon == MECHANISM.epsilon(1e-5) == again.epsilon
    whole = fit(checkpoints=saved(), **options)
    assert whole.iterations == 20 and whole.epsilon == stopped.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "times"), [(1e-3, 5.5), (1e-5, 8.0)])
def test_a28_what_stopping_at_the_right_moment_did(delta, times):
    """Negative control: delta of the epsilon of the steps that were taken.

    A sum of steps that one example moves by 1, with noise of deviation z, stops where
    the privacy loss exceeds the epsilon of so many steps. Paths are drawn with a drift
    under which they do, and weighted.
    """
    z, steps, paths = 20.0, np.arange(1, 401), 20_000
    mu = np.sqrt(steps) / z
    epsilons = np.array([gaussian_epsilon(m, delta) for m in mu])
    drift = 1 + 4 * z / np.sqrt(len(steps))
    rng = np.random.default_rng(0)
    sums = np.cumsum(rng.normal(drift, z, (paths, len(steps))), axis=1)
    losses = sums / z**2 - steps / 2 / z**2
    likelihoods = (1 - drift) * sums / z**2 + (drift**2 - 1) * steps / 2 / z**2
    is_beyond = losses >= epsilons + 0.15
    first = is_beyond.argmax(axis=1)
    rows = np.arange(paths)
    excess = 1 - np.exp(epsilons[first] - losses[rows, first])
    each = is_beyond.any(axis=1) * np.exp(likelihoods[rows, first]) * excess
    error = each.std() / np.sqrt(paths)
    assert abs(each.mean() - times * delta) < 5 * error < times * delta / 4
    # At the last step alone, it is what is stated.
    at_the_end = np.exp(likelihoods[:, -1]) * np.maximum(
        1 - np.exp(epsilons[-1] - losses[:, -1]), 0
    )
    error = at_the_end.std() / np.sqrt(paths)
    assert abs(at_the_end.mean() - delta) < 5 * error < delta


def gaussian_epsilon(mu, delta):
    """Of a Gaussian whose mean moves by mu, in units of its noise."""
    cdf = stats.norm.cdf
    of = lambda e: cdf(mu / 2 - e / mu) - np.exp(e) * cdf(-mu / 2 - e / mu) - delta
    return optimize.brentq(of, 0, 60) if of(0) > 0 else 0.0
