"""Compiled methods for a clipped gradient, and the one that fits into memory."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import optax

from dpadambc.clipping import memory
from dpadambc.core import modules
from dpadambc.core.clipped_grad import clipped_grad
from dpadambc.core.clipped_sum import close_sums, materialize
from dpadambc.core.per_example import Arguments
from dpadambc.engine import jaxprs, rounding
from dpadambc.engine.transform import Method


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method for the gradient, and its cost.

    Attributes:
      method: "ordinary", "factored" or "vmap".
      microbatch_size: how many examples are in memory at once.
      peak_bytes: the arguments, outputs and temporaries of the compiled program.
      temporary_bytes: the temporaries alone.
      product_flops: the operations of matrix products and convolutions.
    """

    method: str
    microbatch_size: int
    peak_bytes: int
    temporary_bytes: int
    product_flops: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The methods for the gradient of a batch, or a step, and the one that fits.

    Attributes:
      memory_limit: the limit in bytes.
      ordinary: the gradient of the mean loss, without privacy.
      factored: microbatches of falling size: the chosen one and its neighbors.
      vmap: all gradients at once, materialized.
    """

    memory_limit: float
    ordinary: Choice
    factored: tuple[Choice, ...]
    vmap: Choice

    @property
    def chosen(self) -> Choice | None:
        """The largest microbatch that fits, or None."""
        fitting = (c for c in self.factored if c.peak_bytes <= self.memory_limit)
        return next(fitting, None)

    @property
    def reason(self) -> str:
        """The reason for this microbatch."""
        limit, least = readable(self.memory_limit), self.factored[-1]
        if self.chosen is None:
            return (
                f"No microbatch fits into {limit}: one of {least.microbatch_size} takes"
                f" {readable(least.peak_bytes)}. Rematerialize (jax.checkpoint), cut"
                " the length of an example, train fewer parameters, or take a smaller"
                " batch."
            )
        size = self.chosen.microbatch_size
        if self.chosen is self.factored[0]:
            return f"microbatch_size={size}: the whole batch fits into {limit}."
        above = self.factored[self.factored.index(self.chosen) - 1]
        return (
            f"microbatch_size={size}: the largest that fits into {limit};"
            f" {above.microbatch_size} would take {readable(above.peak_bytes)}."
        )

    def __str__(self) -> str:
        header = "gradient", "microbatch", "peak", "of ordinary", "products"
        share = lambda x: f"{x.peak_bytes / self.ordinary.peak_bytes:.2f}"
        flops = lambda x: f"{x.product_flops / 1e9:.3g} GFLOP"
        rows = [
            (
                x.method,
                str(x.microbatch_size),
                readable(x.peak_bytes),
                share(x),
                flops(x),
            )
            for x in (self.ordinary, *self.factored, self.vmap)
        ]
        return "\n".join((*aligned([header, *rows], num_left=1), self.reason))


def planned(programs: "Programs", memory_limit: float) -> Plan:
    """Compiles microbatches around the largest that fits, and the other methods."""
    compiled = functools.cache(programs.factored)
    known = memory.measured_around(
        memory_limit,
        memory.sizes(programs.batch_size),
        lambda size: compiled(size).peak_bytes,
    )
    return Plan(
        memory_limit=memory_limit,
        ordinary=programs.ordinary(),
        factored=tuple(compiled(size) for size in sorted(known, reverse=True)),
        vmap=programs.vmap(),
    )


Grad = Callable[..., Any]  # (*args, is_padding_example=...)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a batch of shapes: a whole step, if there is an optimizer."""

    fun: Callable[..., Any]  # the loss of one example
    parts: Arguments
    has_aux: bool
    args: tuple[Any, ...]  # with a batch axis
    batch_size: int
    optimizer: optax.GradientTransformation | None
    precision: rounding.Precision

    def factored(self, microbatch_size: int) -> Choice:
        """Compiles the clipped gradient with microbatches of this size."""
        return self._choice("factored", microbatch_size, self._clipped(microbatch_size))

    def vmap(self) -> Choice:
        """Compiles the clipped gradient from all gradients at once."""
        clipped = self._clipped(self.batch_size, "vmap")
        return self._choice("vmap", self.batch_size, clipped)

    def ordinary(self) -> Choice:
        """Compiles the gradient of the mean loss, without privacy."""

        def ignoring(*args, is_padding_example):
            del is_padding_example
            args, rest = self.parts.split(args)
            loss = lambda *args: self._mean_loss(*modules.merge_arguments(args, rest))
            return jax.grad(loss, self.parts.argnums)(*args)

        return self._choice("ordinary", self.batch_size, ignoring)

    def _clipped(self, size: int, method: Method = "factored") -> Grad:
        grad = clipped_grad(
            self.fun,
            self.parts.argnums,
            self.has_aux,
            l2_clip_norm=1.0,
            normalize_by=self.batch_size,
            microbatch_size=size,
            batch_argnums=self.parts.batch_argnums,
            prng_argnum=self.parts.prng_argnum,
            method=method,
            precision=self.precision,
            wrt=self.parts.wrt,
        )
        return (lambda *args, **mask: grad(*args, **mask)[0]) if self.has_aux else grad

    def _mean_loss(self, *args: Any) -> jax.Array:
        def loss(*args):
            output = self.fun(*self.parts.with_own_key(args))
            return output[0] if self.has_aux else output

        return jax.vmap(loss, self.parts.in_axes(args))(*args).mean()

    def _choice(self, method: str, size: int, grad: Grad) -> Choice:
        fun, args, donated = self._program(grad)
        traced = jax.jit(fun, donate_argnums=donated).trace(*args)
        compiled = traced.lower().compile()
        return Choice(
            method,
            size,
            peak_bytes=memory.peak_bytes(compiled),
            temporary_bytes=memory.of_program(compiled).temp_size_in_bytes,
            product_flops=flops_of_products(traced.jaxpr.jaxpr),
        )

    def _program(self, grad: Grad) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
        """Returns a function, its arguments, and the indices of those it may donate."""
        padding = jax.ShapeDtypeStruct((self.batch_size,), bool)
        optimizer = self.optimizer
        if optimizer is None:
            gradient = lambda padding, args: grad(*args, is_padding_example=padding)
            return gradient, (padding, self.args), ()
        trained, rest = self.parts.split(self.args)
        numbers, params = self.parts.differentiated, self.parts.params(trained)

        def step(params, state, padding, rest, others):
            args = list(others)
            parts = (params,) if isinstance(self.parts.argnums, int) else params
            for i, part in zip(numbers, parts, strict=True):
                args[i] = part
            args = modules.merge_arguments(args, rest)
            gradient = materialize(grad(*args, is_padding_example=padding))
            # The numbers are unknown, as a plan knows no mechanism.
            summed = close_sums(gradient, None, None, is_masked=True)
            updates, state = optimizer.update(summed, state, params)
            return optax.apply_updates(params, updates), state

        others = [None if i in numbers else x for i, x in enumerate(self.args)]
        state = jax.eval_shape(optimizer.init, params)
        return step, (params, state, padding, rest, others), (0, 1)


def flops_of_products(jaxpr: jex.Jaxpr) -> int:
    """Counts the multiplications and additions of products and convolutions.

    Products take nearly all the time of a gradient. It counts each step of a scan, the
    most expensive branch of a `cond`, and the body of a `while` once.
    """
    return sum(map(_flops, jaxpr.eqns))


def _flops(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(lhs[i] for i in contracted)
    if name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval
        of_one = kernel.size // max(kernel.shape[features], 1)
        return 2 * eqn.outvars[0].aval.size * of_one
    bodies = [flops_of_products(inner.jaxpr) for inner in jaxprs.inner(eqn)]
    if name == "cond":
        return max(bodies)
    return eqn.params["length"] * sum(bodies) if name == "scan" else sum(bodies)


def aligned(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Aligns columns to one width; the first `num_left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i < num_left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def readable(num_bytes: float) -> str:
    """Formats a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"
