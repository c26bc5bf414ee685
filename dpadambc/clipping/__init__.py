"""Clipped sums of per-example gradients, and how far one example can move them."""

from dpadambc.clipping.clipped import ClippedGrad, clipped_grad, clipped_value_and_grad
from dpadambc.clipping.explanation import (
    Choice,
    Explanation,
    ParameterCost,
    Plan,
    explain,
)
from dpadambc.clipping.flat import NeighboringRelation, clip_per_example, sensitivity
from dpadambc.clipping.quantile import QuantileClipping
from dpadambc.clipping.rules import (
    Automatic,
    ClipRule,
    Flat,
    PerGroup,
    PerSampleAdaptive,
)
from dpadambc.clipping.slack import SlackClipping

__all__ = [
    "Automatic",
    "Choice",
    "ClipRule",
    "ClippedGrad",
    "Explanation",
    "Flat",
    "NeighboringRelation",
    "ParameterCost",
    "PerGroup",
    "PerSampleAdaptive",
    "Plan",
    "QuantileClipping",
    "SlackClipping",
    "clip_per_example",
    "clipped_grad",
    "clipped_value_and_grad",
    "explain",
    "sensitivity",
]
