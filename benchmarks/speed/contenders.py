"""Ways to the mean gradient of a batch, clipped for each example, without noise."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpadambc
from benchmarks.speed.models import Problem

L2_CLIP_NORM = 1.0
BASELINE = "non-private"
MICROBATCH_SIZES = (8, 4, 2)

Grad = Callable[..., Any]  # of (params, *frozen, *batch)


def non_private(problem: Problem) -> Grad:
    """The gradient of the batch's mean loss, not clipped."""
    return jax.grad(problem.batch_loss)


def private(problem: Problem, microbatch_size: int | None = None) -> Grad:
    """The gradient of this library, as arrays, which the others return."""
    grad_fn = dpadambc.clipped_grad(
        problem.loss_fn,
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=problem.batch_size,
        batch_argnums=problem.batch_argnums,
        microbatch_size=microbatch_size,
    )
    return lambda *args: dpadambc.materialize(grad_fn(*args))


def planned_microbatch_size(problem: Problem, memory_limit: float) -> int | None:
    """The size of microbatches that this library's plan chooses; None for no parts.

    It raises ValueError where nothing fits into so many bytes.
    """
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    explain: Callable[..., Any] = dpadambc.explain
    explanation = explain(
        problem.loss_fn,
        problem.params,
        *jax.tree.map(shape, problem.batch),
        batch_size=problem.batch_size,
        memory_limit=int(memory_limit),
    )
    return explanation.microbatch_size


def _per_example_grad(problem: Problem) -> Grad:
    in_axes = (None,) * problem.batch_argnums[0] + (0,) * len(problem.batch)
    return jax.vmap(jax.grad(problem.loss_fn), in_axes)


def vmapped(problem: Problem) -> Grad:
    """The gradients of all examples, clipped and summed as one first writes it."""

    def grad_fn(params, *batch):
        grads = _per_example_grad(problem)(params, *batch)
        norms = jax.vmap(optax.tree.norm)(grads)
        weights = jnp.minimum(1, L2_CLIP_NORM / norms) / problem.batch_size
        return jax.tree.map(lambda g: jnp.tensordot(weights, g, axes=1), grads)

    return grad_fn


def optax_clip(problem: Problem) -> Grad:
    """The clip of `optax.contrib.differentially_private_aggregate`.

    The aggregate itself would draw its noise even where the multiplier is zero.
    """

    def grad_fn(params, *batch):
        grads, tree = jax.tree.flatten(_per_example_grad(problem)(params, *batch))
        clipped, _ = optax.per_example_global_norm_clip(grads, L2_CLIP_NORM)
        means = jax.tree.map(lambda g: g / problem.batch_size, clipped)
        return tree.unflatten(means)

    return grad_fn


def jax_privacy(problem: Problem, microbatch_size: int | None = None) -> Grad:
    """JAX-Privacy's `clipped_grad`, of the loss of one example."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        problem.loss_fn,
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=problem.batch_size,
        batch_argnums=problem.batch_argnums,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )


Contenders = Mapping[str, Callable[[Problem], Grad]]

CONTENDERS: Contenders = {
    BASELINE: non_private,
    "dpadambc": private,
    "vmap": vmapped,
    "optax": optax_clip,
    "jax_privacy": jax_privacy,
}

MICROBATCHED: Contenders = {
    f"dpadambc, microbatches of {size}": functools.partial(
        private, microbatch_size=size
    )
    for size in MICROBATCH_SIZES
}

ALL: Contenders = {**CONTENDERS, **MICROBATCHED}


def build(problem: Problem) -> tuple[dict[str, Grad], dict[str, str]]:
    """All gradient functions, and why any contender is left out."""
    grad_fns, left_out = {}, {}
    for name, make in (ALL if problem.microbatched else CONTENDERS).items():
        try:
            grad_fns[name] = make(problem)
        except ImportError as error:
            left_out[name] = str(error)
    return grad_fns, left_out
