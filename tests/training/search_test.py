"""A search returns what its epsilon is of, and nothing else."""

import dataclasses
import inspect
import re
import sys

import chex
import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import dpadambc
from dpadambc import accounting, graphs, training
from tests import common

# Its module, which has the name of its function.
tuning = sys.modules[training.search.__module__]
X = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
DATA, HELD_OUT = (X[:200], Y[:200]), (X[200:], Y[200:])
MECHANISM = common.poisson_gaussian(iterations=8)
ONE_STEP = common.poisson_gaussian(iterations=1, sampling_prob=1.0)
RATES = [0.001, 0.3, 0.03]


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def negative_loss(w, x, y):
    return -loss_fn(w, x, y)


PUBLIC = training.PublicScore(negative_loss, HELD_OUT)
NOISY = training.NoisyScore(
    lambda w, x, y: loss_fn(w, x, y) < 1, DATA, noise_multiplier=3.0, normalize_by=200
)


# Trials are told by the key of a search.
pytestmark = pytest.mark.usefixtures("one_identity")


def search(**changes):
    arguments = dict(
        loss_fn=loss_fn,
        params=jnp.zeros(3),
        data=DATA,
        mechanism=MECHANISM,
        make_optimizer=optax.adam,
        candidates=RATES,
        trials=accounting.FixedTrials(3),
        score=PUBLIC,
        key=jax.random.key(0),
        target_delta=1e-5,
    )
    return training.search(**arguments | changes)


def key_with(distribution, wanted):
    """A key with which that many trials are drawn."""
    for seed in range(100):
        key = jax.random.key(seed)
        if len(tuning._drawn_from(key, distribution)[1]) == wanted:
            return key


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_every_trial_is_a_run_of_fit():
    """With a key of its own, the optimizer of its candidate, and the score said."""
    found = search(trials_at_once=2)
    assert [trial.candidate for trial in found.all_trials] == RATES
    trial_keys = tuning._drawn_from(jax.random.key(0), accounting.FixedTrials(3))[1]
    # Of the second call; what is in a call is compared below.
    for trial, key in list(zip(found.all_trials, trial_keys, strict=True))[2:]:
        run = training.fit(
            loss_fn,
            jnp.zeros(3),
            DATA,
            MECHANISM,
            optax.adam(trial.candidate),
            key=key,
            target_delta=1e-5,
        )
        np.testing.assert_allclose(trial.params, run.state.params, rtol=1e-4)
        score = np.mean(
            [negative_loss(trial.params, *row) for row in zip(*HELD_OUT, strict=True)]
        )
        assert trial.score == pytest.approx(score, rel=1e-4)
    assert found.best.score == max(trial.score for trial in found.all_trials)
    expected = accounting.tuned_epsilon(
        MECHANISM, 1e-5, trials=accounting.FixedTrials(3)
    )
    assert found.epsilon == expected.epsilon


@pytest.mark.slow
def test_one_program_is_traced_however_many_trials_and_candidates_there_are():
    @chex.assert_max_traces(n=1)
    def make_optimizer(*, rate, b1):
        return optax.adam(rate, b1=b1)

    candidates = [{"rate": rate, "b1": b1} for rate in RATES for b1 in (0.5, 0.9)]
    distribution = accounting.GeometricTrials(8)
    found = search(
        make_optimizer=make_optimizer,
        candidates=candidates,
        trials=distribution,
        key=key_with(distribution, 5),
        trials_at_once=2,
    )
    assert found.best.candidate in candidates


def test_an_optimizer_that_branches_on_a_candidate_is_told_what_to_do():
    branches = lambda rate: optax.adam(rate) if rate > 0 else optax.sgd(rate)
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        search(make_optimizer=branches)
    assert "schedule(step)" in "".join(error.value.__notes__)


def test_a_schedule_of_peak_one_may_be_multiplied_by_a_candidate():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 8)
    found = search(make_optimizer=lambda r: optax.adam(lambda step: r * schedule(step)))
    assert found.best.candidate in RATES


@pytest.mark.slow
def test_how_many_at_once_changes_nothing():
    alone, together = search(), search(trials_at_once=3)
    for a, b in zip(alone.all_trials, together.all_trials, strict=True):
        np.testing.assert_allclose(a.params, b.params, rtol=1e-4)
        assert a.score == pytest.approx(b.score, rel=1e-4)


