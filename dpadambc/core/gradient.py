"""The operations that a per-example gradient answers, and nothing else.

Clipping needs two things of a per-example gradient: the squared norm of each example,
and the weighted sum over examples. Whatever form a leaf has, the rest of the library
reaches it through the functions of this file alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import (
    at_least_float32,
    make_varying,
    round_to_dtype,
    spec_of_examples,
    spec_of_gradients,
    varying_axes,
    with_automatic_axes,
)
from dpadambc.engine import forms, interface, weighted

_WORD = np.uint32(0x5EA1ED)


def _refuse(*args: Any) -> Any:
    raise TypeError("What is sealed is no key: nothing can be drawn with it.")


def _kinds(name: str, tag: str) -> dict[int, Any]:
    """The kinds of keys of one and of two words that closed arrays are."""
    return {words: _kind(words, name, tag) for words in (1, 2)}


def _kind(words: int, name: str, tag: str) -> Any:
    return jax.extend.random.define_prng_impl(
        key_shape=(words,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"dpadambc.{name}_{32 * words}",
        tag=tag,
    )


OF_EXAMPLES = _kinds("sealed", "of a per-example gradient: put clip_per_example first")
OF_SUMS = _kinds("clipped_sum", "of a clipped sum: put add_dp_noise first")


def close_array(x: jax.Array, kinds: dict[int, Any] = OF_EXAMPLES) -> jax.Array:
    """The same bits, in a dtype on which there is no arithmetic; the same shape."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    if x.dtype.itemsize == 8:
        return jax.random.wrap_key_data(
            jax.lax.bitcast_convert_type(x, jnp.uint32), impl=kinds[2]
        )
    return jax.random.wrap_key_data(x.astype(jnp.uint32)[..., None], impl=kinds[1])


