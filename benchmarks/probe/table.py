"""The results of a linear probe as tables in Markdown."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.probe import linear
from benchmarks.records import Row
from benchmarks.tables import markdown, spread

Goals = Mapping[float, float]  # accuracy by epsilon


def _of(rows: Sequence[Row], what: str, **identity: object) -> list[Row]:
    wanted = {"what": what, **identity}
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def _check(rows: Sequence[Row]) -> None:
    """Raises if rows of several protocols would stand in one cell of a table."""
    names = ("features", "expected_batch_size", "iterations", "l2_clip_norm")
    protocols: dict[object, set[object]] = {}
    for row in rows:
        if row["what"] in ("probe", "trial of the probe"):
            of_epsilon = protocols.setdefault(row["target_epsilon"], set())
            of_epsilon.add(tuple(row[name] for name in names))
    for epsilon, several in protocols.items():
        if len(several) > 1:
            raise ValueError(
                f"Expected rows of one protocol at epsilon {epsilon}, got {several}."
                " Keep the rows of each in a file of its own."
            )


def _epsilons(rows: Sequence[Row]) -> list[float]:
    return sorted({row["target_epsilon"] for row in _of(rows, "probe")})


def _accuracy(rows: Sequence[Row]) -> str:
    return spread([row["accuracy"] for row in rows])


Cell = Callable[[Sequence[Row]], str]


def _by_epsilon(rows: Sequence[Row], what: str, cell: Cell, *below: list[str]) -> str:
    """One line for each optimizer, one column for each epsilon."""
    epsilons = _epsilons(rows)
    body = []
    for method in linear.OPTIMIZERS:
        found = [_of(rows, what, method=method, target_epsilon=e) for e in epsilons]
        if any(found):
            body.append([method, *(cell(x) if x else "-" for x in found)])
    header = ["optimizer", *(f"ε = {e:g}" for e in epsilons)]
    return markdown(header, [*body, *below])


def accuracies(rows: Sequence[Row], goals: Goals) -> str:
    """Of each optimizer by epsilon, on test examples."""
    epsilons = _epsilons(rows)
    searched = [
        _of(rows, "probe", target_epsilon=e)[0]["search_epsilon"] for e in epsilons
    ]
    aims = [f"{100 * goals[e]:g}" if e in goals else "-" for e in epsilons]
    below = [["ε of a search alone", *(f"{x:.2f}" for x in searched)]]
    below += [["goal", *aims]] if goals else []
    return _by_epsilon(rows, "probe", _accuracy, *below)


def differences(rows: Sequence[Row]) -> str:
    """What the correction changes, in points: mean and standard error over seeds.

    The two runs of a seed have the same batches, and the same noise.
    """
    epsilons = _epsilons(rows)

    def cell(corrected, other, epsilon):
        found = [
            {row["seed"]: row["accuracy"] for row in _of(rows, "probe", **line)}
            for line in (
                {"method": method, "target_epsilon": epsilon}
                for method in (corrected, other)
            )
        ]
        seeds = sorted(set(found[0]) & set(found[1]))
        if len(seeds) < 2:
            return "-"
        gains = [100 * (found[0][seed] - found[1][seed]) for seed in seeds]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        return f"{statistics.fmean(gains):+.2f} ± {error:.2f}"

    pairs = (
        ("DP-AdamBC", "DP-Adam"),
        ("DP-AdamBC", linear.CONTROL),
        ("DP-AdamW-BC", "DP-AdamW"),
    )
    body = [[f"{x} less {y}", *(cell(x, y, e) for e in epsilons)] for x, y in pairs]
    return markdown(["difference", *(f"ε = {e:g}" for e in epsilons)], body)


def _setting(rows: Sequence[Row]) -> str:
    """What the search chose, and the share of coordinates at the floor at the end."""
    method, candidate = rows[0]["method"], rows[0]["candidate"]
    parts = [f"η {candidate['learning_rate']:.3g}"]
    if "AdamW" in method:
        parts.append(f"λ {candidate['weight_decay']:.2g}")
    if method in linear.WITH_A_FLOOR:
        share = statistics.fmean(row["share_at_floor"] for row in rows)
        parts.append(f"floor {candidate['floor']:.2g} ({share:.0%})")
    return ", ".join(parts)


def _best_and_median(rows: Sequence[Row]) -> str:
    scores = [100 * row["accuracy"] for row in rows]
    return f"{max(scores):.2f} ({statistics.median(scores):.2f})"


def render(rows: Sequence[Row], goals: Goals) -> str:
    """All tables.

    Raises:
      ValueError: if there are rows of several protocols at one epsilon.
    """
    _check(rows)
    sections = [
        "Test accuracy, mean and standard deviation over seeds:",
        accuracies(rows, goals),
        "What the correction changes, mean and standard error over seeds:",
        differences(rows),
        "Settings that the search chose (share at the floor):",
        _by_epsilon(rows, "probe", _setting),
        "Validation accuracy of the trials, the best (the median):",
        _by_epsilon(rows, "trial of the probe", _best_and_median),
    ]
    for row in _of(rows, "without privacy"):
        sections.append(f"Without privacy: {100 * row['accuracy']:.2f}.")
    return "\n\n".join(sections)
