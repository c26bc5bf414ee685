"""CNN5 for 20 epochs: every optimizer at three epsilons, with a search of its own.

    python -m benchmarks.cifar10.short --data-dir DIR [--share 0/2] [--checkpoints DIR]
    python -m benchmarks.cifar10.short      # prints the tables

The network, the batches, the clip norm and the views are those of `published`, the
steps 960, and the noise is calibrated for them. All learning rates are in one unit,
that of Adam, in which the best of one epsilon is that of another: DP-SGD's is
multiplied by (1 - momentum) / noise_stddev, as DP-Adam's is where noise is all that its
second moment sees, and floors are relative to the noise.

1. At epsilon 3, the learning rate of each optimizer: four trials, a factor of two
   apart, one seed, trained on 45,000 images and scored on the other 5,000.
2. At epsilon 3, the best, trained on all 50,000 and scored on the test images; then at
   epsilon 1 and 7 with the same learning rate; then two more seeds of all of these.

The control has the floor without the subtraction. The floor of DP-AdamBC, with nothing
subtracted, is below every second moment, so that control would be DP-Adam. Here it is
where the correction has it, at the variance of the noise and one deviation, so the same
coordinates are at the floor.

That is 78 trainings. A step takes 0.9 s of a core of an EPYC (Zen 5) whose other cores
are at work, so a training takes 15 minutes, and two processes with a core each take ten
hours. `--share 1/2` makes every second optimizer; both may write to one record.
Trainings go on where they ended, and the order is such that whatever is cut off leaves
a table with all optimizers in it.
"""

import argparse
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence

from benchmarks import records
from benchmarks.cifar10 import cnn5_training, data
from benchmarks.cifar10.cnn5_training import Setting
from benchmarks.ogbn_arxiv_gcn.table import markdown
from dpadambc.mechanisms import trials

RESULTS = pathlib.Path(__file__).with_name("short.jsonl")

EPOCHS = 20
EPSILON_OF_TRIALS, OTHER_EPSILONS = 3.0, (1.0, 7.0)
SEED_OF_TRIALS, SEEDS = 1_000, (0, 1, 2)

# The middle of each grid comes first. They are where the papers' learning rates for as
# much noise are: the corrected steps are longer at the same rate.
PLAIN = (2e-3, 1e-3, 4e-3, 5e-4)
CORRECTED = (4e-4, 2e-4, 8e-4, 1e-4)
LEARNING_RATES = {
    "DP-AdamW": PLAIN,
    "DP-AdamW-BC": CORRECTED,
    "DP-AdamBC": CORRECTED,
    "DP-SGD": (4e-3, 2e-3, 8e-3, 1e-3),
    "DP-Adam": PLAIN,
    "floor alone": PLAIN,
}

Get = Callable[[Setting, int, str], records.Row | None]


def setting(method: str, target_epsilon: float, learning_rate: float) -> Setting:
    """Of 20 epochs."""
    options = {"per_noise": True} if method == "DP-SGD" else {}
    return Setting(method, target_epsilon, EPOCHS, learning_rate, options)


def score(row: records.Row) -> float:
    """What a learning rate is chosen by: accuracy on validation images."""
    return row["accuracy"]


def best(get: Get, method: str) -> float | None:
    """The learning rate of the best trial, once all are there."""
    found = {
        rate: get(
            setting(method, EPSILON_OF_TRIALS, rate), SEED_OF_TRIALS, "validation"
        )
        for rate in LEARNING_RATES[method]
    }
    rows = {rate: row for rate, row in found.items() if row is not None}
    return max(rows, key=lambda rate: score(rows[rate])) if rows == found else None


def trials_of(methods: Sequence[str]) -> Iterator[tuple[Setting, int, str]]:
    """The trials, the first of each method before the second of any."""
    rates = zip(*(LEARNING_RATES[method] for method in methods), strict=True)
    for several in rates:
        for method, rate in zip(methods, several, strict=True):
            yield (
                setting(method, EPSILON_OF_TRIALS, rate),
                SEED_OF_TRIALS,
                "validation",
            )


def results_of(get: Get, methods: Sequence[str]) -> Iterator[tuple[Setting, int, str]]:
    """The best of each method with all seeds, what matters most first."""
    chosen = {method: rate for method in methods if (rate := best(get, method))}
    parts = [
        ((EPSILON_OF_TRIALS,), SEEDS[:1]),
        (OTHER_EPSILONS, SEEDS[:1]),
        ((EPSILON_OF_TRIALS,), SEEDS[1:]),
        (OTHER_EPSILONS, SEEDS[1:]),
    ]
    for epsilons, seeds in parts:
        for seed, epsilon in itertools.product(seeds, epsilons):
            for method, rate in chosen.items():
                yield setting(method, epsilon, rate), seed, "test"


