"""Axes, and curves that can be told apart without color."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def mean_and_spread(
    name: str, scores: Any, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over the seeds, the last axis if there is one."""
    numbers = np.asarray(scores, float)
    if numbers.shape == shape:
        numbers = numbers[..., None]
    if numbers.shape[:-1] != shape or not numbers.size:
        sizes = ", ".join(str(size) for size in shape)
        raise ValueError(
            f"Expected scores of shape {shape} or ({sizes}, seeds) for {name}, got"
            f" {np.shape(scores)}."
        )
    freedom = min(1, numbers.shape[-1] - 1)  # of one seed there is no spread
    return numbers.mean(-1), numbers.std(-1, ddof=freedom)