def open_array(x: jax.Array, dtype: Any) -> jax.Array:
    """What was closed."""
    words, bits = jax.random.key_data(x), 8 * jnp.dtype(dtype).itemsize
    as_integer = f"uint{bits}" if jnp.issubdtype(dtype, jnp.floating) else dtype
    if bits == 64:
        x = jax.lax.bitcast_convert_type(words, as_integer)
    else:
        x = words[..., 0].astype(as_integer)
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def once(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function, called once for an array: several gradients may share it."""
    known: dict[int, tuple[jax.Array, jax.Array]] = {}

    @functools.wraps(fun)
    def remembered(x: jax.Array, *args: Any) -> jax.Array:
        if id(x) not in known:
            known[id(x)] = x, fun(x, *args)
        return known[id(x)][1]

    return remembered


def new_seal(batch_size: int) -> jax.Array:
    """A seal of shape (batch,)."""
    rows = jnp.arange(batch_size, dtype=jnp.uint32)
    words = jnp.stack([jnp.full(batch_size, _WORD), rows], axis=-1)
    return jax.random.wrap_key_data(words, impl=OF_EXAMPLES[2])


_DTYPE = jax.eval_shape(lambda: new_seal(0)).dtype


def has_seal_dtype(seal: Any) -> bool:
    """Whether it is a seal, rather than what something may have made of it."""
    return getattr(seal, "dtype", None) == _DTYPE


def seals_agree(seals: list[jax.Array]) -> jax.Array:
    """Whether all have the word of a seal, and the rows of the first; shape ()."""
    words = [jax.random.key_data(seal) for seal in seals]
    same = [jnp.all(w == words[0]) for w in words[1:]]
    return functools.reduce(jnp.logical_and, same, jnp.all(words[0][:, 0] == _WORD))


def num_bytes(x: Any, dtype: Any) -> int:
    """What an array takes in memory while it is open."""
    return math.prod(x.shape) * jnp.dtype(dtype).itemsize


class _SaysWhatToDo(type):
    """JAX prints the type of a node where another tree has something else."""

    def __repr__(cls) -> str:
        return f"{cls.__name__} (put clip_per_example first: it gives arrays)"


@interface.pytree(data_fields=("sealed", "seal"))
class PerExampleGradient(metaclass=_SaysWhatToDo):
    """The gradients of one parameter, one for each example, in factored form.

    A pytree node: it crosses `jax.jit`, `jax.lax.scan`, donation and sharding, and can
    be indexed along the examples with `jax.tree.map`. Arithmetic with `jax.tree.map` is
    an error: it would change factors rather than gradients, and mixing examples before
    the clip breaks its bound. `clip_per_example`, `per_example_norms` and `materialize`
    are what it is for.

    Attributes:
      sealed: the gradients; their arrays are closed, with the examples along axis 0.
      seal: what arithmetic breaks. shape=(batch,).
      shape: of the parameter, and of the gradient of one example.
      dtype: of the gradients.
      rule: how the norms are computed; see `dpadambc.explain`.
      dtypes: of the arrays when they are open.
      axes: the axes of a `jax.shard_map` over which the examples vary.
      is_masked: whether a padding mask was applied, even one that is all False.
      num_together: of how many parameters the gradients were taken with it.
    """

    sealed: interface.Gradient
    seal: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    rule: str
    dtypes: tuple[Any, ...]
    axes: tuple[str, ...]
    is_masked: bool
    num_together: int

    @property
    def factored(self) -> interface.Gradient:
        """With open arrays."""
        return self.open(open_array)

    def open(self, opened: Callable[[jax.Array, Any], jax.Array]) -> interface.Gradient:
        """With each array as a function of it and its dtype."""
        arrays, structure = jax.tree.flatten(self.sealed)
        return structure.unflatten(map(opened, arrays, self.dtypes))

    def num_bytes(self) -> dict[int, int]:
        """Of each array while it is open, by the array's identity."""
        pairs = zip(jax.tree.leaves(self.sealed), self.dtypes, strict=True)
        return {id(x): num_bytes(x, dtype) for x, dtype in pairs}

    @property
    def batch_size(self) -> int:
        """The number of examples."""
        return self.seal.shape[0]

    def materialize(self) -> jax.Array:
        r"""The gradients, shape (batch, \*shape): as large as what is avoided here."""
        return jax.vmap(type(self.factored).dense)(self.factored).astype(self.dtype)

    def __getattr__(self, name: str) -> NoReturn:
        does = f": put clip_per_example first, and take {name} of what it returns"
        is_of_arrays = not name.startswith("_") and hasattr(jax.Array, name)
        raise AttributeError(
            f"A {type(self).__name__} has no {name}{does if is_of_arrays else ''}.",
            name=name,
            obj=self,
        )

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "Expected per-example gradients as they are, got arithmetic on them: what"
            " changes them before the clip may change epsilon. Clip first, by"
            " dpadambc.privatize or a chain such as dp_adam, or change the loss."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse

    def __repr__(self) -> str:
        return (
            f"PerExampleGradient(batch_size={self.batch_size}, shape={self.shape},"
            f" dtype={self.dtype}, rule={self.rule!r})"
        )


def seal_gradients(
    several: Sequence[interface.Gradient],
    shapes: Sequence[Any],
    rules: Sequence[str],
    axes: tuple[str, ...] = (),
) -> list[PerExampleGradient]:
    """Per-example gradients, of several parameters, from here on untouched.

    Factors of low precision are rounded here, once and for all. Between one operation
    and the next XLA keeps more digits than the dtype has, where it can: the norm would
    be that of one gradient, and the sum have another.

    Args:
      several: gradients whose arrays have the examples along axis 0.
      shapes: of the parameters, each with a shape and a dtype.
      rules: how the norms are computed.
      axes: of a `jax.shard_map`, over which the examples vary.
    """
    close = once(lambda x: close_array(round_to_dtype(jnp.asarray(x))))
    found = []
    for grad, like, rule in zip(several, shapes, rules, strict=True):
        arrays = jax.tree.leaves(grad)
        (mark,) = make_varying((new_seal(arrays[0].shape[0]),), axes)
        found.append(
            PerExampleGradient(
                sealed=jax.tree.map(close, grad),
                seal=mark,
                shape=tuple(like.shape),
                dtype=like.dtype,
                rule=rule,
                dtypes=tuple(x.dtype for x in arrays),
                axes=axes,
                is_masked=False,
                num_together=len(several),
            )
        )
    return found


SCALED = "materialized: scaled"
NO_GRADIENT = forms.Full.rule
MATERIALIZED = "materialized"


def is_per_example(leaf: Any) -> TypeGuard[PerExampleGradient]:
    """Whether a node of a tree is a `PerExampleGradient`."""
    return isinstance(leaf, PerExampleGradient)


def per_example_leaves(gradients: optax.Updates) -> list[PerExampleGradient]:
    """The leaves of a tree."""
    return jax.tree.leaves(gradients, is_leaf=is_per_example)


def as_per_example(
    gradients: optax.Updates, *, is_padding_example: jax.Array | None = None
) -> optax.Updates:
    r"""Declares that arrays are untouched gradients of single examples.

    Use it for gradients from elsewhere than `per_example_grad`, such as
    `jax.vmap(jax.grad(...))`. `clip_per_example` takes no bare arrays, since it cannot
    know what happened to them.

    Guarantees:
      * None of its own: by calling this you vouch that each row depends on one example
        alone. Scaling all rows by a norm over the batch, averages over steps, and
        statistics of the batch break this, and with it the sensitivity. So does
        `jax.vmap(jax.grad(...))` inside `jax.shard_map`, where JAX sums over devices.

    Args:
      gradients: a tree of floating-point arrays of shape (batch, \*parameter shape).
      is_padding_example: shape (batch,), bool, True where a row is padding. If given,
        those rows become zero, and the gradients count as masked.

    Returns:
      The same tree, with a `PerExampleGradient` for each array.

    Raises:
      TypeError: if a leaf is no array of real floating-point numbers, or is a
        `PerExampleGradient` already.
      ValueError: if an array has no batch axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> params = jnp.zeros(2)
      >>> loss_fn = lambda w, x: w @ x
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> grads = dpadambc.as_per_example(
      ...     jax.vmap(jax.grad(loss_fn), (None, 0))(params, x))
      >>> clip = dpadambc.clip_per_example(1.0, normalize_by=2)
      >>> clipped, _ = clip.update(grads, clip.init(params), params)
      >>> print([f"{g:.3f}" for g in clipped.value])
      ['0.300', '0.650']
    """
    found = jax.tree_util.tree_leaves_with_path(gradients, is_leaf=is_per_example)
    for path, leaf in found:
        name = jax.tree_util.keystr(path) or "gradients"
        if is_per_example(leaf) or not hasattr(leaf, "shape"):
            raise TypeError(f"Expected {name} to be an array, got {leaf!r}.")
        validate.real_floating(leaf.dtype, name)
        if not leaf.shape:
            raise ValueError(f"Expected {name} to have the examples along axis 0.")
    arrays = jax.tree.map(jnp.asarray, gradients)
    tree = seal_arrays(arrays, varying_axes(arrays))
    return (
        tree if is_padding_example is None else mask_examples(tree, is_padding_example)
    )


def seal_arrays(gradients: optax.Updates, axes: tuple[str, ...]) -> optax.Updates:
    """Per-example gradients that are arrays of shape (batch, ...), from here on sealed.

    Args:
      gradients: a tree of arrays.
      axes: of a `jax.shard_map`, over which the examples vary.
    """
    arrays, structure = jax.tree.flatten(gradients)
    shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays]
    dense = [forms.Dense(x, x.shape[1:], "array") for x in arrays]
    return structure.unflatten(
        seal_gradients(dense, shapes, ["array"] * len(arrays), axes)
    )


