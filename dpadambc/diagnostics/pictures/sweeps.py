"""Scores against the hyper-parameters that they were reached with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dpadambc.diagnostics.pictures._axes import new_figure, style


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
    figure, (axes,) = new_figure()
    for i, (name, numbers) in enumerate(scores.items()):
        numbers = np.asarray(numbers, float)
        if numbers.ndim not in (1, 2) or len(numbers) != len(values):
            raise ValueError(
                f"Expected scores of shape ({len(values)},) or ({len(values)}, seeds)"
                f" for {name}, got {numbers.shape}."
            )
        numbers = numbers.reshape(len(values), -1)
        axes.errorbar(
            values, numbers.mean(1), numbers.std(1), label=name, capsize=3, **style(i)
        )
    for i, (name, score) in enumerate((reference or {}).items(), start=len(scores)):
        axes.axhline(score, label=name, **style(i, "color", "linestyle"))
    axes.set_xscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    return figure
