"""Pictures of a run; they need `dpadambc[pictures]`, for matplotlib.

Every function returns a matplotlib figure, which can be shown in a notebook or saved
with `figure.savefig(path)`. Curves differ by their dashes and markers, so they can be
told apart without color.
"""

try:
    import matplotlib as matplotlib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "diagnostics.pictures needs matplotlib: pip install 'dpadambc[pictures]'."
    ) from error

from dpadambc.diagnostics.pictures.accounting import plan, trade_off
from dpadambc.diagnostics.pictures.curves import equivalence, learning_curves
from dpadambc.diagnostics.pictures.moments import (
    first_moments,
    floor_share,
    second_moments,
    updates,
)
from dpadambc.diagnostics.pictures.sweeps import heat_map, sweep

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
