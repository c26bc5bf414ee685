"""Scores over the steps of a run."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dpadambc.diagnostics.pictures._axes import new_figure, style


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