def test_a_loss_with_all_that_it_may_take():
    def with_all(w, frozen, x, y, *, key):
        return (w @ (frozen * x) + 0.1 * jax.random.normal(key) - y) ** 2

    found = search(
        loss_fn=with_all,
        frozen=jnp.ones(3),
        microbatch_size=20,
        score=training.PublicScore(
            lambda w, frozen, x, y: -((w @ (frozen * x) - y) ** 2), HELD_OUT
        ),
    )
    assert found.best.score > -10


def test_of_a_random_number_the_best_alone_is_told():
    distribution = accounting.GeometricTrials(4)
    found = search(trials=distribution, key=key_with(distribution, 4))
    assert found.all_trials is found.runs is None
    fields = "best", "cost", "target_delta", "mechanism", "trials", "all_trials", "runs"
    assert found._fields == fields
    assert found.trials == distribution
    # The epsilon is that of the distribution, whatever was drawn from it.
    assert found.cost == accounting.tuned_epsilon(MECHANISM, 1e-5, trials=distribution)
    # A search is given no way to watch it.
    options = set(inspect.signature(training.search).parameters)
    assert not options & {"callbacks", "checkpoints"}


@pytest.mark.guarantee
def test_no_program_has_the_number_of_trials_in_its_shapes(caplog):
    """JAX logs the shapes of what it compiles, if it is asked to."""
    distribution = accounting.GeometricTrials(13)
    key = key_with(distribution, 17)
    with jax.log_compiles():
        search(trials=distribution, key=key, trials_at_once=2, mechanism=ONE_STEP)
        assert "key<fry>[2]" in caplog.text  # of two trials at once
        assert not re.search(r"[\[,]17[\],]", caplog.text)
        jax.random.split(key, 17)[np.arange(2)]  # negative control
        assert re.search(r"[\[,]17[\],]", caplog.text)


def test_a_search_is_no_run_that_a_release_states_the_epsilon_of():
    with pytest.raises(TypeError, match="SearchResult"):
        training.releasable(search(mechanism=ONE_STEP))


def test_none_may_be_drawn():
    distribution = accounting.PoissonTrials(1)
    key = key_with(distribution, 0)
    found = search(trials=distribution, key=key, mechanism=ONE_STEP)
    assert found.best is None
    assert found.epsilon > 0
    with pytest.raises(ValueError, match="search of none"):
        found.params  # noqa: B018


@pytest.mark.guarantee
def test_numbers_and_candidates_are_drawn_as_they_are_accounted_for():
    distribution, numbers, chosen, words = accounting.GeometricTrials(4), [], [], set()
    for seed in range(400):
        rng, keys = tuning._drawn_from(jax.random.key(seed), distribution)
        numbers.append(len(keys))
        chosen.extend(tuning._chosen(rng, distribution, 5, len(keys)))
        words.update(w for key in keys for w in jax.random.key_data(key).tolist())
    assert len(words) > 1.99 * sum(numbers)  # no key twice
    cells = np.bincount(np.minimum(numbers, 12), minlength=13)[1:]
    pmf = distribution.pmf(np.arange(1, 12))
    expected = 400 * np.append(pmf, 1 - pmf.sum())
    assert scipy.stats.chisquare(cells, expected).pvalue > 1e-3
    assert scipy.stats.chisquare(np.bincount(chosen, minlength=5)).pvalue > 1e-3


def test_the_best_is_the_best_and_equal_ones_are_drawn_from():
    rng = np.random.default_rng(0)
    of = lambda *scores: [tuning.Trial(i, i, s) for i, s in enumerate(scores)]
    best = lambda *scores: tuning._best(of(*scores), rng).candidate
    assert best(float("nan"), -5.0, -2.0, -float("inf")) == 2
    assert best(float("nan")) == 0
    counts = np.bincount([best(1.0, 1.0, 0.0, 1.0) for _ in range(900)], minlength=4)
    assert counts[2] == 0
    assert scipy.stats.chisquare(counts[[0, 1, 3]]).pvalue > 1e-3


