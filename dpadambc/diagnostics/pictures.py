"""Pictures of a run; they need `dpadambc[pictures]`, for matplotlib.

Every function returns a matplotlib figure, which can be shown in a notebook or saved
with `figure.savefig(path)`. Curves differ by their dashes and markers, so they can be
told apart without color.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.stats

from dpadambc.diagnostics import BIN_EDGES, Snapshot
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.planning import PlannedRun
from dpadambc.mechanisms.trade_off import TradeOff

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "diagnostics.pictures needs matplotlib: pip install 'dpadambc[pictures]'."
    ) from error

__all__ = [
    "equivalence",
    "first_moments",
    "floor_share",
    "plan",
    "second_moments",
    "sweep",
    "trade_off",
    "updates",
]

# Colors that color-blind readers tell apart (Okabe and Ito).
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-"},
    {"color": "#D55E00", "linestyle": "--"},
    {"color": "#0072B2", "linestyle": "-."},
    {"color": "#CC79A7", "linestyle": ":"},
    {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
)
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")
# What is shown of a histogram: all but this share, at either end.
_TAIL = 5e-4

Density = tuple[
    np.ndarray, np.ndarray
]  # heights and edges, as `Axes.stairs` takes them


def _style(i: int, *names: str) -> dict[str, Any]:
    """Dashes and markers come round at different times: 35 that differ."""
    style = _STYLES[i % len(_STYLES)] | {"marker": _MARKERS[i % len(_MARKERS)]}
    return {name: style[name] for name in names or style}


def _figure(width: float = 6.0, panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * panels, 4.0), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.3)
    return figure, list(axes)


def _last(snapshots: Snapshot) -> Snapshot:
    """The last of several snapshots; a single one as it is."""
    if np.ndim(snapshots.step) == 0:
        return snapshots
    return jax.tree.map(lambda x: x[-1], snapshots)


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
        style = _style(i, "color", "linestyle")
        axes.stairs(heights, edges, label=label, linewidth=1.6, **style)
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

    As in the DP-AdamBC paper's Figures 1 and 4. Where noise dominates, the two agree.

    Args:
      snapshots: of `diagnostics.snapshot`; the last of several.
      clean: of `diagnostics.not_private.snapshot`, to be laid over. *Not private.*

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> figure = dpadambc.diagnostics.pictures.first_moments(seen)
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['of the noised gradient', 'noise alone']
    """
    seen = _last(snapshots)
    densities = {
        "of the noised gradient": _density(seen.shares("mu_hat_shares"), BIN_EDGES),
    }
    if all(row.noise_variance > 0 for row in seen.parameters.values()):
        densities["noise alone"] = _normal(BIN_EDGES)
    if clean is not None:
        shares = _last(clean).shares("mu_hat_shares")
        densities["before the noise (not private)"] = _density(shares, BIN_EDGES)
    figure, (axes,) = _figure()
    _stairs(axes, densities)
    axes.set_xlabel("first moment (standard deviations under noise alone)")
    axes.set_title(f"after {int(seen.step):,} steps")
    return figure


def second_moments(snapshots: Snapshot, *, clean: Snapshot | None = None) -> Figure:
    """The second moment before and after the correction, in units of the noise.

    As in the DP-AdamBC paper's Figures 1 and 4. Noise alone lies at one, and the
    correction shifts it to zero; the floor is where coordinates are stopped.

    Args:
      snapshots: of `diagnostics.snapshot`; the last of several.
      clean: of `diagnostics.not_private.snapshot`, to be laid over. *Not private.*

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if the noise level differs between parameters, or is none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> figure = dpadambc.diagnostics.pictures.second_moments(seen)
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ["Adam's", 'corrected', 'floor, 1.4']
    """
    seen = _last(snapshots)
    unit = _ratio_of_units(seen)
    shares = seen.shares("excess_shares")
    densities = {
        "Adam's": _density(shares, BIN_EDGES * unit + 1),
        "corrected": _density(shares, BIN_EDGES * unit),
    }
    if clean is not None:
        other = _last(clean).shares("excess_shares")
        densities["before the noise (not private)"] = _density(other, BIN_EDGES * unit)
    figure, (axes,) = _figure()
    _stairs(axes, densities)
    rows = seen.parameters.values()
    for floor in sorted({f"{r.variance_floor / r.noise_variance:.2g}" for r in rows}):
        axes.axvline(float(floor), color="gray", linestyle=":", label=f"floor, {floor}")
    axes.legend(frameon=False, fontsize="small")
    axes.set_xlabel("second moment (units of the noise variance)")
    axes.set_title(
        f"after {int(seen.step):,} steps, {float(seen.share_at_floor):.0%} at the floor"
    )
    return figure


