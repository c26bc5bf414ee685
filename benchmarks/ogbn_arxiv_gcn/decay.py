"""Decoupled weight decay, from almost none to almost all of the weights.

    python -m benchmarks.ogbn_arxiv_gcn.decay --data-dir DIR [--seeds 5]
    python -m benchmarks.ogbn_arxiv_gcn.decay          # prints the tables

The settings are those that the search chose for DP-Adam and DP-AdamBC; the weight decay
alone is searched for, on validation nodes with the seeds of the trials. Its winner is
trained with the seeds of the results, and compared with no decay seed by seed: both
draw the same batches and the same noise. Every training is written down as it ends, and
found there by a later call.
"""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Iterator, Sequence

import rich.progress

from benchmarks.ogbn_arxiv_gcn import data, run, settings, table
from benchmarks.ogbn_arxiv_gcn.settings import Setting

RESULTS = pathlib.Path(__file__).with_name("decay.jsonl")

WITHOUT_DECAY = {"DP-AdamW": "DP-Adam", "DP-AdamW-BC": "DP-AdamBC"}
# Lambda, by optimizer; the corrected one takes six times as long.
WEIGHT_DECAYS = {
    "DP-AdamW": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "DP-AdamW-BC": (0.1, 0.3, 1.0, 3.0),
}
LINES = (
    ("DP-AdamW", 1.0),
    ("DP-AdamW", 3.0),
    ("DP-AdamW", 6.0),
    ("DP-AdamW-BC", 3.0),
    ("DP-AdamW", 12.0),
    ("DP-AdamW-BC", 12.0),
)

Line = tuple[Setting, list[Setting]]  # without decay, and with each


def shrinkage(setting: Setting) -> float:
    """The share of the initial weights that all steps together take away."""
    kept = 1 - setting.learning_rate * setting.weight_decay
    return 1 - kept**setting.iterations


def lines(searched: Sequence[run.Row]) -> Iterator[Line]:
    """What the search chose without decay, and the same with decay."""
    chosen = table.lines(searched)
    for method, target in LINES:
        rows = chosen[WITHOUT_DECAY[method], target, False]
        without = Setting(**rows[0]["setting"])
        decayed = [
            dataclasses.replace(without, method=method, weight_decay=decay)
            for decay in WEIGHT_DECAYS[method]
        ]
        yield without, decayed


def validation(get: run.Get, setting: Setting) -> float:
    """The mean accuracy with the seeds of the trials."""
    return statistics.fmean(
        table.score(get(setting, seed)) for seed in settings.TUNING_SEEDS
    )


def run_all(lines: Sequence[Line], get: run.Get, seeds: Sequence[int]) -> None:
    """Every search, each followed by the seeds of what it found."""
    for _, decayed in lines:
        best = max(decayed, key=lambda setting: validation(get, setting))
        for seed in seeds:
            get(best, seed)


def num_trainings(lines: Sequence[Line], num_seeds: int) -> int:
    """How many trainings there are in all."""
    num_tuning = len(settings.TUNING_SEEDS)
    return sum(num_tuning * len(decayed) + num_seeds for _, decayed in lines)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _gain(with_it: run.Row, without: run.Row, which: str) -> float:
    return with_it[which]["inductive"]["test"] - without[which]["inductive"]["test"]


def render(searched: Sequence[run.Row], rows: Sequence[run.Row]) -> str:
    """On validation nodes every decay; on test nodes the best against none."""
    found = {
        (Setting(**row["setting"]), row["seed"]): row for row in (*searched, *rows)
    }
    get = lambda setting, seed: found[setting, seed]
    columns = sorted({row["setting"]["weight_decay"] for row in rows})
    tried, tested = [], []
    for without, decayed in lines(searched):
        known = [
            s for s in decayed if all((s, x) in found for x in settings.TUNING_SEEDS)
        ]
        if not known:
            continue
        name = [known[0].method, f"{without.target_epsilon:g}"]
        by_decay = {s.weight_decay: s for s in known}
        tried.append(
            [
                *name,
                _percent(validation(get, without)),
                *(
                    f"{_percent(validation(get, by_decay[x]))}"
                    f" ({shrinkage(by_decay[x]):.1%})"
                    if x in by_decay
                    else "-"
                    for x in columns
                ),
            ]
        )
        best = max(known, key=lambda setting: validation(get, setting))
        seeds = [s for x, s in found if x == best and s not in settings.TUNING_SEEDS]
        pairs = [(found[best, s], found[without, s]) for s in sorted(seeds)]
        if len(pairs) > 1:
            ways = ("accuracy", "averaged_accuracy")
            tested.append(
                [
                    *name,
                    f"{best.weight_decay:g} ({shrinkage(best):.0%})",
                    table.test([b for _, b in pairs], "inductive"),
                    table.test([a for a, _ in pairs], "inductive"),
                    *(table.spread([_gain(*p, way) for p in pairs]) for way in ways),
                ]
            )
    head = ["optimizer", "ε"]
    values = (f"λ = {x:g}" for x in columns)
    return "\n\n".join(
        [
            "On validation nodes, and the share of the weights that decay takes away:",
            table.markdown([*head, "none", *values], tried),
            "On test nodes, the best of these against none:",
            table.markdown(
                [*head, "λ", "none", "with λ", "gain", "gain, mean of iterates"],
                tested,
            ),
        ]
    )


def main() -> None:
    arguments = table.options(__doc__, RESULTS)
    searched = table.read(table.RESULTS)
    if arguments.data_dir:
        graph = data.load(arguments.data_dir)
        results = run.Results(arguments.output, graph)
        make = functools.partial(run.measure, run.Laboratory(graph))
        every, seeds = list(lines(searched)), range(arguments.seeds)
        with rich.progress.Progress() as progress:
            total = num_trainings(every, len(seeds))
            run_all(every, run.recorded(results, make, total, progress), seeds)
    print(render(searched, table.read(arguments.output)))


if __name__ == "__main__":
    main()
