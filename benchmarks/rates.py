"""A search over learning rates at one epsilon, and the best of each at several.

1. At one epsilon, the learning rate of each optimizer: as many trials for each, one
   seed, scored on validation data.
2. The best, trained on all training data and scored on test data: at that epsilon,
   then at the others with the same learning rate, then with more seeds.

An optimizer with one learning rate has no trials. The order is such that whatever is
cut off leaves tables with all optimizers in them.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import records
from benchmarks.tables import markdown

# Finds or makes the training of a setting, a seed, and "validation" or "test".
Get = Callable[[Any, int, str], records.Row | None]
Task = tuple[Any, int, str]
Cell = Callable[[Sequence[records.Row]], str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which trainings there are.

    Attributes:
      setting: of an optimizer, an epsilon and a learning rate.
      learning_rates: of the trials of each optimizer; the first ones come first.
      epsilon_of_trials: at which they are made.
      other_epsilons: at which their best is tested too.
      seeds: of what is tested.
      seed_of_trials: another one.
    """

    setting: Callable[[str, float, float], Any]
    learning_rates: Mapping[str, Sequence[float]]
    epsilon_of_trials: float
    other_epsilons: Sequence[float]
    seeds: Sequence[int]
    seed_of_trials: int = 1_000

    def trial(self, method: str, rate: float) -> Task:
        """On validation data."""
        setting = self.setting(method, self.epsilon_of_trials, rate)
        return setting, self.seed_of_trials, "validation"

    def best(self, get: Get, method: str) -> float | None:
        """The learning rate of the best trial, once all are there, or the only one."""
        if len(self.learning_rates[method]) == 1:
            return self.learning_rates[method][0]
        found = {
            rate: get(*self.trial(method, rate)) for rate in self.learning_rates[method]
        }
        rows = {rate: row for rate, row in found.items() if row is not None}
        by_score = lambda rate: rows[rate]["accuracy"]
        return max(rows, key=by_score) if rows == found else None

    def trials(self, methods: Sequence[str]) -> Iterator[Task]:
        """The first of each optimizer before the second of any."""
        searched = [name for name in methods if len(self.learning_rates[name]) > 1]
        several = (self.learning_rates[method] for method in searched)
        for rates in zip(*several, strict=True):
            yield from map(self.trial, searched, rates)

    def results(self, get: Get, methods: Sequence[str]) -> Iterator[Task]:
        """The best of each optimizer with all seeds, what matters most first."""
        best = {method: self.best(get, method) for method in methods}
        chosen = {method: rate for method, rate in best.items() if rate is not None}
        first, others = [self.epsilon_of_trials], self.other_epsilons
        parts = itertools.product([self.seeds[:1], self.seeds[1:]], [first, others])
        for seeds, epsilons in parts:
            for seed, epsilon in itertools.product(seeds, epsilons):
                for method, rate in chosen.items():
                    yield self.setting(method, epsilon, rate), seed, "test"

    def run(self, get: Get, methods: Sequence[str]) -> None:
        """Makes what there is to make of these optimizers."""
        for each in self.trials(methods):
            get(*each)
        for each in self.results(get, methods):
            get(*each)

    def trials_table(self, get: Get) -> str:
        """Accuracy on validation data, by learning rate."""
        rates = sorted({x for several in self.learning_rates.values() for x in several})
        body = []
        for method, several in self.learning_rates.items():
            rows = [
                get(*self.trial(method, rate)) if rate in several else None
                for rate in rates
            ]
            scores = [f"{100 * row['accuracy']:.2f}" if row else "-" for row in rows]
            body.append([method, *scores])
        return markdown(["optimizer", *(f"η {rate:g}" for rate in rates)], body)

    def results_table(self, get: Get, cell: Cell) -> str:
        """One line for each optimizer, one column for each epsilon."""
        epsilons = sorted((self.epsilon_of_trials, *self.other_epsilons))
        body = []
        for method in self.learning_rates:
            rate = self.best(get, method)
            found = [self._tested(get, method, epsilon, rate) for epsilon in epsilons]
            cells = [cell(rows) if rows else "-" for rows in found]
            body.append([method, f"{rate:g}" if rate else "-", *cells])
        return markdown(["optimizer", "η", *(f"ε = {e:g}" for e in epsilons)], body)

    def _tested(
        self, get: Get, method: str, epsilon: float, rate: float | None
    ) -> list[records.Row]:
        """What there is of all seeds; nothing where the rate is not chosen yet."""
        if rate is None:
            return []
        setting = self.setting(method, epsilon, rate)
        return [row for seed in self.seeds if (row := get(setting, seed, "test"))]

    def accuracy(self, rows: Sequence[records.Row]) -> str:
        """A cell: mean and standard deviation, and how many seeds are not there yet."""
        values = [100 * row["accuracy"] for row in rows]
        cell = f"{statistics.fmean(values):.2f}"
        if len(values) > 1:
            cell += f" ± {statistics.stdev(values):.2f}"
        there, all_seeds = len(values), len(self.seeds)
        return cell if there == all_seeds else f"{cell} ({there} of {all_seeds})"


def reader(rows: Sequence[records.Row], identity: Callable[..., records.Row]) -> Get:
    """Finds what is on record, and makes nothing."""

    def get(setting: Any, seed: int, split: str) -> records.Row | None:
        known = json.loads(json.dumps(identity(setting, seed, split)))
        found = (row for row in rows if known.items() <= row.items())
        return next(found, None)

    return get
