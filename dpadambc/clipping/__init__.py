"""Clipped sums of per-example gradients, and how far one example can move them."""

from dpadambc import lazy

__all__ = [
    "Automatic",
    "Choice",
    "ClipRule",
    "Explanation",
    "Flat",
    "NeighboringRelation",
    "ParameterCost",
    "PerGroup",
    "PerSampleAdaptive",
    "Plan",
    "clip_per_example",
    "clipped_grad",
    "explain",
    "sensitivity",
]

__getattr__ = lazy.attribute_of(
    {
        "Automatic": "dpadambc.clipping.rules:Automatic",
        "Choice": "dpadambc.clipping.explanation:Choice",
        "ClipRule": "dpadambc.core.clip:ClipRule",
        "Explanation": "dpadambc.clipping.explanation:Explanation",
        "Flat": "dpadambc.core.clip:Flat",
        "NeighboringRelation": "dpadambc.core.clip:NeighboringRelation",
        "ParameterCost": "dpadambc.clipping.explanation:ParameterCost",
        "PerGroup": "dpadambc.clipping.rules:PerGroup",
        "PerSampleAdaptive": "dpadambc.clipping.rules:PerSampleAdaptive",
        "Plan": "dpadambc.clipping.explanation:Plan",
        "clip_per_example": "dpadambc.core.clip:clip_per_example",
        "clipped_grad": "dpadambc.core.clipped_grad:clipped_grad",
        "explain": "dpadambc.clipping.explanation:explain",
        "sensitivity": "dpadambc.core.clip:sensitivity",
    }
)
