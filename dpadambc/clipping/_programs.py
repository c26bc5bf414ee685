"""The programs whose memory a plan compares: ways to the gradient, or whole steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from dpadambc.core import batched as _batched
from dpadambc.core import clipped_sum
from dpadambc.core.clipped_grad import clipped_grad
from dpadambc.engine import flops, memory


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to the gradient, and what it takes.

    Attributes:
      method: "ordinary", "factored" or "vmap".
      microbatch_size: how many examples are in memory at once.
      peak_bytes: arguments, outputs and temporaries of the compiled program.
      product_flops: operations of matrix products and convolutions.
    """

    method: str
    microbatch_size: int
    peak_bytes: int
    product_flops: int


Grad = Callable[..., Any]  # of (*args), and of the padding as a keyword


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programs on a batch that has shapes only; a whole step, if with an optimizer."""

    fun: Callable[..., Any]  # the loss of one example
    parts: _batched.Arguments
    has_aux: bool
    args: tuple[Any, ...]  # with a batch axis
    batch_size: int
    optimizer: optax.GradientTransformation | None

    def factored(self, microbatch_size: int) -> Choice:
        """The clipped gradient, so many examples at a time."""
        return self._choice("factored", microbatch_size, self._clipped(microbatch_size))

    def vmap(self) -> Choice:
        """The clipped gradient from all gradients at once."""
        clipped = self._clipped(self.batch_size, "vmap")
        return self._choice("vmap", self.batch_size, clipped)

    def ordinary(self) -> Choice:
        """The gradient of the mean loss, without privacy."""
        grad = jax.grad(self._mean_loss, self.parts.argnums)
        ignoring = lambda *args, is_padding_example: grad(*args)
        return self._choice("ordinary", self.batch_size, ignoring)

    def _clipped(self, size: int, method: _batched.Method = "factored") -> Grad:
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
        )
        if not self.has_aux:
            return grad
        return lambda *args, **padding: grad(*args, **padding)[0]

    def _mean_loss(self, *args: Any) -> jax.Array:
        batched = self.parts.batched(args)

        def loss(*args):
            output = self.fun(*self.parts.with_own_key(args))
            return output[0] if self.has_aux else output

        in_axes = [0 if i in batched else None for i in range(len(args))]
        return jax.vmap(loss, in_axes)(*args).mean()

    def _choice(self, method: str, size: int, grad: Grad) -> Choice:
        fun, args, donated = self._program(grad)
        compiled = jax.jit(fun, donate_argnums=donated).lower(*args).compile()
        operations = flops.of_products(fun, *args)
        return Choice(method, size, memory.peak_bytes(compiled), operations)

    def _program(self, grad: Grad) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
        """A function, its arguments, and which of them it may write to."""
        padding = jax.ShapeDtypeStruct((self.batch_size,), bool)
        optimizer = self.optimizer
        if optimizer is None:
            gradient = lambda padding, args: grad(*args, is_padding_example=padding)
            return gradient, (padding, self.args), ()
        numbers = self.parts.differentiated
        several = tuple(self.args[i] for i in numbers)
        params = several[0] if isinstance(self.parts.argnums, int) else several

        def step(params, state, padding, others):
            args = list(others)
            parts = (params,) if isinstance(self.parts.argnums, int) else params
            for i, part in zip(numbers, parts, strict=True):
                args[i] = part
            gradient = clipped_sum.materialize(grad(*args, is_padding_example=padding))
            # Of no known numbers: the optimizer may have the noise of any mechanism.
            summed = clipped_sum.closed(gradient, None, None)
            updates, state = optimizer.update(summed, state, params)
            return optax.apply_updates(params, updates), state

        others = [None if i in numbers else x for i, x in enumerate(self.args)]
        state = jax.eval_shape(optimizer.init, params)
        return step, (params, state, padding, others), (0, 1)
