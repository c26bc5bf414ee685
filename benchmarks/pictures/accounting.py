"""What a mechanism costs, and what it leaves an attacker."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.pictures._axes import new_figure, style
from dpadambc import accounting
from dpadambc.accounting import PlannedRun, TradeOff
from dpadambc.core.mechanism import Mechanism


def plan(rows: Sequence[PlannedRun]) -> Figure:
    """The noise that each budget and batch size takes, and how epsilon grows.

    Args:
      rows: of `accounting.plan`, for one number of epochs.

    Returns:
      A matplotlib figure. On the left the noise in the mean gradient, in units of the
      clip norm, against the batch size. On the right epsilon against the steps, at the
      middle batch size, with the planned steps marked.

    Raises:
      ValueError: if there are no rows, or of several numbers of epochs.

    Example:
      >>> from benchmarks import pictures
      >>> from dpadambc import accounting
      >>> rows = accounting.plan(
      ...     target_epsilons=[1, 8], target_delta=1e-5, batch_sizes=[512, 1024],
      ...     epochs=2, num_examples=10_000, accountant=accounting.RDP)
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
    figure, (left, right) = new_figure(5.0, panels=2)
    sizes = sorted({row.batch_size for row in rows})
    middle = sizes[len(sizes) // 2]
    for i, epsilon in enumerate(sorted({row.target_epsilon for row in rows})):
        of_epsilon = [row for row in rows if row.target_epsilon == epsilon]
        of_epsilon.sort(key=lambda row: row.batch_size)
        left.plot(
            [row.batch_size for row in of_epsilon],
            [row.noise_stddev for row in of_epsilon],
            label=f"ε = {epsilon:g}",
            **style(i),
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
        steps, spent, markevery=[int(np.searchsorted(steps, planned))], **style(i)
    )


def trade_off(mechanisms: Mapping[str, Mechanism | TradeOff]) -> Figure:
    """What the best attacker can reach, on logarithmic axes.

    Rare false alarms are what counts: an attack that is right about a few examples, and
    sure of it, is a breach, even if it is wrong about most.

    Args:
      mechanisms: by name, or their `accounting.trade_off`.

    Returns:
      A matplotlib figure: the largest true positive rate against the false positive
      rate. On the diagonal an attacker only guesses.

    Raises:
      ValueError: if there are none, or one has no privacy loss distribution.

    Example:
      >>> import dpadambc
      >>> from benchmarks import pictures
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=50,
      ...     normalize_by=1)
      >>> figure = pictures.trade_off({"DP-SGD": mechanism})
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['DP-SGD', 'guessing']

    References:
      Carlini et al., `Membership Inference Attacks From First Principles
      <https://arxiv.org/abs/2112.03570>`_, 2022
    """
    if not mechanisms:
        raise ValueError("Expected one mechanism or several, got none.")
    rates = np.geomspace(1e-5, 1, 400)
    figure, (axes,) = new_figure()
    for i, (name, one) in enumerate(mechanisms.items()):
        curve = one if isinstance(one, TradeOff) else accounting.trade_off(one)
        axes.plot(
            rates,
            curve.true_positive_rate(rates),
            label=name,
            markevery=(20 + 15 * i, 80),
            **style(i),
        )
    axes.plot(rates, rates, color="0.6", linestyle=":", label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-5, 1.3))
    axes.set_xlabel("false positive rate: others taken for members")
    axes.set_ylabel("true positive rate, at most")
    axes.legend(frameon=False, loc="lower right")
    return figure
