"""The results on ImageNet's features as tables in Markdown."""

import statistics
from collections.abc import Sequence

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
    return spread([row["accuracy"] for row in rows]) if rows else "-"


def accuracies(rows: Sequence[Row]) -> str:
    """Of each optimizer by epsilon, on test images."""
    epsilons = _epsilons(rows)
    body = [
        [method]
        + [
            _accuracy(_of(rows, "probe", method=method, target_epsilon=epsilon))
            for epsilon in epsilons
        ]
        for method in probe.OPTIMIZERS
    ]
    searched = {
        epsilon: _of(rows, "probe", target_epsilon=epsilon)[0]["search_epsilon"]
        for epsilon in epsilons
    }
    body.append(["ε with the search", *(f"{searched[e]:.2f}" for e in epsilons)])
    goals = [f"{100 * GOALS[e]:g}" if e in GOALS else "-" for e in epsilons]
    body.append(["goal", *goals])
    return markdown(["optimizer", *(f"ε = {e:g}" for e in epsilons)], body)


def _setting(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    method, candidate = rows[0]["method"], rows[0]["candidate"]
    parts = [f"η {candidate['learning_rate']:.3g}"]
    if "AdamW" in method:
        parts.append(f"λ {candidate['weight_decay']:.2g}")
    if method in probe.WITH_A_FLOOR:
        share = statistics.fmean(row["share_at_floor"] for row in rows)
        parts.append(f"floor {candidate['floor']:.2g} ({share:.0%})")
    return ", ".join(parts)


def settings(rows: Sequence[Row]) -> str:
    """What the search chose, and the share of coordinates at the floor at the end."""
    epsilons = _epsilons(rows)
    body = [
        [method]
        + [
            _setting(_of(rows, "probe", method=method, target_epsilon=epsilon))
            for epsilon in epsilons
        ]
        for method in probe.OPTIMIZERS
    ]
    return markdown(["optimizer", *(f"ε = {e:g}" for e in epsilons)], body)


def validation(rows: Sequence[Row]) -> str:
    """Of all trials, the best and the median on validation images."""
    epsilons = _epsilons(rows)

    def cell(method, epsilon):
        trials = _of(rows, "trial of the probe", method=method, target_epsilon=epsilon)
        scores = [100 * row["accuracy"] for row in trials]
        return f"{max(scores):.2f} ({statistics.median(scores):.2f})"

    body = [[m, *(cell(m, e) for e in epsilons)] for m in probe.OPTIMIZERS]
    return markdown(["optimizer", *(f"ε = {e:g}" for e in epsilons)], body)


def render(rows: Sequence[Row]) -> str:
    """All tables."""
    sections = [
        "Test accuracy, mean and standard deviation over seeds:",
        accuracies(rows),
        "Settings that the search chose (share at the floor):",
        settings(rows),
        "Validation accuracy of the trials, the best (the median):",
        validation(rows),
    ]
    for row in _of(rows, "without privacy"):
        sections.append(f"Without privacy: {100 * row['accuracy']:.2f}.")
    return "\n\n".join(sections)
