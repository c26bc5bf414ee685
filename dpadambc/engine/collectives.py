"""Finds operations that mix the examples of several devices."""

import jax.extend.core as jex

from dpadambc.engine import jaxprs

# These operations name an axis without combining data along it.
_HARMLESS = {"axis_index", "pbroadcast", "pcast", "pvary"}


def _names(eqn: jex.JaxprEqn) -> set[str]:
    """Returns the axes of a mesh or of a `jax.vmap` that an operation combines."""
    if eqn.primitive.name in _HARMLESS:
        return set()
    found: set[str] = set()
    for parameter in ("axes", "axis_name"):
        value = eqn.params.get(parameter, ())
        names = value if isinstance(value, tuple | list) else (value,)
        found.update(name for name in names if isinstance(name, str))
    return found


# The callback methods that call one example after the other, or refuse a batch.
_ONE_BY_ONE = {None, "sequential", "sequential_unrolled"}


def _refuse_own_batching(eqn: jex.JaxprEqn) -> None:
    """Raises for an operation that sees all examples at once."""
    name, method = eqn.primitive.name, eqn.params.get("vmap_method")
    if name == "custom_vmap_call" or method not in _ONE_BY_ONE:
        what = name if method is None else f"{name} with vmap_method={method!r}"
        raise ValueError(
            "Expected loss_fn to see one example alone, got an operation in it with a"
            f" rule of its own for batches ({what}): it is given all examples, and may"
            " mix them. Call the function without custom_vmap or sequential_vmap, and a"
            " callback with vmap_method='sequential'."
        )


def refuse(jaxpr: jex.Jaxpr, allowed: frozenset[str]) -> None:
    """Raises where a program computes across an axis that is not allowed.

    Args:
      jaxpr: the program of the gradient of one example.
      allowed: the axes along which all devices have the same examples. Inside a
        `jax.shard_map` of the program, its axes are allowed too.

    Raises:
      ValueError: if there is a collective over another axis, or an operation with a
        rule of its own for batches.
    """
    for eqn in jaxpr.eqns:
        _refuse_own_batching(eqn)
        mixed = _names(eqn) - allowed
        if mixed:
            name = eqn.primitive.name.removesuffix("_invariant")
            axes = ", ".join(sorted(map(repr, mixed)))
            raise ValueError(
                "Expected loss_fn to see one example alone, got a collective in it"
                f" ({name} over {axes}), along which examples differ, or may: one of"
                " them could change the gradients of all. For normalization use group"
                " or layer normalization, or fixed statistics; gather parameters that"
                " are split before the gradient is taken, not in the loss. Where all"
                " examples are the same along an axis, jax.shard_map must know it, with"
                " check_vma=True."
            )
        own = frozenset(eqn.params.get("newly_manual_axes", ()))  # of a shard_map
        for inner in jaxprs.inner(eqn):
            refuse(inner.jaxpr, allowed | own)
