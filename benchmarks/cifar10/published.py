"""The protocol of the papers on CIFAR-10, with batches and an epsilon that hold.

    python -m benchmarks.cifar10.published --data-dir DIR
    python -m benchmarks.cifar10.published [--pictures]      # the table, the curves

CNN5 with crops and flips, C = 1, batches of 1,024, 70 epochs of 48 steps, epsilon 3 at
delta 1e-5. The hyper-parameters are the authors', or what is nearest of theirs. Those
of the code of the paper on DP-AdamBC are for epsilon 1, and are trained at it too.

And the one run whose settings are printed, in the short version of the paper on
DP-AdamBC: batches of 2,048 and a noise multiplier of 1, for as many epochs of 24 steps
as its Rényi accountant has for epsilon 7. Which network it had is not printed. Its two
Adams, and the one with a floor alone, are trained at other learning rates too.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

import dpadambc
from benchmarks import pictures
from benchmarks.cifar10 import cnn5_training
from benchmarks.cifar10.cnn5_training import Setting
from benchmarks.records import Row
from benchmarks.study import Study
from benchmarks.tables import markdown, spread

RESULTS = pathlib.Path(__file__).with_name("published.jsonl")
EPSILON, EPOCHS = 3.0, 70
OF_BC = {"weight_decay": 1e-5, "variance_floor": 5e-8}

# In the order of the trainings.
SETTINGS = (
    # Of the paper on DP-AdamW; the weight decay is that of the run it prints.
    Setting("DP-AdamW", EPSILON, EPOCHS, 1.5e-3, {"weight_decay": 1e-3}),
    Setting("DP-AdamW-BC", EPSILON, EPOCHS, 2e-4, OF_BC),
    # Of the code of the paper on DP-AdamBC, at epsilon 1 and C = 3: in units of C = 1,
    # the same updates have a ninth of the floor, and three times DP-SGD's rate. DP-Adam
    # had batches of 512 there.
    Setting("DP-AdamBC", EPSILON, EPOCHS, 5e-6, {"variance_floor": 1e-9 / 9}),
    Setting("DP-SGD", EPSILON, EPOCHS, 0.03, {"momentum": 0.9}),
    Setting("DP-Adam", EPSILON, EPOCHS, 1e-3),
    # The control: DP-AdamW-BC with its floor, and nothing subtracted.
    Setting("DP-AdamW-BC", EPSILON, EPOCHS, 2e-4, OF_BC | {"correction": 0.0}),
)


class Small(Setting):
    """One training with the batches that the authors' DP-Adam has at epsilon 1."""

    batch_size, steps_per_epoch = 512, 97


AT_ONE = (
    Setting("DP-AdamBC", 1.0, EPOCHS, 5e-6, {"variance_floor": 1e-9 / 9}),
    Setting("DP-SGD", 1.0, EPOCHS, 0.03, {"momentum": 0.9}),
    Small("DP-Adam", 1.0, EPOCHS, 1e-3),
)


class Printed(Setting):
    """One training of the printed run: the noise is given, and epsilon follows."""

    batch_size, steps_per_epoch = 2_048, 24

    def mechanism(self, num_examples: int) -> dpadambc.PoissonGaussian:
        found = super().mechanism(num_examples)
        return dataclasses.replace(found, noise_multiplier=1.0)


def _printed(method: str, learning_rate: float, **options: float) -> Printed:
    return Printed(method, 7.0, 22, learning_rate, options)