def in_any_form(gradients: optax.Updates) -> optax.Updates:
    """Per-example gradients; of arrays too, where they are only looked at."""
    if all(map(is_per_example, per_example_leaves(gradients))):
        return gradients
    return as_per_example(gradients)


def mask_examples(
    gradients: optax.Updates, is_padding_example: jax.Array
) -> optax.Updates:
    """Zero for the examples that are padding, whatever they held."""

    def blank(x: jax.Array, dtype: Any) -> jax.Array:
        rows = is_padding_example.reshape((-1,) + (1,) * (x.ndim - 1))
        return close_array(jnp.where(rows, 0, open_array(x, dtype)))

    blank = once(blank)

    def mask(leaf: PerExampleGradient) -> PerExampleGradient:
        validate.padding(is_padding_example, leaf.batch_size)
        return dataclasses.replace(leaf, sealed=leaf.open(blank), is_masked=True)

    return jax.tree.map(mask, gradients, is_leaf=is_per_example)


class OuterProduct(NamedTuple):
    """A scale for each coordinate of a parameter that is a product over its axes."""

    vectors: tuple[jax.Array, ...]  # one for each axis

    def dense(self) -> jax.Array:
        """The array that it stands for."""
        return functools.reduce(functools.partial(jnp.tensordot, axes=0), self.vectors)


