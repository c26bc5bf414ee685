"""The results on ImageNet's features as tables in Markdown."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.cifar10 import probe
from benchmarks.ogbn_arxiv_gcn.table import markdown, spread
from benchmarks.records import Row

# What this experiment set out to reach on the test images.
GOALS = {1.0: 0.88, 8.0: 0.90}


def _of(rows: Sequence[Row], what: str, **identity: object) -> list[Row]:
    wanted = {"what": what, **identity}
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def _epsilons(rows: Sequence[Row]) -> list[float]:
    return sorted({row["target_epsilon"] for row in _of(rows, "probe")})


def _accuracy(rows: Sequence[Row]) -> str:
    return spread([row["accuracy"] for row in rows])


Cell = Callable[[Sequence[Row]], str]


def _by_epsilon(rows: Sequence[Row], what: str, cell: Cell, *below: list[str]) -> str:
    """One line for each optimizer, one column for each epsilon."""
    epsilons = _epsilons(rows)
    body = []
    for method in probe.OPTIMIZERS:
        found = [_of(rows, what, method=method, target_epsilon=e) for e in epsilons]
        body.append([method, *(cell(x) if x else "-" for x in found)])
    header = ["optimizer", *(f"ε = {e:g}" for e in epsilons)]
    return markdown(header, [*body, *below])


def accuracies(rows: Sequence[Row]) -> str:
    """Of each optimizer by epsilon, on test images."""
    epsilons = _epsilons(rows)
    searched = [
        _of(rows, "probe", target_epsilon=e)[0]["search_epsilon"] for e in epsilons
    ]
    goals = [f"{100 * GOALS[e]:g}" if e in GOALS else "-" for e in epsilons]
    return _by_epsilon(
        rows,
        "probe",
        _accuracy,
        ["ε with the search", *(f"{x:.2f}" for x in searched)],
        ["goal", *goals],
    )


def _setting(rows: Sequence[Row]) -> str:
    """What the search chose, and the share of coordinates at the floor at the end."""
    method, candidate = rows[0]["method"], rows[0]["candidate"]
    parts = [f"η {candidate['learning_rate']:.3g}"]
    if "AdamW" in method:
        parts.append(f"λ {candidate['weight_decay']:.2g}")
    if method in probe.WITH_A_FLOOR:
        share = statistics.fmean(row["share_at_floor"] for row in rows)
        parts.append(f"floor {candidate['floor']:.2g} ({share:.0%})")
    return ", ".join(parts)


def _best_and_median(rows: Sequence[Row]) -> str:
    scores = [100 * row["accuracy"] for row in rows]
    return f"{max(scores):.2f} ({statistics.median(scores):.2f})"


def differences(rows: Sequence[Row]) -> str:
    """What the correction changes, in points: mean and standard error over seeds.

    The two runs of a seed have the same batches, and the same noise.
    """
    epsilons = _epsilons(rows)

    def cell(better, worse, epsilon):
        found = [
            _of(rows, "probe", method=method, target_epsilon=epsilon)
            for method in (better, worse)
        ]
        if not all(found) or len(found[0]) != len(found[1]) or len(found[0]) < 2:
            return "-"
        pairs = zip(
            *(sorted(x, key=lambda row: row["seed"]) for x in found), strict=True
        )
        gains = [100 * (x["accuracy"] - y["accuracy"]) for x, y in pairs]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        return f"{statistics.fmean(gains):+.2f} ± {error:.2f}"

    body = [
        [f"{x} less {y}", *(cell(x, y, epsilon) for epsilon in epsilons)]
        for x, y in (
            ("DP-AdamBC", "DP-Adam"),
            ("DP-AdamBC", probe.CONTROL),
            ("DP-AdamW-BC", "DP-AdamW"),
        )
    ]
    return markdown(["difference", *(f"ε = {e:g}" for e in epsilons)], body)


def heads(rows: Sequence[Row]) -> str:
    """Test accuracy with the head as it was, and tuned, by optimizer and epsilon."""
    lines = dict.fromkeys((row["trained"], row["method"]) for row in rows)
    epsilons = sorted({row["target_epsilon"] for row in rows})
    body = []
    for trained, method in lines:
        of_line = {"trained": trained, "method": method}
        found = [_of(rows, "head", **of_line, target_epsilon=e) for e in epsilons]
        body.append(
            [f"{trained}, {method}", *(_accuracy(x) if x else "-" for x in found)]
        )
    return markdown(["trained", *(f"ε = {e:g}" for e in epsilons)], body)


def render(rows: Sequence[Row]) -> str:
    """All tables."""
    sections = [
        "Test accuracy, mean and standard deviation over seeds:",
        accuracies(rows),
        "What the correction changes, mean and standard error over seeds:",
        differences(rows),
        "Settings that the search chose (share at the floor):",
        _by_epsilon(rows, "probe", _setting),
        "Validation accuracy of the trials, the best (the median):",
        _by_epsilon(rows, "trial of the probe", _best_and_median),
    ]
    if tuned := _of(rows, "head"):
        sections += ["The head tuned, 16 positions, no mirror images:", heads(tuned)]
    for row in _of(rows, "without privacy"):
        sections.append(f"Without privacy: {100 * row['accuracy']:.2f}.")
    return "\n\n".join(sections)
