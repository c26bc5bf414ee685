"""The gradients of single examples as a value, which is sealed until it is clipped.

Clipping asks two things of a per-example gradient: the squared norm of each example,
and the weighted sum over examples. The rest of the library reaches a gradient, whatever
its form, through the functions of this file alone.

A clip bounds the change by one example only if nothing has mixed the examples before
it: `optax.clip_by_global_norm` ahead of it, say, scales all of them by a norm that one
of them can set. So the arrays of per-example gradients are closed: their bits are
stored as keys of a special kind. Keys go through `jax.jit`, `jax.lax.scan`, shardings
or an index like any array, but JAX has no arithmetic on them, and its errors print
their kind. A selection of arrays by dtype does not find them either.

A seal goes with them, with the number of each example. It varies over the axes of a
`jax.shard_map` along which the examples do. So it shows where a gradient was summed
over devices, the rows of one parameter were put in another order, or a row was taken
twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, TypeGuard, TypeVar

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import make_varying
from dpadambc.engine import rounding, weighted
from dpadambc.engine.interface import Gradient

_WORD = np.uint32(0x5EA1ED)


def _no_draw(*args: Any) -> Any:
    raise TypeError("A sealed array is no key: nothing can be drawn with it.")


def _kinds(name: str, tag: str) -> dict[int, Any]:
    """Defines the key kinds, of one and two words, that hold closed arrays."""
    functions = dict.fromkeys(("seed", "split", "random_bits", "fold_in"), _no_draw)
    define = functools.partial(jax.extend.random.define_prng_impl, tag=tag, **functions)
    of = lambda words: define(key_shape=(words,), name=f"dpadambc.{name}_{32 * words}")
    return {words: of(words) for words in (1, 2)}


OF_EXAMPLES = _kinds("sealed", "of a per-example gradient: put clip_per_example first")
OF_SUMS = _kinds("clipped_sum", "of a clipped sum: put add_dp_noise first")


def close_array(x: jax.Array, kinds: dict[int, Any] = OF_EXAMPLES) -> jax.Array:
    """Wraps the bits of an array in a dtype without arithmetic; the shape stays."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    if x.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return jax.random.wrap_key_data(words, impl=kinds[2])
    return jax.random.wrap_key_data(x.astype(jnp.uint32)[..., None], impl=kinds[1])


def open_array(x: jax.Array, dtype: Any) -> jax.Array:
    """Unwraps the array, of this dtype, that `close_array` was given."""
    words, bits = jax.random.key_data(x), 8 * jnp.dtype(dtype).itemsize
    as_integer = f"uint{bits}" if jnp.issubdtype(dtype, jnp.floating) else dtype
    if bits == 64:
        x = jax.lax.bitcast_convert_type(words, as_integer)
    else:
        x = words[..., 0].astype(as_integer)
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def _seal_of(batch_size: int, axes: tuple[str, ...]) -> jax.Array:
    """Makes a seal of shape (batch,), whose numbers differ along the axes."""
    rows = jnp.arange(batch_size, dtype=jnp.uint32)
    if axes:
        rows += batch_size * jax.lax.axis_index(axes).astype(jnp.uint32)
    words = jnp.stack([jnp.full(batch_size, _WORD), rows], axis=-1)
    return make_varying(jax.random.wrap_key_data(words, impl=OF_EXAMPLES[2]), axes)


SEAL_DTYPE = jax.eval_shape(lambda: _seal_of(0, ())).dtype


def seals_agree(gradients: optax.Updates) -> jax.Array:
    """Returns whether all leaves have the same rows, each once; shape ()."""
    leaves = per_example_leaves(gradients)
    words = [jax.random.key_data(leaf.seal) for leaf in leaves]
    same = [jnp.all(w == words[0]) for w in words[1:]]
    marks, rows = words[0].T
    num_times = jnp.zeros_like(rows, shape=leaves[0].num_rows).at[rows].add(1)
    is_whole = jnp.all(marks == _WORD) & jnp.all(num_times <= 1)
    return functools.reduce(jnp.logical_and, same, is_whole)


class ClosedType(type):
    """The type of `Closed`, whose name JAX prints in an error about two trees."""

    advice: ClassVar[str] = ""

    def __repr__(cls) -> str:
        return f"{cls.__name__} ({cls.advice})"


