"""Gradients of single examples, in the form in which reverse mode makes them."""

from dpadambc import lazy

__all__ = [
    "ClippedSum",
    "PerExampleGradient",
    "as_clipped_sum",
    "as_per_example",
    "materialize",
    "per_example_grad",
    "per_example_norms",
    "per_example_value_and_grad",
]

__getattr__ = lazy.attribute_of(
    {
        "ClippedSum": "dpadambc.core.clipped_sum:ClippedSum",
        "PerExampleGradient": "dpadambc.core.gradient:PerExampleGradient",
        "as_clipped_sum": "dpadambc.core.clipped_sum:as_clipped_sum",
        "as_per_example": "dpadambc.core.gradient:as_per_example",
        "materialize": "dpadambc.core.clipped_sum:materialize",
        "per_example_grad": "dpadambc.core.per_example:per_example_grad",
        "per_example_norms": "dpadambc.core.gradient:per_example_norms",
        "per_example_value_and_grad": "dpadambc.core.per_example:per_example_value_and_grad",
    }
)