def reader(rows: Sequence[records.Row]) -> Get:
    """Finds what is on record, and makes nothing."""

    def get(setting: Setting, seed: int, split: str) -> records.Row | None:
        known = cnn5_training.identity(setting, seed, split)
        found = (r for r in rows if known.items() <= r.items())
        return next(found, None)

    return get


def _trials_table(get: Get) -> str:
    """Accuracy on validation images, by learning rate."""
    rates = sorted({rate for several in LEARNING_RATES.values() for rate in several})
    body = []
    for method, several in LEARNING_RATES.items():
        cells = []
        for rate in rates:
            row = None
            if rate in several:
                trial = setting(method, EPSILON_OF_TRIALS, rate)
                row = get(trial, SEED_OF_TRIALS, "validation")
            cells.append(f"{100 * score(row):.2f}" if row else "-")
        body.append([method, *cells])
    return markdown(["optimizer", *(f"η {rate:g}" for rate in rates)], body)


def _results_table(
    get: Get, cell: Callable[[list[records.Row]], str], head: str
) -> str:
    """One line for each optimizer, one column for each epsilon."""
    epsilons = sorted((EPSILON_OF_TRIALS, *OTHER_EPSILONS))
    body = []
    for method in LEARNING_RATES:
        rate = best(get, method)
        cells = []
        for epsilon in epsilons:
            found = []
            if rate is not None:
                chosen = setting(method, epsilon, rate)
                found = [get(chosen, seed, "test") for seed in SEEDS]
            rows = [row for row in found if row]
            cells.append(cell(rows) if rows else "-")
        body.append([method, f"{rate:g}" if rate else "-", *cells])
    return markdown([head, "η", *(f"ε = {e:g}" for e in epsilons)], body)


def _accuracy(rows: list[records.Row]) -> str:
    cell = cnn5_training.percent([row["accuracy"] for row in rows])
    return cell if len(rows) == len(SEEDS) else f"{cell} ({len(rows)} of {len(SEEDS)})"


def _moments(rows: list[records.Row]) -> str:
    last = [row["curve"][-1] for row in rows]
    cosines = [record.get("cosine_to_momentum") for record in last]
    shares = [record.get("share_at_floor") for record in last]
    if None in cosines:
        return "-"
    cell = f"{sum(cosines) / len(last):.2f}"
    return cell if None in shares else f"{cell}, {sum(shares) / len(last):.0%}"


def render(rows: Sequence[records.Row]) -> str:
    """All tables."""
    get = reader(rows)
    mechanism = setting("DP-SGD", EPSILON_OF_TRIALS, 1.0).mechanism(45_000)
    number = len(LEARNING_RATES["DP-SGD"])
    tuned = mechanism.tuned_epsilon(
        cnn5_training.TARGET_DELTA, trials=trials.Geometric(number)
    )
    return "\n\n".join(
        [
            "Test accuracy in percent:",
            _results_table(get, _accuracy, "optimizer"),
            "Cosine of the last update to the first moment, and share at the floor:",
            _results_table(get, _moments, "optimizer"),
            f"The trials, on validation images, at ε {tuned.of_one_trial:.2f} each. A"
            f" search of {number} trials of one optimizer, were their number random"
            f" (geometric) and only the best told, costs ε {tuned.epsilon:.2f}; all"
            f" {number} told cost {tuned.of_composition:.2f}. What was trained on all"
            " images comes on top:",
            _trials_table(get),
        ]
    )


def _share(text: str) -> tuple[int, int]:
    part, whole = map(int, text.split("/"))
    if not 0 <= part < whole:
        raise argparse.ArgumentTypeError(f"Expected 0/2 or 1/2, say, got {text}.")
    return part, whole


def main() -> None:
    parser = cnn5_training.options(__doc__, RESULTS)
    parser.add_argument(
        "--share", type=_share, default=(0, 1), help="which part, such as 0/2"
    )
    arguments = parser.parse_args()
    found = records.Records(arguments.output)
    if arguments.data_dir:
        cifar = data.load(arguments.data_dir)
        laboratory = cnn5_training.Laboratory(cifar, found, arguments.checkpoints)
        part, whole = arguments.share
        methods = list(LEARNING_RATES)[part::whole]
        for each in trials_of(methods):
            laboratory.get(*each)
        for each in results_of(laboratory.get, methods):
            laboratory.get(*each)
    print(render(records.read(arguments.output)))


if __name__ == "__main__":
    main()
