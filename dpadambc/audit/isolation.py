"""That what is computed of one example reads no other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import neighbors as _neighbors
from dpadambc.audit.finding import Finding, not_tested, within

_CHECK = "isolation"
_ROUNDING = 1e-4  # relative: other rows may be summed in another order


def _rows(tree: Any, size: int) -> np.ndarray:
    """All that is returned, one row for each example."""
    leaves = [np.asarray(x, float) for x in jax.tree.leaves(tree)]
    wrong = [x.shape for x in leaves if x.shape[:1] != (size,)]
    if wrong or not leaves:
        raise ValueError(
            f"Expected fun to return arrays with the {size} examples along axis 0, got"
            f" {wrong[0] if wrong else 'nothing'}. A mean over the batch cannot show"
            " whose loss reads whose example: return the loss of each."
        )
    return np.concatenate([x.reshape(size, -1) for x in leaves], axis=1)


def isolation(fun: Callable[..., Any], params: Any, batch: _neighbors.Batch) -> Finding:
    """Changes one example, and compares the outputs of the others.

    It replaces the first and the last example by another, a huge, an infinite and a NaN
    example. Batch normalization, a loss over pairs, subtracting a mean, or a sum over
    devices then changes the outputs of the others.

    Args:
      fun: of `(params, *batch)`, returns arrays with the examples along axis 0: losses,
        logits, gradients per example.
      params: its first argument.
      batch: a tuple of pytrees of arrays, with at least two examples along axis 0.

    Returns:
      A `Finding`: the largest relative change of what another example gets. *Not
      tested* if `fun` refuses the loss itself: then the sentence is its error.

    Raises:
      ValueError: if what is returned has no axis of examples.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import audit
      >>> x = jax.random.normal(jax.random.key(0), (8, 3))
      >>> alone = lambda w, x: jnp.tanh(x @ w)
      >>> audit.isolation(alone, jnp.ones(3), (x,)).passed
      True
      >>> normalized = lambda w, x: alone(w, x - x.mean(0, keepdims=True))
      >>> audit.isolation(normalized, jnp.ones(3), (x,)).word
      'FAIL'
    """
    size = _neighbors.num_examples(batch)
    batch = jax.tree.map(jnp.asarray, batch)
    rng = np.random.default_rng(0)
    start = _rows(fun(params, *batch), size)
    scale = np.abs(start[np.isfinite(start)]).max(initial=1e-30)
    worst, pair, count = 0.0, "", 0
    for index in (0, size - 1):
        others = np.arange(size) != index
        for candidate in _neighbors.candidates(batch, index, rng):
            changed = _neighbors.with_row(batch, index, candidate.row)
            gap = np.abs(_rows(fun(params, *changed), size) - start)[others]
            gap = np.where(np.isnan(start[others]), 0.0, gap)
            moved = float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0)) / scale
            count += 1
            if moved > worst:
                worst, pair = moved, candidate.name
    sentence = (
        f"Replacing an example by one that is {pair} changes what others get by"
        f" {worst:.2g} of the largest value."
        if worst > _ROUNDING
        else "No example changes what others get, but for rounding."
    )
    return within(
        _CHECK,
        worst,
        _ROUNDING,
        sentence,
        f"fails if one of {count} replacements changes what another example gets by"
        f" more than {_ROUNDING:g} of the largest value",
    )


def of_loss(fun: Callable[..., Any], params: Any, batch: _neighbors.Batch) -> Finding:
    """`isolation` of what the engine makes of a loss, which it may refuse."""
    try:
        return isolation(fun, params, batch)
    except ValueError as error:
        if "Expected loss_fn to see one example alone" not in str(error):
            raise
        return Finding(_CHECK, False, 1.0, 0.0, f"{error}")


def unknown() -> Finding:
    """Where no function is given that tells examples apart."""
    return not_tested(_CHECK, "no function that returns something for each example.")
