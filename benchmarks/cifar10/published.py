"""The protocol of the papers on CIFAR-10, with batches and an epsilon that hold.

    python -m benchmarks.cifar10.published --data-dir DIR [--checkpoints DIR]
    python -m benchmarks.cifar10.published [--pictures]      # prints the table

CNN5 with tanh, crops and flips, C = 1, batches of 1,024, 70 epochs of 48 steps, epsilon
3 at delta 1e-5. The papers shuffle, and account for Poisson batches; here the batches
are Poisson's, and the noise is calibrated for them. The papers test on 9,216 of the
10,000 images and choose among trainings by that; here all 10,000 count, and nothing is
chosen: the hyper-parameters are the authors', or what is nearest of theirs.

Trainings go on where they ended, from checkpoints, and what is on record is not trained
again.
"""

import pathlib
from collections.abc import Sequence

from benchmarks import pictures, records
from benchmarks.cifar10 import cnn5_training, data
from benchmarks.cifar10.cnn5_training import Setting
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_name("published.jsonl")
# Of a field of the records: what the axis says, and the file.
PICTURES = {
    "accuracy": ("test accuracy (%)", "published_accuracy.png"),
    "share_at_floor": ("coordinates at the floor (%)", "published_floor.png"),
}
EPSILON, EPOCHS = 3.0, 70

# In the order of the trainings.
SETTINGS = (
    # Of the paper on DP-AdamW; the weight decay is that of the run it prints.
    Setting("DP-AdamW", EPSILON, EPOCHS, 1.5e-3, {"weight_decay": 1e-3}),
    Setting(
        "DP-AdamW-BC",
        EPSILON,
        EPOCHS,
        2e-4,
        {"weight_decay": 1e-5, "variance_floor": 5e-8},
    ),
    # Of the code of the paper on DP-AdamBC, at epsilon 1 and C = 3: in units of C = 1,
    # the same updates have a ninth of the floor, and three times DP-SGD's rate. DP-Adam
    # had batches of 512 there.
    Setting("DP-AdamBC", EPSILON, EPOCHS, 5e-6, {"variance_floor": 1e-9 / 9}),
    Setting("DP-SGD", EPSILON, EPOCHS, 0.03, {"momentum": 0.9}),
    Setting("DP-Adam", EPSILON, EPOCHS, 1e-3),
    # The control: DP-AdamW-BC with its floor, and nothing subtracted.
    Setting(
        "DP-AdamW-BC",
        EPSILON,
        EPOCHS,
        2e-4,
        {"weight_decay": 1e-5, "variance_floor": 5e-8, "correction": 0.0},
    ),
)

# Mean and standard deviation of five runs, in percent.
PUBLISHED = {
    "DP-SGD": (57.3, 0.8),
    "DP-Adam": (54.1, 0.4),
    "DP-AdamBC": (54.3, 0.2),
    "DP-AdamW": (59.26, 0.30),
    "DP-AdamW-BC": (58.16, 0.72),
}


def trained(rows: Sequence[records.Row], setting: Setting) -> list[records.Row]:
    """The trainings of a setting, by seed."""
    known = cnn5_training.identity(setting, 0, "test")
    del known["seed"]
    found = (row for row in rows if known.items() <= row.items())
    return sorted(found, key=lambda row: row["seed"])


def _numbers(setting: Setting) -> str:
    signs = {
        "weight_decay": "λ",
        "variance_floor": "γ'",
        "momentum": "β",
        "correction": "share subtracted",
    }
    options = (f"{signs[name]} {x:.2g}" for name, x in setting.options.items())
    return ", ".join([f"η {setting.learning_rate:g}", *options])


def render(rows: Sequence[records.Row]) -> str:
    """Published beside ours."""
    body = []
    for setting in SETTINGS:
        found = trained(rows, setting)
        if not found:
            continue
        published = PUBLISHED.get(setting.name)
        shares = [row["share_at_floor"] for row in found]
        body.append(
            [
                setting.name,
                _numbers(setting),
                f"{published[0]:g} ± {published[1]:g}" if published else "-",
                cnn5_training.percent([row["accuracy"] for row in found]),
                str(len(found)),
                "-" if None in shares else f"{sum(shares) / len(shares):.0%}",
                f"{sum(row['seconds'] for row in found) / len(found) / 60:.0f}",
            ]
        )
    head = ["optimizer", "with", "published", "test accuracy", "seeds", "at the floor"]
    return markdown([*head, "minutes"], body)


def draw(
    rows: Sequence[records.Row], field: str, ylabel: str, path: pathlib.Path
) -> None:
    """What the records of every optimizer have of a field, over the steps."""
    curves, steps = {}, []
    for setting in SETTINGS:
        found = [row["curve"] for row in trained(rows, setting)]
        if found and field in found[0][-1]:
            steps = [record["iterations"] for record in found[0]]
            of_seeds = [[100 * record[field] for record in curve] for curve in found]
            curves[setting.name] = list(zip(*of_seeds, strict=True))
    if curves:
        figure = pictures.learning_curves(steps, curves, ylabel=ylabel)
        figure.savefig(path, dpi=150)


def main() -> None:
    parser = cnn5_training.options(__doc__, RESULTS)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--pictures", action="store_true", help="draws the curves")
    arguments = parser.parse_args()
    found = records.Records(arguments.output)
    if arguments.data_dir:
        cifar = data.load(arguments.data_dir)
        laboratory = cnn5_training.Laboratory(cifar, found, arguments.checkpoints)
        for seed in range(arguments.seeds):
            for setting in SETTINGS:
                laboratory.get(setting, seed, "test")
    print(render(found.rows))
    if arguments.pictures:
        for field, (ylabel, name) in PICTURES.items():
            draw(found.rows, field, ylabel, arguments.output.with_name(name))


if __name__ == "__main__":
    main()