class Closed(metaclass=ClosedType):
    """A value without arithmetic, since arithmetic on it may change epsilon."""

    source: ClassVar[str] = ""
    shape: tuple[int, ...]
    dtype: Any

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self)!r} has no {name}.", name=name, obj=self)

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"Expected no arithmetic on a {type(self)!r}.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse


_STATIC = ("shape", "dtype", "rule", "dtypes", "axes", "is_masked")
_STATIC += ("num_rows", "num_together")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sealed", "seal"],
    meta_fields=_STATIC,
)
@dataclasses.dataclass(frozen=True, repr=False)
class PerExampleGradient(Closed):
    """The gradients of one parameter, one for each example, in factored form.

    A pytree node: it crosses `jax.jit`, `jax.lax.scan`, donation and sharding, and can
    be indexed along the examples with `jax.tree.map`. Arithmetic is an error: it would
    change factors rather than gradients, and mixing examples before the clip breaks its
    bound. Give it to `clip_per_example` or `per_example_norms`, or look at it with
    `materialize`.

    Attributes:
      sealed: the gradients; their arrays are closed, with the examples along axis 0.
      seal: the number of each example; arithmetic breaks it. shape=(batch,).
      shape: the shape of the parameter, and of the gradient of one example.
      dtype: the dtype of the gradients.
      rule: how the norms are computed; see `dpadambc.explain`.
      dtypes: the dtypes of the arrays once they are open.
      axes: the axes of a `jax.shard_map` over which the examples vary.
      is_masked: whether a padding mask was applied, even one that is all False.
      num_rows: the number of examples that were sealed, on all devices along `axes`.
      num_together: the number of parameters that were differentiated together.
    """

    advice = "put clip_per_example first"
    source: ClassVar[str] = "per_example_grad or as_per_example"

    sealed: Gradient
    seal: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    rule: str
    dtypes: tuple[Any, ...]
    axes: tuple[str, ...]
    is_masked: bool
    num_rows: int
    num_together: int

    def open(self, opened: Callable[..., jax.Array] = open_array) -> Gradient:
        """Applies a function to each array and its dtype, and returns the gradients."""
        arrays, structure = jax.tree.flatten(self.sealed)
        return structure.unflatten(map(opened, arrays, self.dtypes))

    @property
    def batch_size(self) -> int:
        """The number of examples."""
        return self.seal.shape[0]

    def materialize(self) -> jax.Array:
        r"""Returns the gradients, shape (batch, \*shape): one for each example."""
        dense = jax.vmap(lambda grad: grad.dense(rounding.FULL))
        return dense(self.open()).astype(self.dtype)


_C = TypeVar("_C", bound=Closed)


def closed_leaves(
    tree: optax.Updates, kind: type[_C], params: optax.Params | None
) -> list[_C]:
    """Returns the leaves of a tree, all of one kind, and with these parameters' paths.

    Raises:
      TypeError: if a leaf is of another type.
      ValueError: if paths or shapes are not those of the parameters.
    """
    is_closed = lambda x: isinstance(x, Closed)
    named, keystr = jax.tree_util.tree_leaves_with_path, jax.tree_util.keystr
    leaves = [(keystr(path), leaf) for path, leaf in named(tree, is_leaf=is_closed)]
    for path, leaf in leaves:
        if not isinstance(leaf, kind):
            got = repr(leaf) if is_closed(leaf) else f"an array of {jnp.shape(leaf)}"
            expected = f"a {kind.__name__} of {kind.source}"
            raise TypeError(f"Expected gradient{path} to be {expected}, got {got}.")
    if leaves and params is not None:
        expected = {keystr(path): jnp.shape(x) for path, x in named(params)}
        got = {path: leaf.shape for path, leaf in leaves}
        if got != expected:
            raise ValueError(f"Expected gradients of params, {expected}, got {got}.")
    return [leaf for _, leaf in leaves]


def is_per_example(leaf: Any) -> TypeGuard[PerExampleGradient]:
    """Returns whether a node of a tree is a `PerExampleGradient`."""
    return isinstance(leaf, PerExampleGradient)


def per_example_leaves(gradients: optax.Updates) -> list[PerExampleGradient]:
    """Returns the `PerExampleGradient` leaves of a tree."""
    return jax.tree.leaves(gradients, is_leaf=is_per_example)


