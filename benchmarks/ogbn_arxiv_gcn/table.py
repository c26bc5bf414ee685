"""The results on a graph as tables in Markdown.

python -m benchmarks.ogbn_arxiv_gcn.table [FILE] [--earlier FILE]

An earlier record was made with more noise for the same epsilon, by a looser bound.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import settings
from benchmarks.tables import markdown, spread

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
EARLIER = pathlib.Path(__file__).with_name("results_by_joint_convexity.jsonl")

Row = dict[str, Any]
Line = tuple[str, float | None, bool]  # optimizer, target epsilon, sees nodes alone


def options(doc: str | None, output: pathlib.Path) -> argparse.Namespace:
    """Of a command that trains where it has the data, and then prints its tables."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    parser.add_argument("--output", type=pathlib.Path, default=output)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    return parser.parse_args()


def read(path: pathlib.Path) -> list[Row]:
    """The lines of a record; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _line(row: Row) -> Line:
    setting = row["setting"]
    is_alone = setting["max_memberships"] == 0
    return setting["method"], setting["target_epsilon"], is_alone


def score(row: Row) -> float:
    """What settings are chosen by: with the neighbors that were trained with."""
    alone = row["setting"]["max_memberships"] == 0
    return row["accuracy"]["alone" if alone else "inductive"]["valid"]


def lines(rows: Sequence[Row]) -> dict[Line, list[Row]]:
    """The trainings with the seeds of the results, by what they are a line of.

    Of several settings that were trained with all seeds, it is the one that does best
    on validation nodes.
    """
    found: dict[Line, dict[str, list[Row]]] = {}
    for row in rows:
        if row["seed"] not in settings.TUNING_SEEDS:
            by_setting = found.setdefault(_line(row), {})
            by_setting.setdefault(json.dumps(row["setting"]), []).append(row)
    mean_score = lambda rows: (len(rows), statistics.fmean(map(score, rows)))
    return {
        line: max(by_setting.values(), key=mean_score)
        for line, by_setting in found.items()
    }


def test(rows: Sequence[Row], how: str, which: str = "accuracy") -> str:
    """The accuracy on test nodes."""
    return spread([row[which][how]["test"] for row in rows])


def by_epsilon(
    found: dict[Line, list[Row]], is_alone: bool, cell: Callable[[list[Row]], str]
) -> str:
    """One line for each optimizer, one column for each epsilon."""
    keys = [key for key in found if key[1] is not None and key[2] == is_alone]
    epsilons = sorted({key[1] for key in keys if key[1] is not None})
    methods = [m for m in experiment.PRIVATE if any(key[0] == m for key in keys)]
    cells = lambda m, e: found.get((m, e, is_alone))
    body = [
        [m, *(cell(rows) if (rows := cells(m, e)) else "-" for e in epsilons)]
        for m in methods
    ]
    return markdown(["optimizer", *(f"ε = {e:g}" for e in epsilons)], body)


def _setting(rows: list[Row]) -> str:
    s = rows[0]["setting"]
    shares = [r["share_at_floor"] for r in rows if r["share_at_floor"] is not None]
    floor = f", floor {s['floor']:g} ({statistics.fmean(shares):.0%})" if shares else ""
    return (
        f"K {s['max_memberships']}, B {s['expected_batch_size']:,},"
        f" T {s['iterations']}, C {s['l2_clip_norm']:g},"
        f" η {s['learning_rate']:g}{floor}"
    )


def without_privacy(found: dict[Line, list[Row]]) -> str:
    """The lines that private training is compared with."""
    body = []
    for is_alone in (False, True):
        rows = found.get((experiment.NON_PRIVATE, None, is_alone))
        if rows:
            name = "nodes alone" if is_alone else "with neighbors"
            ways = [test(rows, way) for way in ("inductive", "transductive", "alone")]
            body.append([f"not private, {name}", *ways])
    return markdown(["trained", "inductive", "transductive", "alone"], body)


def side_by_side(rows: Sequence[Row], earlier: Sequence[Row]) -> str:
    """Test accuracy with the noise of the earlier bound, now, and the noise of both."""
    before, after = lines(earlier), lines(rows)

    def cell(rows):
        line = _line(rows[0])
        if line not in before:
            return "-"
        levels = [r[0]["noise_stddev"] for r in (before[line], rows)]
        is_same = before[line][0]["setting"] == rows[0]["setting"]
        ratio = f"noise × {levels[1] / levels[0]:.3f}" if is_same else "other setting"
        accuracies = [test(r, "inductive") for r in (before[line], rows)]
        return f"{' → '.join(accuracies)} ({ratio})"

    return by_epsilon(after, False, cell)


def render(rows: Sequence[Row]) -> str:
    """All tables."""
    found = lines(rows)
    inductive = lambda rows: test(rows, "inductive")
    averaged = lambda rows: test(rows, "inductive", "averaged_accuracy")
    other = lambda rows: f"{rows[0]['epsilon_at_other_delta']:.2f}"
    ways = {
        "Private, trained and tested with neighbors (inductive):": (False, inductive),
        "The same, the mean of the last iterates:": (False, averaged),
        "The same, tested with the edges to training nodes (transductive):": (
            False,
            lambda rows: test(rows, "transductive"),
        ),
        "Settings:": (False, _setting),
        "Epsilon at the other delta:": (False, other),
        "Private, trained on nodes alone, and tested so:": (
            True,
            lambda rows: test(rows, "alone"),
        ),
        "Trained on nodes alone, and tested with neighbors (inductive):": (
            True,
            inductive,
        ),
        "The same, the mean of its last iterates:": (True, averaged),
        "Its settings:": (True, _setting),
    }
    sections = []
    if any(key[1] is None for key in found):
        sections.append(without_privacy(found))
    for title, (is_alone, cell) in ways.items():
        if any(key[1] is not None and key[2] == is_alone for key in found):
            sections += [title, by_epsilon(found, is_alone, cell)]
    return "\n\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=pathlib.Path, nargs="?", default=RESULTS)
    parser.add_argument("--earlier", type=pathlib.Path, default=EARLIER)
    arguments = parser.parse_args()
    rows, earlier = read(arguments.file), read(arguments.earlier)
    print(render(rows))
    print("\nInductive, with the noise of the earlier bound and now:\n")
    print(side_by_side(rows, earlier))


if __name__ == "__main__":
    main()
