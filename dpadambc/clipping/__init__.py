"""Rules of clipping, and the memory that per-example gradients take."""

from dpadambc import lazy

__all__ = ["Automatic", "ClipRule", "Explanation", "Flat", "PerGroup", "explain"]

__getattr__ = lazy.attribute_of(
    {
        "Automatic": "dpadambc.clipping.rules:Automatic",
        "ClipRule": "dpadambc.core.clip:ClipRule",
        "Explanation": "dpadambc.clipping.explanation:Explanation",
        "Flat": "dpadambc.core.clip:Flat",
        "PerGroup": "dpadambc.clipping.rules:PerGroup",
        "explain": "dpadambc.clipping.explanation:explain",
    }
)
