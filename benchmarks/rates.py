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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import records
from benchmarks.records import Row
from benchmarks.tables import markdown, spread

Task = tuple[Any, int, str]  # a setting, a seed, and "validation" or "test"
Get = Callable[[Any, int, str], Row | None]  # finds the training of a task


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which trainings there are."""

    setting: Callable[[str, float, float], Any]  # of a method, an epsilon and a rate
    learning_rates: Mapping[str, Sequence[float]]  # of trials; the first come first
    epsilon_of_trials: float
    other_epsilons: Sequence[float]  # at which their best is tested too
    seeds: Sequence[int]  # of the tests
    seed_of_trials: int = 1_000

    def trial(self, method: str, rate: float) -> Task:
        """On validation data."""
        setting = self.setting(method, self.epsilon_of_trials, rate)
        return setting, self.seed_of_trials, "validation"

    def best(self, get: Get, method: str) -> float | None:
        """The learning rate of the best trial, once all are there, or the only one."""
        rates = self.learning_rates[method]
        if len(rates) == 1:
            return rates[0]
        rows = [row for rate in rates if (row := get(*self.trial(method, rate)))]
        scores = [row["accuracy"] for row in rows]
        return rates[scores.index(max(scores))] if len(rows) == len(rates) else None

    def trials(self, methods: Sequence[str]) -> Iterator[Task]:
        """The first of each optimizer before the second of any."""
        searched = [name for name in methods if len(self.learning_rates[name]) > 1]
        several = (self.learning_rates[method] for method in searched)
        for rates in zip(*several, strict=True):
            yield from map(self.trial, searched, rates)

    def results(self, get: Get, methods: Sequence[str]) -> Iterator[Task]:
        """The best of each optimizer with all seeds, what matters most first."""
        best = {method: self.best(get, method) for method in methods}
        first, others = [self.epsilon_of_trials], self.other_epsilons
        parts = itertools.product([self.seeds[:1], self.seeds[1:]], [first, others])
        for seeds, epsilons in parts:
            for seed, epsilon in itertools.product(seeds, epsilons):
                for method, rate in best.items():
                    if rate is not None:
                        yield self.setting(method, epsilon, rate), seed, "test"

    def trials_table(self, get: Get) -> str:
        """Accuracy on validation data, by learning rate."""
        rates = sorted({x for several in self.learning_rates.values() for x in several})

        def score(method: str, rate: float) -> str:
            row = get(*self.trial(method, rate))
            is_tried = rate in self.learning_rates[method]
            return f"{100 * row['accuracy']:.2f}" if row and is_tried else "-"

        body = [[m, *(score(m, rate) for rate in rates)] for m in self.learning_rates]
        return markdown(["optimizer", *(f"η {rate:g}" for rate in rates)], body)

    def results_table(self, get: Get, cell: Callable[[Sequence[Row]], str]) -> str:
        """One line for each optimizer, one column for each epsilon."""
        epsilons = sorted((self.epsilon_of_trials, *self.other_epsilons))

        def line(method: str) -> list[str]:
            rate = self.best(get, method)
            if rate is None:
                return [method, *"-" * (1 + len(epsilons))]
            settings = [self.setting(method, epsilon, rate) for epsilon in epsilons]
            tasks = [[(x, seed, "test") for seed in self.seeds] for x in settings]
            found = [[row for task in each if (row := get(*task))] for each in tasks]
            return [method, f"{rate:g}", *(cell(x) if x else "-" for x in found)]

        body = [line(method) for method in self.learning_rates]
        return markdown(["optimizer", "η", *(f"ε = {e:g}" for e in epsilons)], body)

    def accuracy(self, rows: Sequence[Row]) -> str:
        """A cell: mean and standard deviation, and how many seeds are not there yet."""
        cell = spread([row["accuracy"] for row in rows])
        there, all_seeds = len(rows), len(self.seeds)
        return cell if there == all_seeds else f"{cell} ({there} of {all_seeds})"


def reader(rows: Sequence[Row], identity: Callable[..., Row]) -> Get:
    """Finds what is on record, and makes nothing."""
    return lambda *task: records.find(rows, identity(*task))
