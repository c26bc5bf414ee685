"""What of a loss goes past the noise, to the stages behind it."""

import warnings
from typing import Any

# What optimizers of Optax are told of the loss.
_OF_THE_LOSS = {"grad", "grad_fn", "loss", "obj_fn", "value", "value_fn"}


def warn_of(extra_args: dict[str, Any], *, stacklevel: int) -> None:
    """Warns where `update` is given the loss, or its gradient, besides."""
    found = sorted(_OF_THE_LOSS & set(extra_args))
    if found:
        warnings.warn(
            f"update is given {', '.join(found)}, which has no noise. Stages behind may"
            " use it and keep it. If it depends on protected data, epsilon does not"
            " cover it.",
            stacklevel=stacklevel + 1,
        )
