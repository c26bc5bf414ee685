"""Pictures of a run, as figures of matplotlib: of scores, and of Adam's moments.

Curves differ by their dashes and markers, so they can be told apart without color.
Scores come by name, and may have a last axis for seeds: the mean is drawn, with a
standard deviation.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.stats
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from dpadambc.diagnostics import Snapshot
from dpadambc.diagnostics.readout import BIN_EDGES

# Colors that color-blind readers tell apart (Okabe and Ito).
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-"},
    {"color": "#D55E00", "linestyle": "--"},
    {"color": "#0072B2", "linestyle": "-."},
    {"color": "#CC79A7", "linestyle": ":"},
    {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#009E73", "linestyle": (0, (8, 2))},
    {"color": "#56B4E9", "linestyle": (0, (3, 2, 1, 2, 1, 2))},
)
_MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")
_CLEAN = "before the noise (not private)"
_TAIL = 5e-4  # the share of a histogram that is left out at either end

Density = tuple[np.ndarray, np.ndarray]  # heights and edges, as for `Axes.stairs`


def style(i: int, *names: str) -> dict[str, Any]:
    """Dashes and markers come round at different times: 56 that differ."""
    found = _STYLES[i % len(_STYLES)] | {"marker": _MARKERS[i % len(_MARKERS)]}
    return {name: found[name] for name in names or found}


def new_figure(width: float = 6.0, panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * panels, 4.0), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.3)
    return figure, list(axes)


def _mean_and_spread(scores: Any, ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """Over the seeds, if there is an axis more."""
    numbers = np.asarray(scores, float)
    if numbers.ndim == ndim:
        numbers = numbers[..., None]
    freedom = min(1, numbers.shape[-1] - 1)  # of one seed there is no spread
    return numbers.mean(-1), numbers.std(-1, ddof=freedom)


def learning_curves(steps: Sequence[float], curves: Mapping[str, Any]) -> Figure:
    """Test accuracies over the steps, in a band of one standard deviation.

    The legend has the last mean of each.
    """
    figure, (axes,) = new_figure(7.0)
    for i, (name, scores) in enumerate(curves.items()):
        mean, spread = _mean_and_spread(scores, 1)
        label = f"{name}: {mean[-1]:.3g}"
        # Markers are staggered, for curves that lie on each other.
        axes.plot(steps, mean, label=label, markevery=(i, 7), **style(i))
        band = style(i, "color") | {"alpha": 0.15, "lw": 0}
        axes.fill_between(steps, mean - spread, mean + spread, **band)
    axes.set(xlabel="steps", ylabel="test accuracy (%)")
    axes.legend(frameon=False, fontsize="small", title="after the last step")
    return figure


def sweep(
    values: Sequence[float],
    scores: Mapping[str, Any],
    *,
    xlabel: str,
    ylabel: str = "test accuracy (%)",
    reference: Mapping[str, float] | None = None,
) -> Figure:
    """Scores against a positive number, on a log scale; a reference is a level line."""
    figure, (axes,) = new_figure()
    width = (max(values) / min(values)) ** 0.012
    for i, (name, numbers) in enumerate(scores.items()):
        mean, spread = _mean_and_spread(numbers, 1)
        # Side by side, or one spread would cover the other.
        places = np.asarray(values) * width ** (i - (len(scores) - 1) / 2)
        bars = spread if spread.any() else None
        axes.errorbar(places, mean, bars, label=name, capsize=3, **style(i))
    for i, (name, score) in enumerate((reference or {}).items(), start=len(scores)):
        axes.axhline(score, label=name, **style(i, "color", "linestyle"))
    ticks = [min(values)]  # those with room for their number
    for value in sorted(values):
        if value > ticks[-1] * (max(values) / min(values)) ** 0.07:
            ticks.append(value)
    axes.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(ticks, [f"{value:.4g}" for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False)
    return figure


def heat_map(
    rows: Sequence[float],
    columns: Sequence[float],
    scores: Mapping[str, Any],
    *,
    row_label: str,
    column_label: str,
    score_label: str = "test accuracy (%)",
) -> Figure:
    """Scores against two numbers, a panel for each name, with the best framed.

    The colors are lighter where the score is higher, also in gray.
    """
    shape = len(rows), len(columns)
    found = {name: _mean_and_spread(s, 2) for name, s in scores.items()}
    figure, panels = new_figure(6.0 if len(found) == 1 else 4.8, panels=len(found))
    means = np.stack([mean for mean, _ in found.values()])
    norm, cmap = Normalize(float(np.nanmin(means)), float(np.nanmax(means))), "cividis"
    for axes, (name, (mean, spread)) in zip(panels, found.items(), strict=True):
        axes.imshow(mean, cmap, norm, origin="lower", aspect="auto")
        has_seeds = np.ndim(scores[name]) == 3
        for (i, j), number in np.ndenumerate(mean):
            text = f"{number:.3g}" + (f"\n±{spread[i, j]:.2g}" if has_seeds else "")
            color = "white" if norm(number) < 0.5 else "black"
            look: dict[str, Any] = {"color": color, "fontsize": "small"}
            axes.text(j, i, text, ha="center", va="center", **look)
        best = np.unravel_index(np.nanargmax(mean), shape)
        corner = float(best[1]) - 0.47, float(best[0]) - 0.47
        for color, width in (("black", 5.0), ("white", 2.0)):  # seen on every color
            look = {"fill": False, "edgecolor": color, "linewidth": width}
            axes.add_patch(Rectangle(corner, 0.94, 0.94, **look))
        axes.grid(False)
        axes.set_xticks(range(shape[1]), [f"{value:.4g}" for value in columns])
        axes.set_yticks(range(shape[0]), [f"{value:.4g}" for value in rows])
        axes.set(xlabel=column_label, ylabel=row_label)
        axes.set_title(f"{name}: best {mean[best]:.3g}")
    figure.colorbar(ScalarMappable(norm, cmap), ax=panels, label=score_label)
    return figure


def _last(snapshots: Snapshot) -> Snapshot:
    """The last of several snapshots; a single one as it is."""
    if np.ndim(snapshots.step) == 0:
        return snapshots
    return jax.tree.map(lambda x: x[-1], snapshots)


def shares(snapshot: Snapshot, field: str) -> np.ndarray:
    """The histogram of all coordinates: of the field of that name."""
    rows = snapshot.parameters.values()
    counts = [np.asarray(getattr(row, field)) * np.asarray(row.size) for row in rows]
    return np.sum(counts, axis=0) / np.sum([row.size for row in rows])


def _density(shares: np.ndarray, edges: np.ndarray = BIN_EDGES) -> Density:
    """The share of coordinates per unit of length."""
    return shares / np.diff(edges), edges


def _reach(densities: Iterable[Density]) -> tuple[float, float]:
    """From where to where all but the tails lie."""
    lows, highs = [], []
    for heights, edges in densities:
        below = np.cumsum(heights * np.diff(edges))
        lows.append(edges[np.searchsorted(below, _TAIL)])
        highs.append(edges[1 + np.searchsorted(below, 1 - _TAIL)])
    margin = 0.05 * (max(highs) - min(lows))
    return min(lows) - margin, max(highs) + margin


def _stairs(axes: Axes, densities: Mapping[str, Density]) -> None:
    for i, (label, (heights, edges)) in enumerate(densities.items()):
        dashes = style(i, "color", "linestyle")
        axes.stairs(heights, edges, label=label, linewidth=1.6, **dashes)
    # Of the first curve, which is counted: a formula may go down for ever.
    first = next(iter(densities.values()))[0]
    top = max(np.max(heights) for heights, _ in densities.values())
    axes.set(yscale="log", ylabel="share of coordinates per unit")
    axes.set_xlim(*_reach(densities.values()))
    axes.set_ylim(np.min(first[first > 0]) / 3, 3 * top)
    axes.legend(frameon=False, fontsize="small")


def first_moments(snapshots: Snapshot, *, clean: Snapshot | None = None) -> Figure:
    """How the first moment is distributed, beside what the noise alone would give.

    Where noise dominates, the two agree. `clean` is *not private*.
    """
    seen = _last(snapshots)
    densities = {"of the noised gradient": _density(shares(seen, "mu_hat_shares"))}
    if all(row.noise_variance > 0 for row in seen.parameters.values()):
        densities["noise alone"] = _density(np.diff(scipy.stats.norm.cdf(BIN_EDGES)))
    if clean is not None:
        densities[_CLEAN] = _density(shares(_last(clean), "mu_hat_shares"))
    figure, (axes,) = new_figure()
    _stairs(axes, densities)
    axes.set_xlabel("first moment (standard deviations under noise alone)")
    axes.set_title(f"after {int(seen.step):,} steps")
    return figure


def second_moments(
    snapshots: Snapshot | Mapping[str, Snapshot], *, clean: Snapshot | None = None
) -> Figure:
    """The second moment before and after the correction, in units of the noise.

    Noise alone lies at one, and the correction shifts it to zero; the floor is where
    coordinates are stopped. Several runs by name are drawn side by side. `clean` is
    *not private*.
    """
    seen = snapshots if isinstance(snapshots, Mapping) else {"": snapshots}
    figure, panels = new_figure(6.0 if len(seen) == 1 else 5.0, panels=len(seen))
    for axes, (name, one) in zip(panels, seen.items(), strict=True):
        _second_moment(axes, _last(one), None if clean is None else _last(clean))
        if name:
            axes.set_title(f"{name}\n{axes.get_title()}")
    lows, highs = zip(*(axes.get_xlim() for axes in panels), strict=True)
    bottoms, tops = zip(*(axes.get_ylim() for axes in panels), strict=True)
    for axes in panels:
        axes.set_xlim(min(lows), max(highs))
        axes.set_ylim(min(bottoms), max(tops))
    return figure


def _second_moment(axes: Axes, seen: Snapshot, clean: Snapshot | None) -> None:
    rows = seen.parameters.values()
    units = {round(float(r.second_moment_unit / r.noise_variance), 6) for r in rows}
    if len(units) > 1 or not np.isfinite(max(units)):
        raise ValueError(
            "Expected noise of one level in all parameters, and more than none, to draw"
            f" the second moment in its units; the read-outs have {sorted(units)}."
            " Draw a snapshot of part of the parameters."
        )
    edges = BIN_EDGES * max(units)
    found = shares(seen, "excess_shares")
    correction = max(float(row.correction) for row in rows)
    densities = {
        "Adam's": _density(found, edges + 1),
        "corrected": _density(found, edges + 1 - correction),
    }
    if clean is not None:
        densities[_CLEAN] = _density(shares(clean, "excess_shares"), edges)
    _stairs(axes, densities)
    for floor in sorted({f"{r.variance_floor / r.noise_variance:.2g}" for r in rows}):
        axes.axvline(float(floor), color="gray", linestyle=":", label=f"floor, {floor}")
    axes.legend(frameon=False, fontsize="small")
    axes.set_xlabel("second moment (units of the noise variance)")
    at_floor = f"{float(seen.share_at_floor):.0%} at the floor"
    axes.set_title(f"after {int(seen.step):,} steps, {at_floor}")


def updates(snapshots: Mapping[str, Snapshot]) -> Figure:
    """How large the steps are, at a learning rate of one, of optimizers by name."""
    seen = {name: _last(several) for name, several in snapshots.items()}
    figure, (axes,) = new_figure()
    of = {name: _density(shares(one, "update_shares")) for name, one in seen.items()}
    _stairs(axes, of)
    axes.set_xlabel("update (units of the learning rate)")
    steps = sorted({int(one.step) for one in seen.values()})
    axes.set_title(f"after {' and '.join(f'{step:,}' for step in steps)} steps")
    return figure
