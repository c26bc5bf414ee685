"""CNN5 for 20 epochs: every optimizer at three epsilons, with a search of its own.

    python -m benchmarks.cifar10.short --data-dir DIR [--method DP-Adam]
    python -m benchmarks.cifar10.short      # prints the tables

All learning rates are in one unit, that of Adam, in which the best of one epsilon is
that of another: DP-SGD's is multiplied by (1 - momentum) / noise_stddev, as DP-Adam's
is where noise is all that its second moment sees, and floors are relative to the noise.
The search is that of `benchmarks.rates`. AUTO-S has none: scales of gradients do not
change Adam's steps.
"""

import argparse
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from benchmarks import experiment, rates
from benchmarks.cifar10 import cnn5_training
from benchmarks.cifar10.cnn5_training import Setting, cell
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from dpadambc import accounting

EPOCHS = 20

# The second of each grid comes first. They are where the papers' learning rates for as
# much noise are: the corrected steps are longer at the same rate. The fourth came when
# the third was the best of every Adam, the largest of three.
PLAIN = (2e-3, 1e-3, 4e-3, 8e-3)
CORRECTED = (4e-4, 2e-4, 8e-4, 1.6e-3)
LEARNING_RATES = {
    "DP-AdamW": PLAIN,
    "DP-AdamW-BC": CORRECTED,
    "DP-AdamBC": CORRECTED,
    "DP-SGD": (4e-3, 2e-3, 8e-3, 1e-3),
    "DP-Adam": PLAIN,
    experiment.AUTOMATIC: (4e-3,),  # that of DP-Adam
}


def setting(method: str, target_epsilon: float, learning_rate: float) -> Setting:
    """Of 20 epochs."""
    options = {"per_noise": True} if method == "DP-SGD" else {}
    return Setting(method, target_epsilon, EPOCHS, learning_rate, options)


PLAN = rates.Plan(
    setting,
    LEARNING_RATES,
    epsilon_of_trials=3.0,
    other_epsilons=(1.0, 7.0),
    seeds=(0, 1, 2),
)


def cells(find: Find, _: argparse.Namespace) -> Iterator[Cell]:
    """The trials, and then the best of them."""
    methods = list(LEARNING_RATES)
    yield from itertools.starmap(cell, PLAN.trials(methods))
    get = lambda *task: find(cell(*task))
    yield from itertools.starmap(cell, PLAN.results(get, methods))


def _moments(rows: Sequence[Row]) -> str:
    """The cosine of the last update to the first moment, and the share at the floor."""
    last = [row["curve"][-1] for row in rows]
    mean = lambda name: sum(record[name] for record in last) / len(last)
    if "cosine_to_momentum" not in last[0]:
        return "-"
    cell = f"{mean('cosine_to_momentum'):.2f}"
    has_floor = "share_at_floor" in last[0]
    return f"{cell}, {mean('share_at_floor'):.0%}" if has_floor else cell


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Of the test, and of the search with its epsilon."""
    get = rates.reader(rows, cnn5_training.identity)
    mechanism = setting("DP-SGD", PLAN.epsilon_of_trials, 1.0).mechanism(45_000)
    trials = accounting.GeometricTrials(len(PLAIN))
    delta = cnn5_training.TARGET_DELTA
    tuned = accounting.tuned_epsilon(mechanism, delta, trials=trials)
    return {
        "accuracy": PLAN.results_table(get, PLAN.accuracy),
        "moments": PLAN.results_table(get, _moments),
        "trials": f"{PLAN.trials_table(get)}\n\nOne trial has"
        f" ε {tuned.of_one_trial:.2f}. A search with {len(PLAIN)} expected trials of"
        " one optimizer, each with its own key and their number random (geometric),"
        f" costs ε {tuned.epsilon:.2f} if it releases only the best trial, and"
        f" {tuned.of_composition:.2f} if it releases all.",
    }


RESULTS = pathlib.Path(__file__).with_name("short.jsonl")
STUDY = Study(
    results=RESULTS,
    cells=cells,
    prepare=cnn5_training.prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
