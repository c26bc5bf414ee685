"""What the per-example gradients of a loss will cost, before anything runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc._core import validate
from dpadambc.gradients import _batch_norm, _batched, _leaves, per_example

_HEADER = ("parameter", "shape", "rule", "factored", "materialized")


@dataclasses.dataclass(frozen=True)
class ParameterCost:
    """How the gradients of one parameter are held."""

    name: str
    shape: tuple[int, ...]
    rule: str
    factored_bytes: int  # of the factors, for the batch
    materialized_bytes: int  # of one gradient for each example

    @property
    def is_formed(self) -> bool:
        """Whether a kernel's gradients are held as arrays without need."""
        known = ("direct", "gram", "outer product", "lookup", "convolution")
        return len(self.shape) > 1 and not self.rule.startswith(known)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The table of `explain`; printed, it is a table."""

    parameters: tuple[ParameterCost, ...]
    batch_size: int
    factored_bytes: int  # of all distinct factors: some serve several parameters
    without_gradient: tuple[str, ...]  # a sentence for each parameter
    costly: tuple[str, ...]  # a sentence for each parameter that takes needless memory
    mixing: tuple[str, ...]  # a sentence for each way in which examples are mixed

    @property
    def warnings(self) -> tuple[str, ...]:
        """All sentences."""
        return (*self.without_gradient, *self.costly, *self.mixing)

    @property
    def rules(self) -> dict[str, str]:
        """The rule of each parameter, by name."""
        return {row.name: row.rule for row in self.parameters}

    @property
    def materialized_bytes(self) -> int:
        """What one gradient for each example and parameter would take."""
        return sum(row.materialized_bytes for row in self.parameters)

    def __str__(self) -> str:
        total = "all, shared factors once", "", ""
        rows = [
            _HEADER,
            *(
                (row.name, str(row.shape), row.rule, *_sizes(row))
                for row in self.parameters
            ),
            (*total, *_sizes(self)),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"batch of {self.batch_size}"]
        for *texts, factored, materialized in rows:
            left = [text.ljust(n) for text, n in zip(texts, widths, strict=False)]
            right = factored.rjust(widths[3]), materialized.rjust(widths[4])
            lines.append("  ".join((*left, *right)))
        return "\n".join((*lines, *(f"warning: {text}" for text in self.warnings)))


def _sizes(row: ParameterCost | Explanation) -> tuple[str, str]:
    return _readable(row.factored_bytes), _readable(row.materialized_bytes)


def _readable(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"


def _cost(
    name: str, leaf: _leaves.PerExampleGradient, batch_size: int
) -> ParameterCost:
    return ParameterCost(
        name=name,
        shape=leaf.shape,
        rule=leaf.rule,
        factored_bytes=sum(leaf.num_bytes().values()),
        materialized_bytes=batch_size * math.prod(leaf.shape) * leaf.dtype.itemsize,
    )


def _without_gradient(rows: list[ParameterCost]) -> tuple[str, ...]:
    return tuple(
        f"{row.name} gets no gradient: the loss does not depend on it. Noise will move"
        " it all the same; leave it out of what is trained."
        for row in rows
        if row.rule == _leaves.NO_GRADIENT
    )


def _costly(rows: list[ParameterCost]) -> tuple[str, ...]:
    sentences = []
    for row in rows:
        if row.rule.startswith(_leaves.MATERIALIZED):
            sentences.append(
                f"{row.name} has no rule for how the loss uses it ({row.rule}), so a"
                " gradient is formed for each example:"
                f" {_readable(row.materialized_bytes)}."
            )
        elif (
            row.rule != _leaves.NO_GRADIENT
            and row.is_formed
            and 2 * row.factored_bytes > sum(other.factored_bytes for other in rows)
        ):
            sentences.append(
                f"{row.name} is formed for each example, as reverse mode has it"
                f" ({row.rule}): {_readable(row.materialized_bytes)}, more than all the"
                " others take."
            )
    return tuple(sentences)


def explain(
    fun: Callable[..., Any],
    *args: Any,
    batch_size: int,
    argnums: _batched.Argnums = 0,
    has_aux: bool = False,
    batch_argnums: _batched.Argnums | None = None,
    prng_argnum: int | None = None,
) -> Explanation:
    """How the per-example gradients of a loss will be held, and what that takes.

    Nothing runs: the loss is traced with the shapes of its arguments.

    The rules: `gram` and `outer product` keep the two factors of a kernel's gradient,
    `lookup` ids and rows, `convolution: gram` and `convolution: taps` the input and
    the output gradient. `direct` is a gradient that is formed because it is no larger
    than its factors. The name of a primitive (`reduce_sum`, `mul`) is one that reverse
    mode forms anyway. `materialized: ...` is one without a rule, which is formed too,
    and warned of.

    Args:
      fun: the loss of one example; see `per_example_value_and_grad`.
      *args: the arguments of `fun` for *one* example, arrays or
        `jax.ShapeDtypeStruct`.
      batch_size: for which the bytes are counted.
      argnums: which positional arguments are differentiated.
      has_aux: whether `fun` returns `(loss, aux)`.
      batch_argnums: which positional arguments will be batches; by default all others.
      prng_argnum: which positional argument is a PRNG key, if any.

    Returns:
      An `Explanation`: `print` it, or read `parameters`, `rules` and `warnings`. It
      warns of parameters without a gradient, of those without a rule, of kernels
      that are formed and take more than all the others, and of a mean over an axis of
      size one, as batch normalization has it.

    Raises:
      ValueError: as `per_example_value_and_grad`.
      TypeError: as `per_example_value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
      >>> params = {"w": jnp.ones((784, 1024)), "b": jnp.ones(1024)}
      >>> print(dpadambc.explain(loss_fn, params, jnp.ones(784), batch_size=256))
      batch of 256
      parameter                 shape        rule           factored  materialized
      ['b']                     (1024,)      direct          1.05 MB       1.05 MB
      ['w']                     (784, 1024)  outer product   1.85 MB        822 MB
      all, shared factors once                               1.85 MB        823 MB
    """
    validate.count(least=1, batch_size=batch_size)
    arguments = _batched.Arguments(argnums, batch_argnums, prng_argnum)
    grad_fn = per_example.per_example_grad(
        fun,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
    )
    rows, distinct = [], {}

    def trace(*batched):
        grads = grad_fn(*batched)
        grads = grads[0] if has_aux else grads
        paths = jax.tree_util.tree_leaves_with_path(
            grads, is_leaf=_leaves.is_per_example
        )
        for path, leaf in paths:
            name = jax.tree_util.keystr(path) or "params"
            rows.append(_cost(name, leaf, batch_size))
            distinct.update(leaf.num_bytes())
        distinct["bytes"] = sum(distinct.values())

    batched = [
        _with_batch_axis(x, batch_size) if i in arguments.batched(args) else x
        for i, x in enumerate(args)
    ]
    jax.eval_shape(trace, *batched)
    return Explanation(
        parameters=tuple(rows),
        batch_size=batch_size,
        factored_bytes=distinct["bytes"],
        without_gradient=_without_gradient(rows),
        costly=_costly(rows),
        mixing=_mixing(fun, args),
    )


def _with_batch_axis(tree: Any, batch_size: int) -> Any:
    add = lambda x: jax.ShapeDtypeStruct(
        (batch_size, *jnp.shape(x)), jnp.result_type(x)
    )
    return jax.tree.map(add, tree)


def _mixing(fun: Callable, args: Any) -> tuple[str, ...]:
    """What mixes examples in the program of one."""
    try:
        _batch_norm.check(jax.make_jaxpr(fun)(*args).jaxpr)
    except _batch_norm.CentersOverOne:
        return (
            "The loss subtracts a mean over an axis of size one: batch normalization,"
            " say. It mixes the examples of a batch, which per-example gradients"
            " cannot, so it sees one example alone: other data than the model was made"
            " for, without a gradient where that is a single number. Use group or layer"
            " normalization, or statistics that are fixed.",
        )
    return ()
