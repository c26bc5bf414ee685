"""A search over hyperparameters with one epsilon: all of it is accounted for."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.accounting import Spending
from dpadambc.accounting.search import (
    TunedEpsilon,
    check_trials,
    tuned_epsilon_of_event,
)
from dpadambc.accounting.trials import FixedTrials, Trials
from dpadambc.core import data as _data
from dpadambc.core import identity as _identity
from dpadambc.core import keys, leaves, validate
from dpadambc.core.accounting import check_delta
from dpadambc.core.keys import folded_in
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.spending import public_numbers
from dpadambc.core.step import Step, draw_batch
from dpadambc.mechanisms import names
from dpadambc.training import statement
from dpadambc.training.scores import NoisyScore, PublicScore

# A number, or several by name, which `make_optimizer` is called with.
Candidate = float | dict[str, float]


class Trial(NamedTuple):
    """A model, its hyperparameters, and its score.

    Attributes:
      params: the parameters of the model.
      candidate: its hyperparameters.
      score: its score; higher is better.
    """

    params: optax.Params
    candidate: Candidate
    score: float


class SearchResult(NamedTuple):
    """The result of `search`: all of it may be published, at `epsilon`.

    It prints as a statement of its privacy, for a model card.

    Attributes:
      best: the best trial; None if a Poisson distribution drew no trial.
      cost: the epsilon of the search, with others to compare it with.
      target_delta: the delta of these epsilons.
      mechanism: the mechanism of one trial.
      trials: the distribution of the number of trials.
      all_trials: in the order of the candidates, if their number is fixed; else None.
      runs: the runs of the search, scores included, if their number is fixed; else
        None.
    """

    best: Trial | None
    cost: TunedEpsilon
    target_delta: float
    mechanism: Mechanism
    trials: Trials
    all_trials: tuple[Trial, ...] | None
    runs: Spending | None

    @property
    def spent(self) -> Spending:
        """The cost of the search, for the `spent` of a `fit` after it.

        Raises:
          ValueError: if the number of trials is random: such a search is no composition
            of runs.
        """
        if self.runs is None:
            raise ValueError(
                "Expected a search with a fixed number of trials in spent=, got one"
                " that drew it, which is no composition of runs. The epsilons of the"
                " two add, and so do the deltas: state the sums."
            )
        return self.runs

    @property
    def epsilon(self) -> float:
        """The epsilon of the whole search, at the target delta."""
        return self.cost.epsilon

    @property
    def params(self) -> optax.Params:
        """The parameters of the best model.

        Raises:
          ValueError: if no trial was drawn.
        """
        if self.best is None:
            raise ValueError(
                "Expected a trial to take params of, got a search of none."
            )
        return self.best.params

    def __str__(self) -> str:
        """Returns a paragraph for a model card, of public numbers."""
        return statement.of_search(self)


def _checked_candidates(candidates: Any) -> tuple[tuple[Candidate, ...], Any]:
    """Checks the candidates; returns them, and their numbers as arrays."""
    listed = tuple(candidates) if isinstance(candidates, Sequence) else ()
    if not listed or isinstance(candidates, str):
        raise TypeError(
            "Expected candidates as a list of numbers, or of dictionaries of numbers by"
            f" name, got {leaves.summary(candidates)}."
        )
    is_number = lambda x: jax.tree.structure(x) == jax.tree.structure(0)
    several = [each.values() if isinstance(each, dict) else [each] for each in listed]
    if len({jax.tree.structure(each) for each in listed}) > 1 or not all(
        is_number(x) for each in several for x in each
    ):
        raise ValueError(
            "Expected candidates that are all numbers, or all dictionaries of numbers"
            f" by the same names, got {listed!r}. Fix a setting that is no number: it"
            " needs another program."
        )
    for leaf in jax.tree.leaves(listed):
        if validate.known_number("candidates", leaf) is None:
            raise TypeError(f"Expected candidates to be numbers, got {leaf!r}.")
    # On the host, so that no program has their shape.
    return listed, jax.tree.map(lambda *x: np.asarray(jnp.asarray(x)), *listed)


def _made(make_optimizer: Callable[..., Any], candidate: Any) -> Any:
    """Makes the optimizer of a candidate; an error says that its numbers are traced."""
    try:
        if isinstance(candidate, dict):
            return make_optimizer(**candidate)
        return make_optimizer(candidate)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "make_optimizer gets traced numbers, since one program is compiled for all"
            " candidates: nothing in it may branch on them. Make a schedule with a peak"
            " of 1, and multiply it: lambda step: learning_rate * schedule(step)."
        )
        raise


def _check_trials(trials: Trials, num_candidates: int) -> None:
    check_trials(trials)
    if isinstance(trials, FixedTrials) and trials.number != num_candidates:
        raise ValueError(
            f"Expected trials=FixedTrials({num_candidates}), one of each candidate, got"
            f" FixedTrials({trials.number}). To draw candidates at random, take a"
            f" random number of trials, such as GeometricTrials({trials.number})."
        )


def _check_key(key: jax.Array, trials_at_once: int) -> None:
    validate.typed_key(key=key)
    if trials_at_once > 1 and jax.random.key_impl(key) in keys.DRAWS_FROM_THE_FIRST:
        raise ValueError(
            "Expected key of another kind for several trials at once, got"
            f" {jax.random.key_impl(key)}. Take training.secret_key()."
        )


def _drawn_from(
    key: jax.Array, trials: Trials
) -> tuple[np.random.Generator, list[jax.Array]]:
    """Returns the generator of the host's draws, and a list of keys, one per trial.

    An array of keys would have their secret number in its shape, which JAX writes to
    its log as it compiles.
    """
    # The words of a key as an array are on no device, and equal in all processes.
    words = jnp.asarray(np.asarray(jax.random.key_data(key)))
    key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
    key = keys.of_domain(key, "search")
    host_key, trial_key = jax.random.split(key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(host_key)).tolist())
    number = trials.sample(rng)
    return rng, [jax.random.fold_in(trial_key, i) for i in range(number)]


def _chosen(
    rng: np.random.Generator, trials: Trials, num_candidates: int, number: int
) -> np.ndarray:
    """Returns the candidate of each trial: drawn with replacement, or each once."""
    if isinstance(trials, FixedTrials):
        return np.arange(number)
    return rng.integers(num_candidates, size=number)


def _trained(
    one_trial: Callable[..., Any],
    trial_keys: list[jax.Array],
    numbers: Any,
    at_once: int,
    *shared: Any,
) -> Iterator[tuple[optax.Params, np.ndarray]]:
    """Yields parameters and scores of each trial, several in one call of a program."""
    axes = (0, 0, *(None for _ in shared))
    program = jax.jit(jax.vmap(one_trial, axes) if at_once > 1 else one_trial)
    for first in range(0, len(trial_keys), at_once):
        # The last call is padded with copies, and the copies are dropped.
        rows = np.minimum(np.arange(first, first + at_once), len(trial_keys) - 1)
        if at_once > 1:
            row_keys = jnp.stack([trial_keys[row] for row in rows])
        else:
            row_keys, rows = trial_keys[first], first
        of_rows = jax.tree.map(lambda x: x[rows], numbers)  # noqa: B023
        params, scores = program(row_keys, of_rows, *shared)
        if at_once == 1:
            params, scores = jax.tree.map(lambda x: x[None], (params, scores))
        for row in range(min(at_once, len(trial_keys) - first)):
            yield jax.tree.map(lambda x: x[row], params), np.asarray(scores[row])  # noqa: B023


def _best(scored: Iterable[Trial], rng: np.random.Generator) -> Trial | None:
    """Returns the best trial, NaN last; draws among equal scores, as in the proof."""
    rank = lambda score: -math.inf if math.isnan(score) else score
    ranked = ((rank(trial.score), rng.random(), trial) for trial in scored)
    return max(ranked, key=lambda x: x[:2], default=(None,))[-1]


@names.explained
def search(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    data: Any,
    mechanism: Mechanism,
    make_optimizer: Callable[..., optax.GradientTransformation],
    candidates: Sequence[Candidate],
    *,
    trials: Trials,
    score: PublicScore | NoisyScore,
    key: jax.Array,
    target_delta: float,
    frozen: Any = None,
    microbatch_size: int | None = None,
    trials_at_once: int = 1,
    wrt: Any = None,
) -> SearchResult:
    """Trains with several hyperparameters, and returns the best model with one epsilon.

    `search` draws the number of trials from `trials`, and keeps it secret. Each trial
    draws a candidate with replacement, trains and gets a score. The best is returned.
    With `accounting.FixedTrials(len(candidates))` all are tried and returned.

    Guarantees:
      * `result.epsilon` is of all that is returned, whatever the score; it includes a
        noisy score of protected data, and is computed before the first step.
      * Where the number of trials is random, neither it nor the other trials are
        returned. *The time of a search reveals the number*: do not publish it.
      * Not covered: earlier runs that made `params`, and runs by which the candidates
        were chosen. A search composes with others, and with a `fit` of its winner.

    Args:
      loss_fn: the loss of one example, as for `fit`.
      params: the start of all trials; do not choose it by looking at protected data.
      data: arrays.
      mechanism: the public numbers of every trial.
      make_optimizer: makes the optimizer of the private gradient from a candidate. Its
        numbers are traced: it may compute with them, and not branch on them.
      candidates: numbers, or dictionaries of numbers by the names of arguments of
        `make_optimizer`. Do not choose them by looking at protected data.
      trials: the distribution of their number, such as `accounting.GeometricTrials(8)`.
      score: a `PublicScore` or a `NoisyScore`.
      key: a typed key, a new one for each search; secret.
      target_delta: the delta of epsilon.
      frozen: as for `fit`.
      microbatch_size: as for `Step`.
      trials_at_once: how many trials are trained in one call.
      wrt: as for `fit`.

    Returns:
      A `SearchResult`.

    Raises:
      ValueError: if a number is out of range, or a noisy score gathers nodes.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from dpadambc import PoissonGaussian, accounting, training
      >>> x = jax.random.normal(jax.random.key(0), (1_200, 3))
      >>> y = x @ jnp.array([1.0, -2.0, 3.0])
      >>> loss_fn = lambda w, x, y: (w @ x - y) ** 2
      >>> mechanism = PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=4.0, sampling_prob=0.2, iterations=100,
      ...     normalize_by=200)
      >>> result = training.search(
      ...     loss_fn, jnp.zeros(3), (x[:1_000], y[:1_000]), mechanism, optax.adam,
      ...     [0.001, 0.01, 0.1], trials=accounting.GeometricTrials(9),
      ...     score=training.PublicScore(
      ...         lambda w, x, y: -loss_fn(w, x, y), (x[1_000:], y[1_000:])),
      ...     key=jax.random.key(2), target_delta=1e-5, trials_at_once=4)
      >>> print(result.best.candidate, f"{result.epsilon:.2f}")
      0.1 3.24

    References:
      Papernot and Steinke, `Hyperparameter Tuning with Renyi Differential Privacy
      <https://arxiv.org/abs/2110.03620>`_, 2021
    """
    if not isinstance(score, PublicScore | NoisyScore):
        got = "a bare function" if callable(score) else type(score)
        raise TypeError(
            "Expected score to be a training.PublicScore(score_fn, data), of data that"
            " need no protection, or a training.NoisyScore(score_fn, data,"
            f" noise_multiplier, normalize_by), of those that do, got {got}."
        )
    listed, numbers = _checked_candidates(candidates)
    _check_trials(trials, len(listed))
    _check_key(key, trials_at_once)
    validate.function(make_optimizer=make_optimizer)
    validate.count(least=1, trials_at_once=trials_at_once)
    data = leaves.with_dictionaries(data)
    if _data.is_source(data):
        raise TypeError("Expected data as arrays, for one program, got a source.")
    num_examples = _data.num_examples(data)
    check_delta(target_delta, num_examples)
    step_of = lambda candidate: Step(
        loss_fn, mechanism, _made(make_optimizer, candidate), microbatch_size, wrt=wrt
    )
    traced = lambda candidate: _identity.traced_programs(
        step_of(candidate), params, frozen, data
    )
    programs = [program for candidate in listed for program in traced(candidate)]
    score.check(mechanism, data, params, *(() if frozen is None else (frozen,)))
    cost = tuned_epsilon_of_event(
        score.compose(mechanism.dp_event(), mechanism.neighboring_relation),
        mechanism.accountants,
        trials,
        target_delta=target_delta,
        neighboring_relation=mechanism.neighboring_relation,
    )
    arrays = jax.tree.leaves((params, frozen, data))
    if not all(getattr(x, "is_fully_addressable", True) for x in arrays):
        key = keys.the_same_everywhere(key)
    numbers_of_run = public_numbers(mechanism), programs, None
    identity = _identity.of_run(*numbers_of_run, params, frozen, data)
    key = folded_in(key, _identity.digest(identity))
    rng, trial_keys = _drawn_from(key, trials)
    chosen = _chosen(rng, trials, len(listed), len(trial_keys))
    is_fixed = isinstance(trials, FixedTrials)

    def one_trial(key, candidate, params, frozen, data, score_data):
        step = step_of(candidate)

        def take_step(state, _):
            batch = draw_batch(mechanism, state, num_examples)
            examples = batch.gather(data)
            return step(state, examples, batch.is_padding_example, frozen)[0], None

        state = step.init(params, key=key)
        state, _ = jax.lax.scan(take_step, state, length=mechanism.iterations)
        return state.params, score.per_example(
            state.params, () if frozen is None else (frozen,), score_data
        )

    numbers = jax.tree.map(lambda x: x[chosen], numbers)
    shared = params, frozen, data, score.data
    found = _trained(one_trial, trial_keys, numbers, trials_at_once, *shared)
    scored = (
        Trial(trained, listed[i], score.summary(scores, rng))
        for i, (trained, scores) in zip(chosen, found, strict=True)
    )
    all_trials = tuple(scored) if is_fixed else None
    best = _best(all_trials or scored, rng)
    runs = Spending(score.spent(mechanism).runs * len(listed)) if is_fixed else None
    return SearchResult(best, cost, target_delta, mechanism, trials, all_trials, runs)
