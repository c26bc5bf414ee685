"""Scores against the hyper-parameters that they were reached with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from benchmarks.pictures._axes import mean_and_spread, new_figure, style


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
      ValueError: if a value is not positive, or the scores do not match the values.

    Example:
      >>> from benchmarks import pictures
      >>> figure = pictures.sweep(
      ...     [0.5, 1.0, 2.0], {"DP-AdamBC": [[61, 63], [66, 66], [58, 62]]},
      ...     xlabel="variance floor (units of its spread)",
      ...     reference={"DP-Adam": 60.0})
      >>> figure.axes[0].get_legend_handles_labels()[1]
      ['DP-Adam', 'DP-AdamBC']
    """
    if not len(values) or not min(values) > 0:
        raise ValueError(
            f"Expected values above zero, for a logarithmic axis, got {list(values)}."
            " Draw the score at zero as a reference."
        )
    figure, (axes,) = new_figure()
    width = (max(values) / min(values)) ** 0.012
    for i, (name, numbers) in enumerate(scores.items()):
        mean, spread = mean_and_spread(name, numbers, (len(values),))
        # Side by side, or one spread would cover the other.
        places = np.asarray(values) * width ** (i - (len(scores) - 1) / 2)
        bars = spread if spread.any() else None
        axes.errorbar(places, mean, bars, label=name, capsize=3, **style(i))
    for i, (name, score) in enumerate((reference or {}).items(), start=len(scores)):
        axes.axhline(score, label=name, **style(i, "color", "linestyle"))
    axes.set_xscale("log")
    axes.set_xticks(_apart(values), [f"{value:.4g}" for value in _apart(values)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    return figure


def _apart(values: Sequence[float]) -> list[float]:
    """Those with room for their number on a logarithmic axis."""
    least = (max(values) / min(values)) ** 0.07
    kept = [min(values)]
    for value in sorted(values):
        if value > least * kept[-1]:
            kept.append(value)
    return kept


def heat_map(
    rows: Sequence[float],
    columns: Sequence[float],
    scores: Mapping[str, Any],
    *,
    row_label: str,
    column_label: str,
    score_label: str = "test accuracy (%)",
) -> Figure:
    """A score against two hyper-parameters, with the numbers, and the best framed.

    Learning rate and batch size, clip norm or weight decay: what is best of one depends
    on the other. The colors are lighter where the score is higher, also in gray.

    Args:
      rows: values of the one hyper-parameter, drawn upwards.
      columns: values of the other.
      scores: by name, a panel each, of shape (rows, columns) or (rows, columns, seeds):
        the mean is drawn, with a standard deviation. Colors are the same in all panels.
      row_label: what varies over the rows, with its unit.
      column_label: what varies over the columns.
      score_label: what the score is.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if there are no scores, or they do not match the rows and columns, or
        none of a panel is a number.

    Example:
      >>> from benchmarks import pictures
      >>> figure = pictures.heat_map(
      ...     [256, 1024], [1e-3, 1e-2], {"DP-Adam": [[40.0, 55.0], [35.0, 61.0]]},
      ...     row_label="batch size", column_label="learning rate")
      >>> figure.axes[0].get_title()
      'DP-Adam: best 61'

    References:
      Li et al., `Large Language Models Can Be Strong Differentially Private Learners
      <https://arxiv.org/abs/2110.05679>`_, 2022, section 3
    """
    shape = len(rows), len(columns)
    found = {name: mean_and_spread(name, s, shape) for name, s in scores.items()}
    if not found or any(np.isnan(mean).all() for mean, _ in found.values()):
        raise ValueError(
            "Expected scores in every panel, got none, or not one that is a number, in"
            f" {list(found) or 'no panel'}."
        )
    figure, panels = new_figure(6.0 if len(found) == 1 else 4.8, panels=len(found))
    lowest = float(min(np.nanmin(mean) for mean, _ in found.values()))
    highest = float(max(np.nanmax(mean) for mean, _ in found.values()))
    middle = (lowest + highest) / 2
    norm, cmap = Normalize(lowest, highest), "cividis"
    for axes, (name, (mean, spread)) in zip(panels, found.items(), strict=True):
        axes.imshow(mean, cmap, norm, origin="lower", aspect="auto")
        has_seeds = np.ndim(scores[name]) == 3
        _numbers(axes, mean, spread if has_seeds else None, middle)
        best = np.unravel_index(np.nanargmax(mean), shape)
        _frame(axes, best)
        axes.grid(False)
        axes.set_xticks(range(shape[1]), [f"{value:.4g}" for value in columns])
        axes.set_yticks(range(shape[0]), [f"{value:.4g}" for value in rows])
        axes.set_xlabel(column_label)
        axes.set_ylabel(row_label)
        axes.set_title(f"{name}: best {mean[best]:.3g}")
    figure.colorbar(ScalarMappable(norm, cmap), ax=panels, label=score_label)
    return figure


def _numbers(
    axes: Axes, mean: np.ndarray, spread: np.ndarray | None, middle: float
) -> None:
    """In every cell, white on what is dark; a cell without a number is white."""
    for (row, column), number in np.ndenumerate(mean):
        text = f"{number:.3g}"
        if spread is not None:
            text += f"\n±{spread[row, column]:.2g}"
        color = "white" if number < middle else "black"
        axes.text(
            column, row, text, ha="center", va="center", color=color, fontsize="small"
        )


def _frame(axes: Axes, cell: Any) -> None:
    """White within black, to be seen on every color."""
    row, column = cell
    for color, width in (("black", 5.0), ("white", 2.0)):
        corner = column - 0.47, row - 0.47
        axes.add_patch(
            Rectangle(corner, 0.94, 0.94, fill=False, edgecolor=color, linewidth=width)
        )
