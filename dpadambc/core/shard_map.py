"""Inside `jax.shard_map`, where each device has examples of its own.

JAX sums the gradient of what all devices share over the devices, by itself. A gradient
per example would be summed with those of other devices before it is clipped, and one
person be in all of them. Parameters that vary over the devices, as the examples do,
have gradients of their own, which are summed when they are clipped.
"""

from typing import Any

import jax


def _varies(x: Any, axis_name: str) -> bool:
    """Whether each device along an axis has an array of its own."""
    try:
        jax.lax.pcast(x, axis_name, to="varying")
    except ValueError:  # it does already
        return True
    return False


def all_axes() -> set[str]:
    """The axes of the `jax.shard_map` that this is inside of."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(tree: Any) -> tuple[str, ...]:
    """The axes over which any array of a tree varies; none outside of `shard_map`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return tuple(name for name in axes if any(_varies(x, name) for x in arrays))


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same arrays, each device having its own."""
    for name in axes:
        own = lambda x, name=name: (
            x if _varies(x, name) else jax.lax.pcast(x, name, to="varying")
        )
        tree = jax.tree.map(own, tree)
    return tree


def axes_without_examples(tree: Any) -> frozenset[str]:
    """The axes along which all devices have the same arrays, as far as JAX knows.

    With `check_vma=False` it does not, and with `jax.vmap(axis_name=...)` neither.
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if not all(map(is_followed, arrays)):
        return frozenset()
    return frozenset(all_axes() - set(varying_axes(arrays)))


def is_followed(x: jax.Array) -> bool:
    """Whether JAX knows of an array along which axes it varies."""
    axes = tuple(all_axes())
    return set(varying_axes(varying(x, axes))) == set(axes)
