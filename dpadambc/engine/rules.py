"""Which primitives produce a gradient in factored form, and which preserve the form."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.engine import convolution, forms, lookup, product, shared, view
from dpadambc.engine.interface import Gradient

Params = dict[str, Any]


def _dot_general(params: Params, a: jax.Array, g: jax.Array) -> Gradient:
    return product.dot_general(a, g, params["dimension_numbers"])


def _conv_general_dilated(params: Params, lhs: jax.Array, rhs: jax.Array):
    return convolution.conv_general_dilated(lhs, rhs, params)


def _scatter_add(
    params: Params, operand: Any, indices: jax.Array, g: jax.Array
) -> Gradient | None:
    if not is_zero(operand):
        return None
    return lookup.scatter_add(operand.shape, indices, g, params)


def _dynamic_update_slice(
    params: Params, operand: Any, update: jax.Array, *starts: jax.Array
) -> Gradient | None:
    """The gradient at an index that is traced: of a table's row in a scan, say.

    That of a whole kernel among others is formed: the forward pass has a copy of it.
    """
    del params
    if not is_zero(operand):
        return None
    return lookup.dynamic_update_slice(operand.shape, update, starts)


# Primitives of arrays whose output can stay factored.
PRODUCERS: dict[str, Callable[..., Gradient | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "dynamic_update_slice": _dynamic_update_slice,
    "scatter-add": _scatter_add,
}

# Those that add into their first operand, which is zero and no array.
INTO_ZEROS = {"dynamic_update_slice", "scatter-add"}


def _reshape(params: Params, grad: Gradient) -> Gradient | None:
    is_plain = params["dimensions"] is None
    return view.reshaped(grad, params["new_sizes"]) if is_plain else None


def _squeeze(params: Params, grad: Gradient) -> Gradient:
    dropped = {i % len(grad.shape) for i in params["dimensions"]}
    left = tuple(n for i, n in enumerate(grad.shape) if i not in dropped)
    return view.reshaped(grad, left)


def _broadcast_in_dim(params: Params, grad: Gradient) -> Gradient | None:
    """Axes of size one added."""
    kept, shape = params["broadcast_dimensions"], params["shape"]
    added = (n for i, n in enumerate(shape) if i not in kept)
    same = tuple(shape[i] for i in kept) == grad.shape
    return view.reshaped(grad, shape) if same and all(n == 1 for n in added) else None


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
    axis, size = params["axis"], grad.shape[params["axis"]]
    parts = _split({"axis": axis, "sizes": [1] * size}, grad)
    if parts is None:
        return None
    shape = grad.shape[:axis] + grad.shape[axis + 1 :]
    return [view.reshaped(part, shape) for part in parts]


def _pad(params: Params, grad: Gradient, value: Any) -> Gradient | None:
    low, high, interior = zip(*params["padding_config"], strict=True)
    if not is_zero(value) or any(interior) or min(*low, *high) < 0:
        return None
    return forms.padded(grad, tuple(map(int, low)), tuple(map(int, high)))


def _concatenate(params: Params, *parts: Gradient) -> Gradient | None:
    """A sum of blocks."""
    if not all(isinstance(part, Gradient) for part in parts):
        return None
    axis, start = params["dimension"], 0
    total: Gradient | None = None
    size = sum(part.shape[axis] for part in parts)
    for part in parts:
        low = tuple(start if i == axis else 0 for i in range(len(part.shape)))
        end = size - start - part.shape[axis]
        high = tuple(end if i == axis else 0 for i in range(len(part.shape)))
        block = forms.padded(part, low, high)
        total = block if total is None else forms.add(total, block)
        start += part.shape[axis]
    return total


def _times(params: Params, x: Any, y: Any) -> Gradient | None:
    """A gradient times an array, of a low-rank update or of a preconditioner.

    It is settled here: a small matrix is better formed than carried out of a scan in
    factors that are as large as the activations.
    """
    (x_contract, y_contract), (x_batch, y_batch) = params["dimension_numbers"]
    x, y = (v.value if isinstance(v, forms.Dense) else v for v in (x, y))
    is_array = lambda v: not isinstance(v, Gradient) or shared.is_array(v)
    if isinstance(x, Gradient) and is_array(y):
        grad = x.times(y, (x_contract, y_contract), (x_batch, y_batch))
        return None if grad is None else grad.settled()
    if not isinstance(y, Gradient) or not is_array(x):
        return None
    flipped = (y_contract, x_contract), (y_batch, x_batch)
    grad = _times({"dimension_numbers": flipped}, y, x)
    if grad is None:
        return None
    batch, end = len(x_batch), len(grad.shape)
    # Where the axes of x begin.
    middle = end - (len(x.shape) - len(x_contract) - batch)
    return grad.transpose((*range(batch), *range(middle, end), *range(batch, middle)))


def _scalar(value: Any) -> Any:
    """The scalar that a value is everywhere, or None."""
    if isinstance(value, forms.Full):
        return value.fill
    if isinstance(value, Gradient) or jnp.ndim(value):
        return None
    return value


def _mul(params: Params, x: Any, y: Any) -> Gradient | None:
    del params
    grad, other = (x, y) if isinstance(x, Gradient) and _scalar(x) is None else (y, x)
    scalar = _scalar(other)
    if scalar is None or not isinstance(grad, Gradient):
        return shared.product(x, y)
    return grad.scaled(scalar)


def _div(params: Params, x: Any, y: Any) -> Gradient | None:
    del params
    scalar = _scalar(y)
    if scalar is None or not isinstance(x, Gradient):
        return shared.product(x, shared.reciprocal(y))
    return x.scaled(1 / jnp.asarray(scalar))


def _add(params: Params, x: Any, y: Any) -> Gradient | None:
    del params
    both = isinstance(x, Gradient) and isinstance(y, Gradient)
    return forms.add(x, y) if both else None


def _sub(params: Params, x: Any, y: Any) -> Gradient | None:
    return _add(params, x, y.scaled(-1)) if isinstance(y, Gradient) else None


def _convert(params: Params, grad: Gradient) -> Gradient | None:
    """Another dtype of real numbers; the factors keep theirs."""
    del params
    arrays = jax.tree.leaves(grad)
    return None if any(map(jnp.iscomplexobj, arrays)) else grad


def _same(params: Params, grad: Gradient) -> Gradient:
    del params
    return grad


# Linear maps of a gradient, by primitive: they take and give gradients, or None.
MAPS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "add_any": _add,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "div": _div,
    "dot_general": _times,
    "mul": _mul,
    "neg": lambda params, grad: grad.scaled(-1),
    "pad": _pad,
    "reduce_sum": lambda params, grad: forms.summed_over(grad, params["axes"]),
    "reshape": _reshape,
    "rev": lambda params, grad: view.reversed_along(grad, params["dimensions"]),
    "sharding_constraint": _same,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "sub": _sub,
    "unstack": _unstack,
    "transpose": lambda params, grad: view.transposed(grad, params["permutation"]),
}

# The operands of a map that may be gradients; all of them where none are named.
TERM_OPERANDS = {"div": (0,), "pad": (0,)}


def is_zero(value: Any) -> bool:
    """Whether a value is known to be zero everywhere while tracing."""
    if isinstance(value, forms.Full):
        return value.is_zero
    if isinstance(value, Gradient):
        return False
    try:
        return jnp.ndim(value) == 0 and bool(value == 0)
    except jax.errors.ConcretizationTypeError:
        return False


def full(params: Params, value: Any) -> forms.Full | None:
    """A broadcast scalar, kept as such."""
    if isinstance(value, Gradient) or jnp.ndim(value):
        return None
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return None
    return forms.Full(value, tuple(params["shape"]), is_zero(value))


def no_gradient(aval: Any) -> forms.Full:
    """Zero, of this shape."""
    return forms.Full(jnp.zeros((), aval.dtype), tuple(aval.shape), True)


def is_no_gradient(value: Any) -> bool:
    """Whether a gradient is zero whatever the data."""
    return isinstance(value, forms.Full) and value.is_zero
