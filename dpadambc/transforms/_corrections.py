"""How a program says which noise a correction takes out, and where it arrives."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import optax

from dpadambc._core import stages
from dpadambc.transforms import _noise_level

# Who hears of each correction in a program that is being traced.
_LEVELS: contextvars.ContextVar[list[_noise_level.NoiseStddev] | None]
_LEVELS = contextvars.ContextVar("levels", default=None)


@contextlib.contextmanager
def levels_corrected() -> Iterator[list[_noise_level.NoiseStddev]]:
    """The levels for which the programs that are traced inside are corrected."""
    levels: list[_noise_level.NoiseStddev] = []
    token = _LEVELS.set(levels)
    try:
        yield levels
    finally:
        _LEVELS.reset(token)


# The name by which a program shows where a correction gets its gradient.
ARRIVES = "noise_is_corrected"


@jax.jit
def noise_is_corrected(updates: optax.Updates) -> optax.Updates:
    """The same updates, as a call of the name `ARRIVES`."""
    return updates


def tell(noise_stddev: _noise_level.NoiseStddev) -> None:
    """Tells whoever traces the program of one level that it corrects for.

    Where nobody asks, it warns of a process without noise.
    """
    levels = _LEVELS.get()
    if levels is None:
        stages.expect("noise", noise_stddev, stacklevel=4)
    else:
        levels.append(noise_stddev)
