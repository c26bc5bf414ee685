"""The control of DP-AdamBC: its floor, and nothing subtracted.

    python -m benchmarks.ogbn_arxiv_gcn.control --data-dir DIR [--seeds 5]
    python -m benchmarks.ogbn_arxiv_gcn.control          # prints the table

The settings are those that the search chose for DP-AdamBC, but for the learning rate,
which is searched for anew on validation nodes with the first seed of the trials. The
winner is trained with the seeds of the results: the batches and the noise are those of
DP-AdamBC. Every training is written down as it ends, and found there by a later call.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence

import rich.progress

from benchmarks.ogbn_arxiv_gcn import data, run, settings, table
from benchmarks.ogbn_arxiv_gcn.settings import Setting

RESULTS = pathlib.Path(__file__).with_name("control.jsonl")

EPSILONS = (3.0, 12.0)
# Times that of DP-AdamBC, whose steps are larger at the same rate.
LEARNING_RATES = (1.0, 2.0, 4.0)

Line = tuple[Setting, list[Setting]]  # of DP-AdamBC, and of the control


def lines(searched: Sequence[run.Row]) -> Iterator[Line]:
    """What the search chose, and the same without the subtraction."""
    chosen = table.lines(searched)
    for target in EPSILONS:
        rows = chosen["DP-AdamBC", target, False]
        corrected = Setting(**rows[0]["setting"])
        yield (
            corrected,
            [
                dataclasses.replace(
                    corrected,
                    correction=0.0,
                    learning_rate=factor * corrected.learning_rate,
                )
                for factor in LEARNING_RATES
            ],
        )


def best(get: run.Get, controls: Sequence[Setting]) -> Setting:
    """The control with the best accuracy on validation nodes."""
    first, _ = settings.TUNING_SEEDS
    return max(controls, key=lambda setting: table.score(get(setting, first)))


def render(searched: Sequence[run.Row], rows: Sequence[run.Row]) -> str:
    """On test nodes, both."""
    found = {
        (Setting(**row["setting"]), row["seed"]): row for row in (*searched, *rows)
    }
    body = []
    for corrected, controls in lines(searched):
        known = [s for s in controls if (s, settings.TUNING_SEEDS[0]) in found]
        if not known:
            continue
        chosen = best(lambda setting, seed: found[setting, seed], known)
        seeds = sorted(s for x, s in found if x == chosen and s < 1_000)
        if not seeds:
            continue
        trained = [[found[x, s] for s in seeds] for x in (corrected, chosen)]
        ways = ("accuracy", "averaged_accuracy")
        body.append(
            [
                f"{corrected.target_epsilon:g}",
                f"{chosen.learning_rate:.2g}",
                *(table.test(x, "inductive", way) for way in ways for x in trained),
            ]
        )
    head = ["ε", "η of the control", "DP-AdamBC", "floor alone"]
    return table.markdown([*head, "DP-AdamBC, mean", "floor alone, mean"], body)


def main() -> None:
    arguments = table.options(__doc__, RESULTS)
    searched = table.read(table.RESULTS)
    if arguments.data_dir:
        graph = data.load(arguments.data_dir)
        results = run.Results(arguments.output, graph)
        make = functools.partial(run.measure, run.Laboratory(graph))
        every = list(lines(searched))
        total = len(every) * (len(LEARNING_RATES) + arguments.seeds)
        with rich.progress.Progress() as progress:
            get = run.recorded(results, make, total, progress)
            for _, controls in every:
                chosen = best(get, controls)
                for seed in range(arguments.seeds):
                    get(chosen, seed)
    print(render(searched, table.read(arguments.output)))


if __name__ == "__main__":
    main()
