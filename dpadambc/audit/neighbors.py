"""Batches that differ in one example, and examples that break an unbounded step."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dpadambc.core.clipped_sum import materialize

Batch = tuple[Any, ...]  # pytrees of arrays, with the examples along axis 0

HUGE = (1e3, 1e6, 1e15)
_MOST_ARRAYS = 4  # of an example, that are changed alone


def num_examples(batch: Batch) -> int:
    """Returns the number of examples of a batch, at least two."""
    sizes = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            "Expected a batch of arrays with at least 2 examples along axis 0, the same"
            f" number in each, got axes of {sorted(sizes)}."
        )
    return sizes.pop()


def flat(tree: Any) -> np.ndarray:
    """Concatenates all numbers of a tree to a vector of doubles; opens seals."""
    as_doubles = lambda x: np.ravel(np.asarray(x, float))
    leaves = map(as_doubles, jax.tree.leaves(materialize(tree)))
    return np.concatenate([[], *leaves])


def is_real(x: Any) -> bool:
    """Returns whether an array has floating-point numbers, not labels or ids."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def has_numbers(batch: Batch) -> bool:
    """Returns whether an example has real numbers, which can be large or broken."""
    return any(map(is_real, jax.tree.leaves(batch)))


def on_numbers(fun: Callable[[Any], Any], row: Any) -> Any:
    """A row with a function applied to its real numbers; labels and ids stay."""
    change = lambda x: jnp.asarray(fun(x)).astype(x.dtype) if is_real(x) else x
    return jax.tree.map(change, row)


def wave(shape: tuple[int, ...], step: jax.Array) -> jax.Array:
    """Returns numbers of at most 1, different in each step, and zero in step 0."""
    place = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    return jnp.sin(step * (1 + 0.618 * place))


def shifted(batch: Batch, step: jax.Array) -> Batch:
    """Shifts the real numbers of a batch a little, differently in each step."""

    def shift(x):
        spread = jnp.std(x.astype(float))
        spread = jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)
        return x + 0.1 * spread * wave(x.shape, step)

    return on_numbers(shift, batch)


def row_of(batch: Batch, index: int) -> Any:
    """Returns one example of a batch."""
    return jax.tree.map(lambda x: jnp.asarray(x)[index], batch)


def with_row(batch: Batch, index: Any, row: Any) -> Batch:
    """Replaces the example in one place of the batch."""
    return jax.tree.map(lambda x, new: jnp.asarray(x).at[index].set(new), batch, row)


def without_row(batch: Batch, index: int) -> Batch:
    """Returns the batch with one example fewer."""
    return jax.tree.map(lambda x: jnp.delete(jnp.asarray(x), index, axis=0), batch)


class Candidate(NamedTuple):
    """An example that an adversary may contribute."""

    name: str
    row: Any


def candidates(batch: Batch, index: int, rng: np.random.Generator) -> list[Candidate]:
    """Returns replacements of an example: others, huge, opposite and broken ones."""
    own = row_of(batch, index)
    other = int(index + 1 + rng.integers(num_examples(batch) - 1)) % num_examples(batch)
    found = [Candidate("as it is", own), Candidate("another", row_of(batch, other))]
    leaves, structure = jax.tree.flatten(own)
    has_tokens = lambda x: jnp.issubdtype(x.dtype, jnp.integer) and x.size > 1
    if any(map(has_tokens, leaves)):
        fill = lambda x: jnp.full_like(x, x.ravel()[0]) if has_tokens(x) else x
        found.append(Candidate("one token repeated", jax.tree.map(fill, own)))
    if not has_numbers(batch):
        return found

    def add(name, change):
        found.append(Candidate(name, on_numbers(change, own)))

    times = lambda factor: lambda x: factor * x.astype(float)
    add("opposite", jnp.negative)
    add("random", lambda x: jnp.asarray(rng.normal(size=x.shape)))
    add("zero", jnp.zeros_like)
    for factor in HUGE:
        add(f"{factor:g} times as large", times(factor))
    add("huge and opposite", times(-HUGE[0]))
    add("infinite", lambda x: jnp.full_like(x, jnp.inf))
    numbers = [i for i, x in enumerate(leaves) if is_real(x)]
    for name, change in (("zero", jnp.zeros_like), ("huge", times(HUGE[0]))):
        for i in numbers[:_MOST_ARRAYS] if len(numbers) > 1 else ():
            changed = [*leaves[:i], on_numbers(change, leaves[i]), *leaves[i + 1 :]]
            row = jax.tree.unflatten(structure, changed)
            found.append(Candidate(f"{name} in array {i}", row))
    add("NaN", lambda x: jnp.full_like(x, jnp.nan))
    return found


def ascend(
    distance: Callable[[Any], jax.Array], row: Any, steps: int, rng: np.random.Generator
) -> Iterator[Candidate]:
    """Finds examples by gradient ascent on a distance, or at random without gradient.

    Args:
      distance: a function of a row, to maximize.
      row: the start of the search.
      steps: the number of steps.
      rng: the generator for the first direction, and where there is no gradient.
    """
    leaves, structure = jax.tree.flatten(row)
    real = [i for i, x in enumerate(leaves) if is_real(x)]
    numbers, as_leaves = ravel_pytree([jnp.asarray(leaves[i]) for i in real])
    if not numbers.size:
        return

    def whole(numbers):
        changed = dict(zip(real, as_leaves(numbers), strict=True))
        found = [changed.get(i, x) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, found)

    draw = lambda: jnp.asarray(rng.normal(size=numbers.shape), numbers.dtype)
    gradient = jax.jit(jax.grad(lambda numbers: distance(whole(numbers))))
    scale = float(jnp.linalg.norm(numbers)) or 1.0
    try:
        gradient(numbers)
    except Exception:  # JAX has many errors for a program without a derivative
        gradient = lambda numbers: draw()
    for step in range(steps):
        direction = gradient(numbers)
        if not 0 < float(jnp.linalg.norm(direction)) < np.inf:
            direction = draw()
        length = float(jnp.linalg.norm(direction))
        numbers = numbers + scale * 0.5 * 1.3**step / length * direction
        yield Candidate("found by search", whole(numbers))