def _once(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Calls a function once for an array that several gradients share."""
    known: dict[int, tuple[jax.Array, jax.Array]] = {}

    def remembered(x: jax.Array, *args: Any) -> jax.Array:
        if id(x) not in known:
            known[id(x)] = x, fun(x, *args)
        return known[id(x)][1]

    return remembered


def seal_gradients(
    gradients: Sequence[Gradient],
    shapes: Sequence[Any],
    rules: Sequence[str],
    axes: tuple[str, ...] = (),
) -> list[PerExampleGradient]:
    """Seals the gradients of several parameters.

    Args:
      gradients: the gradients; their arrays have the examples along axis 0.
      shapes: the parameters' shapes and dtypes.
      rules: how the norms are computed.
      axes: the axes of a `jax.shard_map` over which the examples vary.
    """
    close = _once(lambda x: close_array(jnp.asarray(x)))
    sizes = [jax.tree.leaves(grad)[0].shape[0] for grad in gradients]
    seals = {size: _seal_of(size, axes) for size in sizes}
    return [
        PerExampleGradient(
            sealed=jax.tree.map(close, grad),
            seal=seals[size],
            shape=tuple(like.shape),
            dtype=like.dtype,
            rule=rule,
            dtypes=tuple(x.dtype for x in jax.tree.leaves(grad)),
            axes=axes,
            is_masked=False,
            num_rows=size * jax.lax.axis_size(axes),
            num_together=len(gradients),
        )
        for grad, size, like, rule in zip(gradients, sizes, shapes, rules, strict=True)
    ]


def mask_examples(
    gradients: optax.Updates, is_padding_example: jax.Array | None
) -> optax.Updates:
    """Sets the gradients of padding examples to zero, if there is a mask."""
    if is_padding_example is None:
        return gradients

    def blank(x: jax.Array, dtype: Any) -> jax.Array:
        rows = is_padding_example.reshape((-1,) + (1,) * (x.ndim - 1))
        return close_array(jnp.where(rows, 0, open_array(x, dtype)))

    blank = _once(blank)

    def mask(leaf: PerExampleGradient) -> PerExampleGradient:
        validate.padding(is_padding_example, leaf.batch_size)
        return dataclasses.replace(leaf, sealed=leaf.open(blank), is_masked=True)

    return jax.tree.map(mask, gradients, is_leaf=is_per_example)


def _open(gradients: optax.Updates) -> list[Gradient]:
    """Opens the arrays of gradients; shared arrays stay shared.

    XLA may keep more digits between two operations than a dtype has. Then the norm and
    the sum would be those of different gradients. So the clip begins by rounding the
    arrays to their dtype, with `engine.rounding.rounded_tree`.
    """
    opened = _once(open_array)
    return [leaf.open(opened) for leaf in per_example_leaves(gradients)]


def per_example_squared_norms(
    gradients: optax.Updates, precision: rounding.Precision = None
) -> jax.Array:
    """Computes the squared norm of each example over the tree, shape (batch,).

    Where products round, the norm includes a bound on the rounding of `weighted_sums`
    at the same precision; see `engine.rounding`.
    """
    return rounding.on_device(weighted.squared_norms, precision, _open(gradients))


def per_example_norms(gradients: optax.Updates) -> jax.Array:
    """Computes the L2 norm of each example's gradient over the tree, shape (batch,).

    `clip_per_example` uses this norm: it is in at least float32, and in factored form
    it has an allowance for rounding, so that it is never less than the true norm. These
    norms are *not private*.

    Args:
      gradients: the output of `per_example_grad` or `as_per_example`.

    Returns:
      The norms, in at least float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])
      >>> grads = dpadambc.per_example_grad(lambda w, x: w @ x)(jnp.zeros(2), x)
      >>> print(dpadambc.per_example_norms(grads))
      [5. 1.]
    """
    return jnp.sqrt(per_example_squared_norms(gradients))


def weighted_sums(
    gradients: optax.Updates,
    weights: jax.Array,
    are_finite: jax.Array,
    precision: rounding.Precision = None,
) -> optax.Updates:
    """Sums over examples weight times gradient, in the dtype of the weights.

    An example of weight zero contributes exactly zero, whatever it holds: NaN too. See
    `engine.weighted`.

    Args:
      gradients: a tree of per-example gradients.
      weights: shape (batch,).
      are_finite: shape (), bool: whether the norms of all examples are finite.
      precision: the precision of products; see `clip_per_example`.
    """
    structure = jax.tree.structure(gradients, is_leaf=is_per_example)
    sums = rounding.on_device(
        weighted.sums, precision, _open(gradients), weights, are_finite
    )
    return structure.unflatten([x.astype(weights.dtype) for x in sums])
