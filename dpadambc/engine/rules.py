"""Primitives that produce a gradient in factored form, or preserve the form."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.engine import convolution, forms, lookup, product, view
from dpadambc.engine.interface import Entrywise, Gradient

Params = dict[str, Any]


# Primitives of arrays whose output can stay factored.
PRODUCERS: dict[str, Callable[..., Gradient | None]] = {
    "bcoo_dot_general": lambda params, x, at, g: lookup.sparse_dot_general(
        x, at, g, params
    ),
    "dot_general": lambda params, a, g: product.dot_general(
        a, g, params["dimension_numbers"]
    ),
    "conv_general_dilated": lambda params, x, g: convolution.conv_general_dilated(
        x, g, params
    ),
    # At a traced index: for a table's row in a scan, say. The gradient of a whole
    # kernel among others is materialized: the forward pass copies it.
    "dynamic_update_slice": lambda _, zeros, g, *starts: lookup.dynamic_update_slice(
        zeros.shape, g, starts
    ),
    "scatter-add": lambda params, zeros, indices, g: lookup.scatter_add(
        zeros.shape, indices, g, params
    ),
}

# The producers that add into their first operand, if that is zero everywhere.
INTO_ZEROS = {"dynamic_update_slice", "scatter-add"}


def _reshape(params: Params, grad: Gradient) -> Gradient | None:
    is_plain = params["dimensions"] is None
    return view.reshaped(grad, params["new_sizes"]) if is_plain else None


def _squeeze(params: Params, grad: Gradient) -> Gradient:
    left = np.delete(grad.shape, params["dimensions"])
    return view.reshaped(grad, tuple(left.tolist()))


def _broadcast_in_dim(params: Params, grad: Gradient) -> Gradient | None:
    """Adds axes of size one, or repeats a lookup along others."""
    kept, shape = params["broadcast_dimensions"], params["shape"]
    ones = tuple(
        grad.shape[kept.index(i)] if i in kept else 1 for i in range(len(shape))
    )
    grad = view.reshaped(grad, ones)
    return grad if ones == tuple(shape) else grad.broadcast(tuple(shape))


def _gather(params: Params, grad: Any, indices: jax.Array) -> Gradient | None:
    is_lookup = isinstance(grad, lookup.Lookup)
    return grad.gather(indices, params) if is_lookup else None


def _slice(params: Params, grad: Gradient) -> Gradient | None:
    if any(stride != 1 for stride in params["strides"] or ()):
        return None
    return grad.slice(params["start_indices"], params["limit_indices"])


def _split(params: Params, grad: Gradient) -> list[Gradient] | None:
    axis, start, parts = params["axis"], 0, []
    for size in params["sizes"]:
        starts, limits = [0] * len(grad.shape), list(grad.shape)
        starts[axis], limits[axis] = start, start + int(size)
        parts.append(grad.slice(tuple(starts), tuple(limits)))
        start += int(size)
    return None if any(part is None for part in parts) else parts


def _unstack(params: Params, grad: Gradient) -> list[Gradient] | None:
    axis = params["axis"]
    parts = _split({"axis": axis, "sizes": [1] * grad.shape[axis]}, grad)
    return parts and [_squeeze({"dimensions": [axis]}, part) for part in parts]


def _pad(params: Params, grad: Gradient, value: Any) -> Gradient | None:
    low, high, interior = zip(*params["padding_config"], strict=True)
    if not is_zero(value) or any(interior):
        return None
    if min(*low, *high) < 0:
        starts = tuple(max(-n, 0) for n in low)
        ends = zip(grad.shape, high, strict=True)
        part = grad.slice(starts, tuple(size + min(n, 0) for size, n in ends))
        if part is None:
            return None
        grad = part
    widths = [tuple(max(int(n), 0) for n in side) for side in (low, high)]
    return forms.padded(grad, *widths) if any(map(any, widths)) else grad


def _concatenate(params: Params, *parts: Gradient) -> Gradient:
    """Concatenates gradients as a sum of blocks."""
    axis = params["dimension"]
    ends = np.cumsum([part.shape[axis] for part in parts]).tolist()

    def block(part: Gradient, end: int) -> Gradient:
        low, high = ([0] * len(part.shape) for _ in range(2))
        low[axis], high[axis] = end - part.shape[axis], ends[-1] - end
        return forms.padded(part, tuple(low), tuple(high))

    return functools.reduce(forms.add, map(block, parts, ends))


def _times(params: Params, x: Any, y: Any) -> Gradient | None:
    """Multiplies a gradient by an array, of a low-rank update or a preconditioner.

    It takes the cheaper form at once: a small matrix is better materialized than
    carried out of a scan in factors that are as large as the activations.
    """
    (x_contract, y_contract), (x_batch, y_batch) = params["dimension_numbers"]
    x, y = (v.value if isinstance(v, forms.Dense) else v for v in (x, y))
    if isinstance(x, Gradient) and not isinstance(y, Gradient):
        grad = x.times(y, (x_contract, y_contract), (x_batch, y_batch))
        return None if grad is None else grad.cheaper_form()
    if not isinstance(y, Gradient) or isinstance(x, Gradient):
        return None
    flipped = (y_contract, x_contract), (y_batch, x_batch)
    grad = _times({"dimension_numbers": flipped}, y, x)
    if grad is None:
        return None
    batch, end = len(x_batch), len(grad.shape)
    middle = end - (x.ndim - len(x_contract) - batch)  # where the axes of x begin
    order = (*range(batch), *range(middle, end), *range(batch, middle))
    return view.transposed(grad, order)


def _scalar(value: Any) -> Any:
    """Returns the scalar that a value is everywhere, or None."""
    if isinstance(value, forms.Full):
        return value.fill
    if isinstance(value, Gradient) or jnp.ndim(value):
        return None
    return value


def _entrywise(fun: Entrywise, grad: Any, x: Any) -> Gradient | None:
    """Applies a function to a factored gradient and an array: to rows, for a lookup."""
    x = x.value if isinstance(x, forms.Dense) else x
    is_formed = isinstance(grad, forms.Dense | forms.Full)
    if is_formed or not isinstance(grad, Gradient) or isinstance(x, Gradient):
        return None
    x = jnp.reshape(x, (*[1] * (len(grad.shape) - jnp.ndim(x)), *jnp.shape(x)))
    shape, cheaper = np.broadcast_shapes(x.shape, grad.shape), grad.cheaper_form()
    wide = cheaper if shape == grad.shape else cheaper.broadcast(shape)
    return None if wide is None else wide.entrywise(fun, x)


def _kept(grad: Any, where: Any) -> Gradient | None:
    """Sets the gradient to zero elsewhere, even where it is NaN."""
    keep = lambda g, where: jnp.where(where, g, jnp.zeros((), g.dtype))
    return _entrywise(keep, grad, where)


def _select_n(params: Params, which: Any, *cases: Any) -> Gradient | None:
    del params
    if len(cases) != 2 or which.dtype != bool:
        return None
    if is_zero(cases[0]):
        return _kept(cases[1], which)
    return _kept(cases[0], ~which) if is_zero(cases[1]) else None


def _scatter(params: Params, grad: Any, indices: Any, updates: Any) -> Gradient | None:
    """Sets the gradient of rows that the loss overwrites to zero."""
    if not isinstance(grad, Gradient) or not is_zero(updates):
        return None
    return _kept(
        grad, lookup.kept_by_scatter(grad.shape, indices, updates.shape, params)
    )


def _scatter_mul(
    params: Params, grad: Any, indices: Any, updates: Any
) -> Gradient | None:
    if is_zero(updates) or not isinstance(grad, Gradient):
        return _scatter(params, grad, indices, updates)
    updates = updates.dense() if isinstance(updates, Gradient) else updates
    factors = jax.lax.scatter_mul(
        jnp.ones(grad.shape, updates.dtype),
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return _entrywise(jnp.multiply, grad, factors)


def _mul(params: Params, x: Any, y: Any) -> Gradient | None:
    del params
    grad, other = (x, y) if isinstance(x, Gradient) and _scalar(x) is None else (y, x)
    scalar = _scalar(other)
    if scalar is None or not isinstance(grad, Gradient):
        return _entrywise(jnp.multiply, x, y) or _entrywise(jnp.multiply, y, x)
    return grad.scaled(scalar)


def _div(params: Params, x: Any, y: Any) -> Gradient | None:
    del params
    scalar = _scalar(y)
    if scalar is None or not isinstance(x, Gradient):
        return _entrywise(jnp.divide, x, y)
    return x.scaled(1 / jnp.asarray(scalar))


def _convert(params: Params, grad: Gradient) -> Gradient | None:
    """Converts to another real dtype; the factors keep theirs."""
    del params
    arrays = jax.tree.leaves(grad)
    return None if any(map(jnp.iscomplexobj, arrays)) else grad


def _same(params: Params, grad: Gradient) -> Gradient:
    del params
    return grad


# Linear maps of a gradient, by primitive: they take and return gradients, or None.
MAPS: dict[str, Callable[..., Any]] = {
    "add": lambda params, x, y: forms.add(x, y),
    "add_any": lambda params, x, y: forms.add(x, y),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "div": _div,
    "dot_general": _times,
    "mul": _mul,
    "gather": _gather,
    "neg": lambda params, grad: grad.scaled(-1),
    "pad": _pad,
    "reduce_sum": lambda params, grad: grad.reduce_sum(params["axes"]),
    "reshape": _reshape,
    "rev": lambda params, grad: view.reversed_along(grad, params["dimensions"]),
    "scatter": _scatter,
    "scatter-mul": _scatter_mul,
    "select_n": _select_n,
    "sharding_constraint": _same,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "sub": lambda params, x, y: forms.add(x, y.scaled(-1)),
    "unstack": _unstack,
    "transpose": lambda params, grad: view.transposed(grad, params["permutation"]),
}

# Entrywise maps, which preserve only the form of lookups, with the operands that may be
# gradients.
OF_ENTRIES = {
    "div": (0,),
    "gather": (0,),
    "mul": (0, 1),
    "scatter": (0,),
    "scatter-mul": (0,),
    "select_n": (1, 2),
}

# Producers of gradients of tables.
OF_TABLES = {"bcoo_dot_general", "dynamic_update_slice", "scatter-add"}


def is_zero(value: Any) -> bool:
    """Returns whether a value is known to be zero everywhere while tracing."""
    if isinstance(value, Gradient):
        return forms.is_no_gradient(value)
    try:
        return jnp.ndim(value) == 0 and bool(value == 0)
    except jax.errors.ConcretizationTypeError:
        return False


def full(params: Params, value: Any) -> forms.Full | None:
    """Keeps a broadcast scalar as a `Full`, or returns None."""
    if isinstance(value, Gradient) or jnp.ndim(value):
        return None
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return None
    return forms.Full(value, tuple(params["shape"]), is_zero(value))


def no_gradient(aval: Any) -> forms.Full:
    """Returns a zero gradient of this shape."""
    return forms.Full(jnp.zeros((), aval.dtype), tuple(aval.shape), True)
