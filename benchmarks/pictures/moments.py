"""Adam's moments and steps, from snapshots of a run."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np
import scipy.stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.pictures._axes import new_figure, style
from dpadambc.diagnostics import Snapshot
from dpadambc.diagnostics.readout import BIN_EDGES

# What is shown of a histogram: all but this share, at either end.
_TAIL = 5e-4

Density = tuple[
    np.ndarray, np.ndarray
]  # heights and edges, as `Axes.stairs` takes them


def _last(snapshots: Snapshot) -> Snapshot:
    """The last of several snapshots; a single one as it is."""
    if np.ndim(snapshots.step) == 0:
        return snapshots
    return jax.tree.map(lambda x: x[-1], snapshots)


def _shares(snapshots: Snapshot, field: str) -> np.ndarray:
    """The histogram of all coordinates: of the field of that name."""
    rows = snapshots.parameters.values()
    sizes = [np.asarray(row.size)[..., None] for row in rows]
    counts = [
        np.asarray(getattr(row, field)) * n for row, n in zip(rows, sizes, strict=True)
    ]
    return np.sum(counts, axis=0) / np.sum(sizes, axis=0)


def _density(shares: np.ndarray, edges: np.ndarray) -> Density:
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
    axes.set_xlim(*_reach(densities.values()))
    axes.set_yscale("log")
    # Of the first curve, which is counted: a formula may go down for ever.
    heights = next(iter(densities.values()))[0]
    top = max(np.max(heights) for heights, _ in densities.values())
    axes.set_ylim(np.min(heights[heights > 0]) / 3, 3 * top)
    axes.set_ylabel("share of coordinates per unit")
    axes.legend(frameon=False, fontsize="small")


def _normal(edges: np.ndarray) -> Density:
    return np.diff(scipy.stats.norm.cdf(edges)) / np.diff(edges), edges


def _ratio_of_units(seen: Snapshot) -> float:
    """The unit of the excess, over the noise variance."""
    rows = seen.parameters.values()
    ratios = {round(float(r.second_moment_unit / r.noise_variance), 6) for r in rows}
    if len(ratios) > 1 or not np.isfinite(max(ratios)):
        raise ValueError(
            "Expected noise of one level in all parameters, and more than none, to draw"
            f" the second moment in its units; the read-outs have {sorted(ratios)}."
            " Draw a snapshot of part of the parameters."
        )
    return max(ratios)


def first_moments(snapshots: Snapshot, *, clean: Snapshot | None = None) -> Figure:
    """How the first moment is distributed, beside what the noise alone would give.

    As the DP-AdamBC paper shows moments. Where noise dominates, the two agree.

    Args:
      snapshots: of `diagnostics.snapshot`; the last of several.
      clean: of `diagnostics.not_private.snapshot`, to be laid over. *Not private.*

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from benchmarks import pictures
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> figure = pictures.first_moments(seen)
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['of the noised gradient', 'noise alone']
    """
    seen = _last(snapshots)
    densities = {
        "of the noised gradient": _density(_shares(seen, "mu_hat_shares"), BIN_EDGES),
    }
    if all(row.noise_variance > 0 for row in seen.parameters.values()):
        densities["noise alone"] = _normal(BIN_EDGES)
    if clean is not None:
        shares = _shares(_last(clean), "mu_hat_shares")
        densities["before the noise (not private)"] = _density(shares, BIN_EDGES)
    figure, (axes,) = new_figure()
    _stairs(axes, densities)
    axes.set_xlabel("first moment (standard deviations under noise alone)")
    axes.set_title(f"after {int(seen.step):,} steps")
    return figure


def second_moments(
    snapshots: Snapshot | Mapping[str, Snapshot],
    *,
    clean: Snapshot | Mapping[str, Snapshot] | None = None,
) -> Figure:
    """The second moment before and after the correction, in units of the noise.

    As in the DP-AdamBC paper's Figures 1 and 4. Noise alone lies at one, and the
    correction shifts it to zero; the floor is where coordinates are stopped.

    Args:
      snapshots: of `diagnostics.snapshot`; the last of several. Those of several runs
        by name, such as those at two floors, are drawn side by side.
      clean: of `diagnostics.not_private.snapshot`, to be laid over; of several runs, by
        the same names. *Not private.*

    Returns:
      A matplotlib figure, with a panel for each run.

    Raises:
      ValueError: if the noise level differs between parameters, or is none; there is no
        snapshot; or the clean runs are not those.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from benchmarks import pictures
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> figure = pictures.second_moments(seen)
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ["Adam's", 'corrected', 'floor, 1.4']
    """
    seen = _by_name(snapshots)
    not_private = dict.fromkeys(seen) if clean is None else _by_name(clean)
    if list(not_private) != list(seen):
        raise ValueError(
            "Expected clean moments by the names of the runs,"
            f" {list(seen)}, got {list(not_private)}."
        )
    figure, panels = new_figure(6.0 if len(seen) == 1 else 5.0, panels=len(seen))
    for axes, (name, one) in zip(panels, seen.items(), strict=True):
        _second_moment(axes, one, not_private[name])
        if name:
            axes.set_title(f"{name}\n{axes.get_title()}")
    lows, highs = zip(*(axes.get_xlim() for axes in panels), strict=True)
    bottoms, tops = zip(*(axes.get_ylim() for axes in panels), strict=True)
    for axes in panels:
        axes.set_xlim(min(lows), max(highs))
        axes.set_ylim(min(bottoms), max(tops))
    return figure


def _by_name(snapshots: Snapshot | Mapping[str, Snapshot]) -> dict[str, Snapshot]:
    """The last of each; one alone has no name."""
    named = snapshots if isinstance(snapshots, Mapping) else {"": snapshots}
    if not named:
        raise ValueError("Expected a snapshot at least, got none.")
    return {name: _last(one) for name, one in named.items()}


def _second_moment(axes: Axes, seen: Snapshot, clean: Snapshot | None) -> None:
    unit = _ratio_of_units(seen)
    rows = seen.parameters.values()
    correction = max(float(row.correction) for row in rows)
    shares = _shares(seen, "excess_shares")
    nu_hat = BIN_EDGES * unit + 1
    densities = {
        "Adam's": _density(shares, nu_hat),
        "corrected": _density(shares, nu_hat - correction),
    }
    if clean is not None:
        other = _shares(clean, "excess_shares")
        densities["before the noise (not private)"] = _density(other, BIN_EDGES * unit)
    _stairs(axes, densities)
    for floor in sorted({f"{r.variance_floor / r.noise_variance:.2g}" for r in rows}):
        axes.axvline(float(floor), color="gray", linestyle=":", label=f"floor, {floor}")
    axes.legend(frameon=False, fontsize="small")
    axes.set_xlabel("second moment (units of the noise variance)")
    axes.set_title(
        f"after {int(seen.step):,} steps, {float(seen.share_at_floor):.0%} at the floor"
    )


def updates(
    snapshots: Snapshot | Mapping[str, Snapshot], *, clean: Snapshot | None = None
) -> Figure:
    """How large the steps are, at a learning rate of one.

    As in the DP-AdamBC paper's Figure 4, where those with and without the correction
    are in one histogram.

    Args:
      snapshots: of `diagnostics.snapshot`; the last of several. Those of several
        optimizers by name are laid over each other.
      clean: of `diagnostics.not_private.snapshot`, to be laid over. *Not private.*

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if there is no snapshot.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from benchmarks import pictures
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> plain = optax.ScaleByAdamState(state.count, state.mu, state.nu)
      >>> figure = pictures.updates({
      ...     "DP-Adam": dpadambc.diagnostics.snapshot(plain, noise_stddev=1.0),
      ...     "DP-AdamBC": dpadambc.diagnostics.snapshot(state)})
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['DP-Adam', 'DP-AdamBC']
    """
    seen = _by_name(snapshots)
    found = {
        name or "of the noised gradient": _shares(one, "update_shares")
        for name, one in seen.items()
    }
    if clean is not None:
        found["before the noise (not private)"] = _shares(_last(clean), "update_shares")
    figure, (axes,) = new_figure()
    _stairs(axes, {k: _density(share, BIN_EDGES) for k, share in found.items()})
    axes.set_xlabel("update (units of the learning rate)")
    steps = sorted({int(one.step) for one in seen.values()})
    axes.set_title(f"after {' and '.join(f'{step:,}' for step in steps)} steps")
    return figure


def floor_share(snapshots: Snapshot) -> Figure:
    """The share of coordinates at the floor over time, by parameter and in all.

    Args:
      snapshots: several.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if there is only one snapshot.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from benchmarks import pictures
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> several = jax.tree.map(lambda *x: jnp.stack(x), seen, seen)
      >>> figure = pictures.floor_share(several)
      >>> figure.axes[0].get_ylabel()
      'share of coordinates at the floor (%)'
    """
    if np.ndim(snapshots.step) == 0:
        raise ValueError(
            "Expected several snapshots, got one. Return snapshots from a scan."
        )
    figure, (axes,) = new_figure()
    steps, share = snapshots.step, snapshots.share_at_floor
    axes.plot(steps, share, label="all", linewidth=2.5, color="k")
    for i, (name, row) in enumerate(snapshots.parameters.items(), start=1):
        axes.plot(steps, row.share_at_floor, label=name, markevery=3, **style(i))
    axes.set_xlabel("steps")
    axes.set_ylabel("share of coordinates at the floor (%)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return figure