@pytest.mark.guarantee
@pytest.mark.parametrize("relation", list(dpadambc.NeighboringRelation))
def test_a_private_score_is_in_the_epsilon_of_each_trial(relation):
    """Two Gaussians are one, in the units of every relation and accountant."""
    mechanism = common.poisson_gaussian(
        sampling_prob=1.0,
        iterations=1,
        noise_multiplier=3.0,
        neighboring_relation=relation,
    )
    event = NOISY.compose(mechanism.dp_event(), mechanism.neighboring_relation)
    one = {
        accountant: accounting.epsilon(
            event,
            target_delta=1e-5,
            neighboring_relation=relation,
            accountant=accountant,
        )
        for accountant in (accounting.PLD, accounting.RDP)
    }
    as_one = dp_accounting.GaussianDpEvent(3.0 / np.sqrt(2))
    add = dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE
    for name, epsilon in one.items():
        exact = accounting.epsilon(
            as_one, target_delta=1e-5, neighboring_relation=add, accountant=name
        )
        assert epsilon == pytest.approx(exact, rel=2e-3)
        alone = mechanism.epsilon(1e-5, accountant=name)
        assert alone < 0.75 * epsilon  # negative control
    relation = mechanism.neighboring_relation
    assert PUBLIC.compose(mechanism.dp_event(), relation) == mechanism.dp_event()


def test_a_search_by_a_private_score_costs_its_noise_too():
    found = search(score=NOISY, trials=accounting.GeometricTrials(4))
    assert found.cost.of_one_trial > MECHANISM.epsilon(1e-5)
    assert abs(found.best.score) < 1.2


@pytest.mark.guarantee
def test_a_private_score_has_the_noise_and_the_sensitivity_that_are_accounted_for():
    rng = np.random.default_rng(0)
    scores = np.array([0.2, 5.0, -3.0, np.nan, np.inf])
    drawn = np.array([NOISY.summary(scores, rng) for _ in range(4_000)]) * 200
    assert drawn.mean() == pytest.approx(2.2, abs=5 * 3 / np.sqrt(4_000))
    chi = lambda z: scipy.stats.chi2.cdf(np.var(drawn) / z**2 * 4_000, 3_999)
    assert 1e-3 < chi(3.0) < 1 - 1e-3
    assert not 1e-3 < chi(3.3) < 1 - 1e-3  # negative control
    tiny = dataclasses.replace(NOISY, noise_multiplier=1e-12)
    silent = lambda x: tiny.summary(np.array(x), np.random.default_rng(1)) * 200
    for worst in (1e30, -1e30, np.nan, np.inf):
        base = [0.5] * 50
        assert abs(silent([*base, worst]) - silent(base)) <= 1 + 1e-9
        assert abs(silent([*base, worst]) - silent([*base, 0.0])) <= 1 + 1e-9


@pytest.mark.guarantee
def test_a_private_score_has_other_noise_for_another_sum():
    """One generator for two sums, of which the difference would be bare."""
    noise_of = lambda x, **changes: (
        dataclasses.replace(NOISY, **changes).summary(
            np.array(x), np.random.default_rng(1)
        )
        * 200
        - sum(x)
    )
    one, other = [0.5, 0.25], [0.5, 0.26]
    assert noise_of(one) == noise_of(one)
    assert abs(noise_of(one) - noise_of(other)) > 1e-3
    # Nor do two levels show the sum.
    twice = noise_of(one, noise_multiplier=2 * NOISY.noise_multiplier)
    assert abs(twice / noise_of(one) - 2) > 1e-3


def graph_mechanism():
    return graphs.NodePoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        max_terms=4,
        sampling_prob=0.25,
        iterations=8,
        normalize_by=50,
    )


@pytest.mark.guarantee
def test_a_score_that_is_printed_shows_no_data():
    """As a notebook does with what stands last in a cell, and a log."""
    data = np.full((3, 2), 4321.5), np.full(3, 4321.5)
    noisy = training.NoisyScore(
        negative_loss, data, noise_multiplier=3.0, normalize_by=2.0
    )
    for shown in (repr(training.PublicScore(negative_loss, data)), repr(noisy)):
        assert "score_fn=" in shown and "4321" not in shown
    assert "normalize_by=2.0" in repr(noisy)


class Rows:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return X[index], Y[index]


RBG = jax.random.key(0, impl="rbg")
NOISES = optax.chain(dpadambc.add_dp_noise(0.1, key=jax.random.key(0)), optax.sgd(0.1))


