"""Batch size, learning rate and clip norm, as Li et al. (arXiv:2110.05679) vary them.

    python -m benchmarks.language.batches --data-dir DIR --cache-dir DIR
    python -m benchmarks.language.batches [--pictures]       # the tables, the heat map

DP-Adam on the last block of MiniLM, at one epsilon and for one epoch, so that a larger
batch takes fewer steps. One number is changed at a time, but for learning rate and
batch size, which are changed together. The score is that of the trials of
`benchmarks.language.sst2`, on 3,000 training phrases, and so are the seed and the
record: what a search has made there is not made again.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from benchmarks import pictures, rates, records
from benchmarks.language import sst2
from benchmarks.language.finetune import Setting
from benchmarks.tables import markdown

METHOD = "DP-Adam"
BASE = sst2.setting("last block", METHOD, sst2.EPSILON_OF_TRIALS, 1e-2)
BATCH_SIZES = (64, 256, 1_024, 4_096)
LEARNING_RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
L2_CLIP_NORMS = (0.02, 0.1, 0.5, 2.5)

_vary = dataclasses.replace


def settings() -> Iterator[Setting]:
    """Each once: clip norms, then those in the middle of the grid first."""
    from_the_middle = sorted(
        LEARNING_RATES, key=lambda rate: max(rate, BASE.learning_rate**2 / rate)
    )
    pairs = itertools.product(from_the_middle, reversed(BATCH_SIZES))
    found = [BASE, *(_vary(BASE, l2_clip_norm=norm) for norm in L2_CLIP_NORMS)]
    found += [_vary(BASE, learning_rate=rate, batch_size=size) for rate, size in pairs]
    yield from dict.fromkeys(found)


def task(setting: Setting) -> rates.Task:
    """The training of a setting, scored as the trials of a search are."""
    return setting, sst2.plan("last block").seed_of_trials, "validation"


def _cell(row: records.Row | None) -> str:
    return f"{100 * row['accuracy']:.2f}" if row else "-"


def grid_table(get: rates.Get) -> str:
    """Accuracy by batch size and learning rate, with the noise of each batch size."""
    body = []
    for size in BATCH_SIZES:
        pairs = [_vary(BASE, batch_size=size, learning_rate=x) for x in LEARNING_RATES]
        found = [get(*task(setting)) for setting in pairs]
        known = next((row for row in found if row), None)
        if known is None:
            continue
        z = known["noise_multiplier"]
        numbers = str(known["iterations"]), f"{z:.2f}", f"{1e4 * z / size:.2f}"
        body.append([f"{size:,}", *numbers, *map(_cell, found)])
    names = "batch", "steps", "z", "10⁴ z / B"
    return markdown([*names, *(f"η {rate:g}" for rate in LEARNING_RATES)], body)


def clip_table(get: rates.Get) -> str:
    """Accuracy by clip norm."""
    found = [get(*task(_vary(BASE, l2_clip_norm=norm))) for norm in L2_CLIP_NORMS]
    return markdown([f"C {norm:g}" for norm in L2_CLIP_NORMS], [[*map(_cell, found)]])


def render(rows: Sequence[records.Row]) -> str:
    get = rates.reader(rows, sst2.identity)
    return "\n\n".join(
        [
            f"{METHOD}, ε {BASE.target_epsilon:g}, validation accuracy in percent by"
            " batch size B and learning rate:",
            grid_table(get),
            f"By clip norm, η {BASE.learning_rate:g}, B {BASE.batch_size:,}:",
            clip_table(get),
        ]
    )


def heat_map(get: rates.Get) -> Figure:
    """Accuracy by batch size and learning rate."""
    scores = [
        [_accuracy(get, size, rate) for rate in LEARNING_RATES] for size in BATCH_SIZES
    ]
    return pictures.heat_map(
        BATCH_SIZES,
        LEARNING_RATES,
        {f"{METHOD}, ε {BASE.target_epsilon:g}": scores},
        row_label="batch size",
        column_label="learning rate",
        score_label="validation accuracy (%)",
    )


def _accuracy(get: rates.Get, batch_size: int, learning_rate: float) -> float:
    row = get(*task(_vary(BASE, batch_size=batch_size, learning_rate=learning_rate)))
    return 100 * row["accuracy"] if row else float("nan")


def main() -> None:
    parser = sst2.options(__doc__)
    parser.add_argument("--pictures", action="store_true", help="draws the heat map")
    arguments = sst2.parse(parser)
    if arguments.data_dir:
        laboratory = sst2.Laboratory(BASE.way, arguments)
        for each in settings():
            laboratory.get(*task(each))
    rows = records.read(arguments.output)
    print(render(rows))
    if arguments.pictures:
        figure = heat_map(rates.reader(rows, sst2.identity))
        figure.savefig(arguments.output.with_name("batches.png"), dpi=150)


if __name__ == "__main__":
    main()
