"""Scores over the steps of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.pictures._axes import mean_and_spread, new_figure, style


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
      >>> from benchmarks import pictures
      >>> figure = pictures.equivalence(
      ...     {"DP-Adam": [2.0, 1.5, 1.2], "DP-SGD": [2.0, 1.6, 1.2]})
      >>> figure.axes[1].get_title()
      'mean squared difference 0.0033'
    """
    arrays = {name: np.asarray(curve, float) for name, curve in curves.items()}
    shapes = [a.shape for a in arrays.values()]
    if len(arrays) != 2 or len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"Expected two curves of one length, got shapes {shapes}.")
    (first, a), (second, b) = arrays.items()
    figure, (left, right) = new_figure(5.0, panels=2)
    steps = np.arange(1, len(a) + 1)
    for i, (name, curve) in enumerate(arrays.items()):
        left.plot(steps, curve, label=name, **style(i, "color", "linestyle"))
    left.set_ylabel(ylabel)
    left.legend(frameon=False)
    right.plot(steps, b - a, color="black")
    right.set_ylabel(f"{second} less {first}")
    right.set_title(f"mean squared difference {np.mean((a - b) ** 2):.2g}")
    for axes in (left, right):
        axes.set_xlabel("steps")
    return figure


def learning_curves(
    steps: Sequence[float],
    curves: Mapping[str, Any],
    *,
    xlabel: str = "steps",
    ylabel: str = "test accuracy (%)",
) -> Figure:
    """The scores of several optimizers over the steps, with the spread over seeds.

    As in the first figure of the DP-AdamBC paper's short version.

    Args:
      steps: at which the scores were taken.
      curves: by name, one score for each of these steps, or one for each step and seed,
        shape (steps,) or (steps, seeds): the mean is drawn, in a band of one standard
        deviation.
      xlabel: what the steps are.
      ylabel: what the score is.

    Returns:
      A matplotlib figure. The legend has the last mean of each.

    Raises:
      ValueError: if the scores do not match the steps.

    Example:
      >>> from benchmarks import pictures
      >>> figure = pictures.learning_curves(
      ...     [100, 200],
      ...     {"DP-SGD": [[50, 54], [59, 62]], "DP-Adam": [[45, 47], [58, 60]]})
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['DP-SGD: 60.5', 'DP-Adam: 59']

    References:
      Tang and Lécuyer, `DP-Adam: Correcting DP Bias in Adam's Second Moment Estimation
      <https://arxiv.org/abs/2304.11208>`_, 2023
    """
    figure, (axes,) = new_figure(7.0)
    for i, (name, scores) in enumerate(curves.items()):
        mean, spread = mean_and_spread(name, scores, (len(steps),))
        # Markers are staggered, for curves that lie on each other.
        axes.plot(
            steps, mean, label=f"{name}: {mean[-1]:.3g}", markevery=(i, 7), **style(i)
        )
        color = style(i, "color")
        axes.fill_between(
            steps, mean - spread, mean + spread, alpha=0.15, lw=0, **color
        )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False, fontsize="small", title="after the last step")
    return figure