NODES = dict(
    loss_fn=lambda w, x, i, y: (dpadambc.graphs.gather(x, i).mean(0) @ w - y) ** 2,
    data=(np.stack([np.arange(200), np.arange(1, 201)], 1), Y[:200]),
    frozen=jnp.asarray(X),
    mechanism=graph_mechanism(),
)


@pytest.mark.guarantee
def test_a_private_score_of_nodes_is_refused():
    """By the program, whatever it makes of them, or by the mechanism; no other is."""
    gathered = lambda *arguments: -NODES["loss_fn"](*arguments)
    noisy = lambda fn: training.NoisyScore(fn, NODES["data"], 3.0, 200)
    plain = {"loss_fn": lambda w, x, i, y: (w @ x[0] - y) ** 2, "mechanism": MECHANISM}
    indexed = lambda w, x, i, y: x[i].mean(0) @ w > y  # of public features
    for fn in (gathered, jax.checkpoint(gathered), lambda *rest: 0 * gathered(*rest)):
        with pytest.raises(ValueError, match="NoisyScore"):
            search(**NODES | plain | {"score": noisy(fn)})
    with pytest.raises(ValueError, match="NoisyScore"):
        search(**NODES | {"score": noisy(indexed)})
    assert search(**NODES | plain | {"score": noisy(indexed)}).best
    public = training.PublicScore(gathered, jax.tree.map(np.copy, NODES["data"]))
    assert search(**NODES | {"score": public}).best


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"score": negative_loss}, TypeError, "score"),
        ({"score": None}, TypeError, "score"),
        ({"score": NOISY, "mechanism": graph_mechanism()}, ValueError, "NoisyScore"),
        ({"data": Rows()}, TypeError, "data"),
        ({"trials": 8}, TypeError, "trials|distribution"),
        ({"trials": accounting.FixedTrials(8)}, ValueError, "trials"),
        ({"candidates": []}, TypeError, "candidates"),
        ({"candidates": 0.1}, TypeError, "candidates"),
        ({"candidates": [0.1, {"learning_rate": 0.1}]}, ValueError, "candidates"),
        ({"candidates": [{"b1": 0.1}, {"b2": 0.1}]}, ValueError, "candidates"),
        ({"candidates": [[0.1], [0.2]]}, ValueError, "candidates"),
        ({"candidates": ["adam", "sgd"]}, TypeError, "candidates"),
        ({"candidates": [True, False]}, TypeError, "candidates"),
        ({"make_optimizer": lambda rate: rate}, TypeError, "optimizer"),
        ({"make_optimizer": lambda rate: NOISES}, ValueError, "optimizer"),
        ({"key": 0}, TypeError, "key"),
        ({"key": RBG, "trials_at_once": 2}, ValueError, "another kind"),
        ({"trials_at_once": 0}, ValueError, "trials_at_once"),
        ({"target_delta": 1.0}, ValueError, "delta"),
    ],
)
def test_refused_before_anything_is_trained(change, error, message, monkeypatch):
    monkeypatch.setattr(tuning, "_trained", None)
    with pytest.raises(error, match=message):
        search(**change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"score_fn": 3}, TypeError, "score_fn"),
        ({"data": Rows()}, TypeError, "arrays"),
        ({"data": (X[:0], Y[:0])}, ValueError, "example"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": np.inf}, ValueError, "noise_multiplier"),
        ({"normalize_by": -1}, ValueError, "normalize_by"),
    ],
)
def test_no_score_of_other_numbers(change, error, message):
    numbers = dict(score_fn=loss_fn, data=DATA, noise_multiplier=1.0, normalize_by=10)
    with pytest.raises(error, match=message):
        training.NoisyScore(**numbers | change)


def test_a_score_of_an_example_is_a_number():
    with pytest.raises(ValueError, match="score"):
        search(score=training.PublicScore(lambda w, x, y: w * x, HELD_OUT))


def test_a_public_score_of_an_array_of_the_training_data_is_refused():
    x, y = DATA
    for data in (DATA, (x, np.copy(y)), {"x": np.copy(x), "y": y}):
        with pytest.raises(ValueError, match="NoisyScore"):
            search(score=training.PublicScore(negative_loss, data))