def updates(snapshots: Snapshot, *, clean: Snapshot | None = None) -> Figure:
    """How large the steps are, at a learning rate of one.

    Args:
      snapshots: of `diagnostics.snapshot`; the last of several.
      clean: of `diagnostics.not_private.snapshot`, to be laid over. *Not private.*

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> figure = dpadambc.diagnostics.pictures.updates(seen)
      >>> figure.axes[0].get_xlabel()
      'update (units of the learning rate)'
    """
    seen = _last(snapshots)
    found = {"of the noised gradient": seen.shares("update_shares")}
    if clean is not None:
        found["before the noise (not private)"] = _last(clean).shares("update_shares")
    figure, (axes,) = _figure()
    _stairs(axes, {k: _density(share, BIN_EDGES) for k, share in found.items()})
    axes.set_xlabel("update (units of the learning rate)")
    axes.set_title(f"after {int(seen.step):,} steps")
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
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> noise = jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(noise, optimizer.init(noise))
      >>> seen = dpadambc.diagnostics.snapshot(state)
      >>> several = dpadambc.diagnostics.stack([seen, seen])
      >>> figure = dpadambc.diagnostics.pictures.floor_share(several)
      >>> figure.axes[0].get_ylabel()
      'share of coordinates at the floor (%)'
    """
    if np.ndim(snapshots.step) == 0:
        raise ValueError(
            "Expected several snapshots, got one. Return snapshots"
            " from a scan, or join them with diagnostics.stack."
        )
    figure, (axes,) = _figure()
    steps, share = snapshots.step, snapshots.share_at_floor
    axes.plot(steps, share, label="all", linewidth=2.5, color="k")
    for i, (name, row) in enumerate(snapshots.parameters.items(), start=1):
        axes.plot(steps, row.share_at_floor, label=name, markevery=3, **_style(i))
    axes.set_xlabel("steps")
    axes.set_ylabel("share of coordinates at the floor (%)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return figure


def equivalence(
    curves: Mapping[str, Sequence[float]], *, ylabel: str = "training loss"
) -> Figure:
    """Two runs that should agree, and their difference.

    As in the DP-AdamBC paper's Figure 2.

    Args:
      curves: by name, one number for each step; two of the same length, such as the
        losses of DP-Adam and of DP-SGD with momentum under
        `theory.equivalent_sgdm_schedule`. (Losses on training data are *not private*.)
      ylabel: what the numbers are.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: unless there are two curves of one length.

    Example:
      >>> import dpadambc
      >>> figure = dpadambc.diagnostics.pictures.equivalence(
      ...     {"DP-Adam": [2.0, 1.5, 1.2], "DP-SGD": [2.0, 1.6, 1.2]})
      >>> figure.axes[1].get_title()
      'mean squared difference 0.0033'
    """
    arrays = {name: np.asarray(curve, float) for name, curve in curves.items()}
    shapes = [a.shape for a in arrays.values()]
    if len(arrays) != 2 or len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"Expected two curves of one length, got shapes {shapes}.")
    (first, a), (second, b) = arrays.items()
    figure, (left, right) = _figure(5.0, panels=2)
    steps = np.arange(1, len(a) + 1)
    for i, (name, curve) in enumerate(arrays.items()):
        left.plot(steps, curve, label=name, **_style(i, "color", "linestyle"))
    left.set_ylabel(ylabel)
    left.legend(frameon=False)
    right.plot(steps, b - a, color="black")
    right.set_ylabel(f"{second} less {first}")
    right.set_title(f"mean squared difference {np.mean((a - b) ** 2):.2g}")
    for axes in (left, right):
        axes.set_xlabel("steps")
    return figure


def sweep(
    values: Sequence[float],
    scores: Mapping[str, Any],
    *,
    xlabel: str,
    ylabel: str = "test accuracy (%)",
    reference: Mapping[str, float] | None = None,
) -> Figure:
    """A score against one hyper-parameter.

    As in the DP-AdamBC paper's Figure 5: a wrong noise variance, the floor, eps or a
    decay rate, whichever was varied.

    Args:
      values: of the hyper-parameter, positive; the axis is logarithmic.
      scores: by name, one for each value, or one for each value and seed, shape
        (values,) or (values, seeds): the mean is drawn, with a standard deviation.
      xlabel: what was varied, with its unit.
      ylabel: what the score is.
      reference: scores by name that do not depend on it, drawn as level lines.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if the scores do not match the values.

    Example:
      >>> import dpadambc
      >>> figure = dpadambc.diagnostics.pictures.sweep(
      ...     [0.5, 1.0, 2.0], {"DP-AdamBC": [[61, 63], [66, 66], [58, 62]]},
      ...     xlabel="variance floor (units of its spread)",
      ...     reference={"DP-Adam": 60.0})
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['DP-Adam', 'DP-AdamBC']
    """
    figure, (axes,) = _figure()
    for i, (name, numbers) in enumerate(scores.items()):
        numbers = np.asarray(numbers, float)
        if numbers.ndim not in (1, 2) or len(numbers) != len(values):
            raise ValueError(
                f"Expected scores of shape ({len(values)},) or ({len(values)}, seeds)"
                f" for {name}, got {numbers.shape}."
            )
        numbers = numbers.reshape(len(values), -1)
        axes.errorbar(
            values, numbers.mean(1), numbers.std(1), label=name, capsize=3, **_style(i)
        )
    for i, (name, score) in enumerate((reference or {}).items(), start=len(scores)):
        axes.axhline(score, label=name, **_style(i, "color", "linestyle"))
    axes.set_xscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    return figure


def plan(rows: Sequence[PlannedRun]) -> Figure:
    """The noise that each budget and batch size takes, and how epsilon grows.

    Args:
      rows: of `mechanisms.planning.plan`, for one number of epochs.

    Returns:
      A matplotlib figure. On the left the noise in the mean gradient, in units of the
      clip norm, against the batch size. On the right epsilon against the steps, at the
      middle batch size, with the planned steps marked.

    Raises:
      ValueError: if there are no rows, or of several numbers of epochs.

    Example:
      >>> from dpadambc.diagnostics import pictures
      >>> from dpadambc.mechanisms import planning
      >>> rows = planning.plan(
      ...     target_epsilons=[1, 8], target_delta=1e-5, batch_sizes=[512, 1024],
      ...     epochs=2, num_examples=10_000, accountant="rdp")
      >>> figure = pictures.plan(rows)
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['ε = 1', 'ε = 8']
    """
    epochs = sorted({row.epochs for row in rows})
    if len(epochs) != 1:
        raise ValueError(
            "Expected rows of a plan for one number of epochs, got rows for"
            f" {epochs or 'none'}."
        )
    figure, (left, right) = _figure(5.0, panels=2)
    sizes = sorted({row.batch_size for row in rows})
    middle = sizes[len(sizes) // 2]
    for i, epsilon in enumerate(sorted({row.target_epsilon for row in rows})):
        of_epsilon = [row for row in rows if row.target_epsilon == epsilon]
        of_epsilon.sort(key=lambda row: row.batch_size)
        left.plot(
            [row.batch_size for row in of_epsilon],
            [row.noise_stddev for row in of_epsilon],
            label=f"ε = {epsilon:g}",
            **_style(i),
        )
        _epsilon_over_steps(
            right, next(row for row in of_epsilon if row.batch_size == middle), i
        )
    left.set_xscale("log")
    left.set_yscale("log")
    left.xaxis.set_major_locator(FixedLocator(sizes))
    left.xaxis.set_minor_locator(NullLocator())
    left.set_xticklabels([f"{size:,}" for size in sizes])
    left.set_xlabel("batch size")
    left.set_ylabel("noise in the mean gradient (clip norms)")
    left.set_title(f"{epochs[0]:g} epochs over {rows[0].num_examples:,} examples")
    left.legend(frameon=False)
    right.set_xlabel("steps")
    right.set_ylabel(f"ε at δ = {rows[0].target_delta:g}")
    right.set_title(f"batch size {middle:,}, planned steps marked")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    return figure


def _epsilon_over_steps(axes: Axes, row: PlannedRun, i: int) -> None:
    """Epsilon up to a third beyond the planned steps, which have a marker."""
    planned = row.mechanism.iterations
    shares = np.array([0.05, 0.25, 0.6, 1.0, 1.33])
    steps = np.unique(np.maximum(1, np.round(shares * planned).astype(int)))
    epsilon = lambda n: row.mechanism.epsilon(
        row.target_delta, iterations=int(n), accountant=row.accountant
    )
    spent = [epsilon(n) for n in steps]
    axes.plot(
        steps, spent, markevery=[int(np.searchsorted(steps, planned))], **_style(i)
    )


def trade_off(mechanisms: Mapping[str, Mechanism | TradeOff]) -> Figure:
    """What the best attacker can reach, on logarithmic axes.

    Rare false alarms are what counts: an attack that is right about a few examples, and
    sure of it, is a breach, even if it is wrong about most.

    Args:
      mechanisms: by name, or their `trade_off()`.

    Returns:
      A matplotlib figure: the largest true positive rate against the false positive
      rate. On the diagonal an attacker only guesses.

    Raises:
      ValueError: if there are none, or one has no privacy loss distribution.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=50,
      ...     normalize_by=1)
      >>> figure = dpadambc.diagnostics.pictures.trade_off({"DP-SGD": mechanism})
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['DP-SGD', 'guessing']

    References:
      Carlini et al., `Membership Inference Attacks From First Principles
      <https://arxiv.org/abs/2112.03570>`_, 2022
    """
    if not mechanisms:
        raise ValueError("Expected one mechanism or several, got none.")
    rates = np.geomspace(1e-5, 1, 400)
    figure, (axes,) = _figure()
    for i, (name, one) in enumerate(mechanisms.items()):
        curve = one if isinstance(one, TradeOff) else one.trade_off()
        axes.plot(
            rates,
            curve.true_positive_rate(rates),
            label=name,
            markevery=(20 + 15 * i, 80),
            **_style(i),
        )
    axes.plot(rates, rates, color="0.6", linestyle=":", label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-5, 1.3))
    axes.set_xlabel("false positive rate: others taken for members")
    axes.set_ylabel("true positive rate, at most")
    axes.legend(frameon=False, loc="lower right")
    return figure