def scale_examples(gradients: optax.Updates, factors: optax.Params) -> optax.Updates:
    """Each example's gradient times the same factors, coordinate by coordinate.

    The one thing that may come before the clip: it mixes no examples, and what comes
    out is sealed and masked as what went in, in at least float32. A product of factors
    times a matrix is none, and is formed. Times an `OuterProduct` it is one, as rows
    that are looked up are; convolutions with overlapping patches are formed.

    Args:
      gradients: a tree of per-example gradients.
      factors: for each parameter an array of its shape or an `OuterProduct`, of numbers
        that are public, such as a function of earlier private gradients.
    """

    def scale(leaf: PerExampleGradient, factor: Any) -> PerExampleGradient:
        if isinstance(factor, OuterProduct):
            along = _scaled_along(leaf, factor.vectors)
            if along is not None:
                return along
            factor = factor.dense()
        return _formed_and_scaled(leaf, factor)

    return jax.tree.map(scale, gradients, factors, is_leaf=is_per_example)


def _scaled_along(
    leaf: PerExampleGradient, vectors: tuple[jax.Array, ...]
) -> PerExampleGradient | None:
    """In the form that it has, or None where the form does not allow it."""
    dtypes = []

    def product(leaf, vectors):
        grad = jax.vmap(lambda grad: grad.scaled_along(vectors))(leaf.factored)
        dtypes.extend(x.dtype for x in jax.tree.leaves(grad))
        return jax.tree.map(close_array, grad)

    if jax.eval_shape(product, leaf, vectors) is None:
        return None
    dtypes.clear()
    spec = spec_of_examples(leaf.seal)
    return dataclasses.replace(
        leaf,
        sealed=with_automatic_axes(product, spec, leaf, vectors),
        dtype=at_least_float32(leaf.dtype),
        dtypes=tuple(dtypes),
    )


def _formed_and_scaled(
    leaf: PerExampleGradient, factor: jax.Array
) -> PerExampleGradient:
    """As an array."""

    def product(leaf, factor):
        wide = dataclasses.replace(leaf, dtype=at_least_float32(leaf.dtype))
        gradient = wide.materialize()
        return close_array(gradient * factor[None].astype(gradient.dtype))

    spec = spec_of_gradients(leaf.seal, factor)
    closed = with_automatic_axes(product, spec, leaf, factor)
    dtype = at_least_float32(leaf.dtype)
    return dataclasses.replace(
        leaf,
        sealed=forms.Dense(closed, leaf.shape, SCALED),
        rule=SCALED,
        dtype=dtype,
        dtypes=(dtype,),
    )


def per_example_squared_norms(gradients: optax.Updates) -> jax.Array:
    """The squared norm of each example over the whole tree, shape (batch,)."""
    norms = [jax.vmap(type(grad).squared_norm)(grad) for grad in _open(gradients)]
    return functools.reduce(jnp.add, norms)


def _open(gradients: optax.Updates) -> list[interface.Gradient]:
    """The gradients with open arrays; what they share, they share still."""
    opened = once(open_array)
    return [leaf.open(opened) for leaf in per_example_leaves(gradients)]


def per_example_norms(gradients: optax.Updates) -> jax.Array:
    """The L2 norm of each example's gradient over the whole tree, shape (batch,).

    The norm that `clip_per_example` uses: in at least float32, and in factored form
    with an allowance for rounding, so that it is never less than the true norm. These
    norms are *not private*.

    Args:
      gradients: what `per_example_grad` returns, or a tree of arrays of shape
        (batch, ...).

    Returns:
      The norms, in at least float32.

    Raises:
      TypeError: if an array is not of real floating-point numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])
      >>> grads = dpadambc.per_example_grad(lambda w, x: w @ x)(jnp.zeros(2), x)
      >>> print(dpadambc.per_example_norms(grads))
      [5. 1.]
    """
    return jnp.sqrt(per_example_squared_norms(in_any_form(gradients)))


def weighted_sums(
    gradients: optax.Updates, weights: jax.Array, are_finite: jax.Array
) -> optax.Updates:
    """The sum over examples of weight times gradient, in the dtype of the weights.

    An example of weight zero contributes exactly zero, whatever it holds: NaN too. See
    `_weighted`.

    Args:
      gradients: a tree of per-example gradients.
      weights: shape (batch,).
      are_finite: shape (), bool: whether the norms of all examples are finite.
    """
    structure = jax.tree.structure(gradients, is_leaf=is_per_example)
    sums = weighted.sums(_open(gradients), weights, are_finite)
    return structure.unflatten([x.astype(weights.dtype) for x in sums])
