"""Pictures of a run; they need `dpadambc[pictures]`, for matplotlib.

Every function returns a matplotlib figure, which can be shown in a notebook or saved
with `figure.savefig(path)`. Curves differ by their dashes and markers, so they can be
told apart without color.
"""

try:
    import matplotlib as matplotlib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "benchmarks.pictures needs matplotlib: pip install 'dpadambc[pictures]'."
    ) from error

from benchmarks.pictures._axes import new_figure as new_figure
from benchmarks.pictures._axes import style as style
from benchmarks.pictures.accounting import plan, trade_off
from benchmarks.pictures.curves import equivalence, learning_curves
from benchmarks.pictures.moments import (
    first_moments,
    floor_share,
    second_moments,
    updates,
)
from benchmarks.pictures.sweeps import heat_map, sweep

__all__ = [
    "equivalence",
    "first_moments",
    "floor_share",
    "heat_map",
    "learning_curves",
    "plan",
    "second_moments",
    "sweep",
    "trade_off",
    "updates",
]
