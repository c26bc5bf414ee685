"""The sensitivity of a clipped sum, for your own noise; mechanisms have theirs."""

from dpadambc.core.clip import NeighboringRelation
from dpadambc.mechanisms import names


@names.explained
def sensitivity(
    l2_clip_norm: float,
    *,
    normalize_by: float,
    neighboring_relation: NeighboringRelation,
) -> float:
    r"""Returns the L2 sensitivity of a clipped, normalized sum.

    .. math:: \Delta = C / B
        \text{ (add or remove one; replace by zero)}, \qquad
        \Delta = 2 C / B \text{ (replace one)}

    Args:
      l2_clip_norm: C, the bound on one example's gradient norm.
      normalize_by: B, the public number that the sum is divided by.
      neighboring_relation: the difference of two neighboring datasets.

    Returns:
      The largest L2 distance between the values of `clip_per_example` or
      `clipped_grad` on two neighboring batches.

    Raises:
      TypeError: if `neighboring_relation` is not a `NeighboringRelation`.

    Example:
      >>> import dpadambc
      >>> relation = dpadambc.NeighboringRelation.REPLACE_ONE
      >>> dpadambc.sensitivity(1.0, normalize_by=4, neighboring_relation=relation)
      0.5
    """
    relation = neighboring_relation
    if not isinstance(relation, NeighboringRelation):
        raise TypeError(
            f"Expected a neighboring_relation of its type, got {type(relation)}."
        )
    examples_changed = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
    return examples_changed * l2_clip_norm / normalize_by