# The first of each is the printed one.
RATES = (1e-3, 2e-3, 5e-4, 4e-3, 8e-3)
VARIED = {
    "DP-AdamBC": [_printed("DP-AdamBC", x, variance_floor=1e-8) for x in RATES],
    "DP-Adam": [_printed("DP-Adam", x) for x in RATES],
    "DP-AdamBC, floor alone": [
        _printed("DP-AdamBC", x, variance_floor=1e-8, correction=0.0) for x in RATES
    ],
}
PRINTED = (
    VARIED["DP-AdamBC"][0],
    VARIED["DP-Adam"][0],
    _printed("DP-SGD", 4.0, momentum=0.0),
)
SIGNS = {
    "weight_decay": "λ",
    "variance_floor": "γ'",
    "momentum": "β",
    "correction": "share subtracted",
}
# In percent; mean and standard deviation of five runs, or the printed run's one.
PUBLISHED = {
    "DP-SGD": "57.3 ± 0.8",
    "DP-Adam": "54.1 ± 0.4",
    "DP-AdamBC": "54.3 ± 0.2",
    "DP-AdamW": "59.26 ± 0.3",
    "DP-AdamW-BC": "58.16 ± 0.72",
}
OF_ONE = {"DP-SGD": "52.4 ± 0.5", "DP-Adam": "51.9 ± 0.7", "DP-AdamBC": "49.8 ± 0.6"}
OF_PRINTED = {"DP-AdamBC": "60.27", "DP-Adam": "56.35", "DP-SGD": "61.94"}


def trained(rows: Sequence[Row], setting: Setting) -> list[Row]:
    """The trainings of a setting."""
    known = cnn5_training.identity(setting, 0, "test")
    del known["seed"]
    return [row for row in rows if known.items() <= row.items()]


def _table(
    rows: Sequence[Row], settings: Sequence[Setting], published: Mapping[str, str]
) -> str:
    """Published beside ours."""
    body = []
    for setting in settings:
        found = trained(rows, setting)
        if not found:
            continue
        mean = lambda name, found=found: sum(row[name] for row in found) / len(found)
        options = (f"{SIGNS[name]} {x:.2g}" for name, x in setting.options.items())
        has_floor = found[0]["share_at_floor"] is not None
        body.append(
            [
                setting.name,
                ", ".join([f"η {setting.learning_rate:g}", *options]),
                published.get(setting.name, "-"),
                spread([row["accuracy"] for row in found]),
                str(len(found)),
                f"{mean('share_at_floor'):.0%}" if has_floor else "-",
                f"{mean('seconds') / 60:.0f}",
            ]
        )
    head = ["optimizer", "with", "published", "test accuracy", "seeds", "at the floor"]
    return markdown([*head, "minutes"], body)


def _rates_table(rows: Sequence[Row]) -> str:
    """Test accuracy of the printed run by learning rate."""
    order = sorted(RATES)
    body = []
    for name, settings in VARIED.items():
        by_rate = {x.learning_rate: trained(rows, x) for x in settings}
        found = ([row["accuracy"] for row in by_rate[rate]] for rate in order)
        body.append([name, *(spread(x) if x else "-" for x in found)])
    return markdown(["optimizer", *(f"η {rate:g}" for rate in order)], body)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Of the protocol, and of the run whose settings are printed."""
    return {
        "published": _table(rows, SETTINGS, PUBLISHED),
        "epsilon 1": _table(rows, AT_ONE, OF_ONE),
        "printed": _table(rows, PRINTED, OF_PRINTED),
        "rates": _rates_table(rows),
    }


def _all_settings() -> list[Setting]:
    """Each once, in the order in which they are trained."""
    others = [x for each in zip(*VARIED.values(), strict=True) for x in each]
    return [*SETTINGS, *PRINTED, *(x for x in others if x not in PRINTED), *AT_ONE]


def picture(rows: Sequence[Row]) -> Figure:
    """Test accuracy over the steps."""
    steps, found = [], {}
    for setting in SETTINGS:
        for curve in (row["curve"] for row in trained(rows, setting)[:1]):
            steps = [record["iterations"] for record in curve]
            found[setting.name] = [100 * record["accuracy"] for record in curve]
    return pictures.learning_curves(steps, found)


STUDY = Study(
    results=RESULTS,
    cells=lambda *_: [cnn5_training.cell(x, 0, "test") for x in _all_settings()],
    prepare=cnn5_training.prepare,
    tables=tables,
    pictures=lambda rows: {"published_accuracy.png": picture(rows)},
)

if __name__ == "__main__":
    STUDY.main(__doc__)
