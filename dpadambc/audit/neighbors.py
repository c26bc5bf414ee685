"""Batches that differ in one example: the ones that break what is not bounded."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Batch = tuple[Any, ...]  # pytrees of arrays, with the examples along axis 0

HUGE = (1e3, 1e6, 1e15)


def num_examples(batch: Batch) -> int:
    """How many rows a batch has."""
    sizes = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(
            "Expected a batch of arrays with the examples along axis 0, as many in"
            f" each, got axes of {sorted(sizes)}."
        )
    (size,) = sizes
    if size < 2:
        raise ValueError(f"Expected a batch of at least 2 examples, got {size}.")
    return size


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def on_numbers(fun: Callable[[Any], Any], row: Any) -> Any:
    """A row with a function applied to its real numbers; labels and ids stay."""
    return jax.tree.map(
        lambda x: jnp.asarray(fun(x)).astype(x.dtype) if _is_float(x) else x, row
    )


def wave(shape: tuple[int, ...], step: jax.Array) -> jax.Array:
    """Numbers of at most 1 for each step, other ones in each, and zeros in step 0."""
    place = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    return jnp.sin(step * (1 + 0.618 * place))


def shifted(batch: Batch, step: jax.Array) -> Batch:
    """The batch with real numbers that are a little different in each step."""

    def shift(x):
        spread = jnp.std(x.astype(float))
        spread = jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)
        return x + 0.1 * spread * wave(x.shape, step)

    return on_numbers(shift, batch)


def row_of(batch: Batch, index: int) -> Any:
    """One example of a batch."""
    return jax.tree.map(lambda x: jnp.asarray(x)[index], batch)


def with_row(batch: Batch, index: Any, row: Any) -> Batch:
    """The batch with another example in one place."""
    return jax.tree.map(lambda x, new: jnp.asarray(x).at[index].set(new), batch, row)


def without_row(batch: Batch, index: int) -> Batch:
    """The batch with one example fewer."""
    return jax.tree.map(lambda x: jnp.delete(jnp.asarray(x), index, axis=0), batch)


def has_numbers(batch: Batch) -> bool:
    """Whether an example has real numbers, which can be made large or broken."""
    return any(map(_is_float, jax.tree.leaves(batch)))


_MOST_ARRAYS = 4


def _in_each(row: Any, change: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """A row with one array changed, for each of the first."""
    leaves, structure = jax.tree.flatten(row)
    numbers = [i for i, x in enumerate(leaves) if _is_float(x)]
    for i in numbers[:_MOST_ARRAYS] if len(numbers) > 1 else ():
        changed = [*leaves[:i], on_numbers(change, leaves[i]), *leaves[i + 1 :]]
        yield i, jax.tree.unflatten(structure, changed)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An example that somebody may bring."""

    name: str
    row: Any


def candidates(batch: Batch, index: int, rng: np.random.Generator) -> list[Candidate]:
    """What an example is replaced by: other ones, huge, opposite and broken ones."""
    own = row_of(batch, index)
    other = int(index + 1 + rng.integers(num_examples(batch) - 1)) % num_examples(batch)
    found = [
        *(Candidate("as it is", own), Candidate("another", row_of(batch, other))),
        *(Candidate("one token repeated", row) for row in _repeated(own)),
    ]
    if not has_numbers(batch):
        return found
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape))
    zero, huge = jnp.zeros_like, lambda x: HUGE[0] * x.astype(float)
    scaled = lambda factor: on_numbers(lambda x: factor * x.astype(float), own)
    return [
        *found,
        Candidate("opposite", on_numbers(lambda x: -x, own)),
        Candidate("random", on_numbers(draw, own)),
        Candidate("zero", on_numbers(jnp.zeros_like, own)),
        *(Candidate(f"{factor:g} times as large", scaled(factor)) for factor in HUGE),
        Candidate("huge and opposite", scaled(-HUGE[0])),
        Candidate("infinite", on_numbers(lambda x: jnp.full_like(x, jnp.inf), own)),
        *(
            Candidate(f"{name} in array {i}", changed)
            for name, change in (("zero", zero), ("huge", huge))
            for i, changed in _in_each(own, change)
        ),
        Candidate("NaN", on_numbers(lambda x: jnp.full_like(x, jnp.nan), own)),
    ]


def _repeated(row: Any) -> Iterator[Any]:
    """The first of its whole numbers in all places, where it has several."""
    is_several = lambda x: jnp.issubdtype(x.dtype, jnp.integer) and x.size > 1
    if any(map(is_several, jax.tree.leaves(row))):
        fill = lambda x: jnp.full_like(x, x.ravel()[0]) if is_several(x) else x
        yield jax.tree.map(fill, row)


def ascend(
    distance: Callable[[Any], jax.Array],
    row: Any,
    steps: int,
    rng: np.random.Generator,
) -> Iterator[Candidate]:
    """Examples found by gradient ascent on a distance, or by chance without a gradient.

    Args:
      distance: of a row: what is to be made large.
      row: where the search begins.
      steps: how many to take.
      rng: for the first direction, and where there is no gradient.
    """
    moving = lambda x: x if _is_float(x) else None
    numbers = jax.tree.map(moving, row)
    if not jax.tree.leaves(numbers) or not steps:
        return
    whole = lambda numbers: jax.tree.map(
        lambda x, new: x if new is None else new.astype(x.dtype),
        row,
        numbers,
        is_leaf=lambda x: x is None,
    )
    size = lambda tree: np.sqrt(
        sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree))
    )
    draw = lambda: jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), numbers
    )
    gradient = jax.jit(jax.grad(lambda numbers: distance(whole(numbers))))
    scale = size(numbers) or 1.0
    try:
        gradient(numbers)
    except Exception:  # whatever JAX says of a program without a derivative
        gradient = lambda numbers: draw()
    for step in range(steps):
        direction = gradient(numbers)
        length = size(direction)
        if not np.isfinite(length) or length == 0:
            direction = draw()
            length = size(direction)
        stride = scale * 0.5 * 1.3**step / length
        numbers = jax.tree.map(lambda x, d: x + stride * d, numbers, direction)  # noqa: B023
        yield Candidate("found by search", whole(numbers))
