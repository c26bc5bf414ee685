"""What may not be clipped per example: anything but gradients of single examples."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import leaves as _leaves
from dpadambc.core import seal, shard_map, validate


def refuse_misspelt_mask(extra_args: dict[str, Any]) -> None:
    """Raises for an extra argument whose name says that it is the padding mask."""
    for name in extra_args:
        if "padding" in name:
            raise TypeError(
                f"Expected the padding mask as is_padding_example, got {name}. Without"
                " the mask, padding would be summed as if it were data."
            )


def _refuse_array(name: str, leaf: Any, expected: tuple[int, ...]) -> None:
    """Raises for what is not, or no longer, gradients of single examples."""
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if shape[1:] != expected or not shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Expected {name} to hold one gradient per example, for parameters of"
            f" shape {expected}, got an array of shape {shape}, {dtype}. Gradients that"
            " are averaged over the batch cannot be clipped per example: make them"
            " with dpadambc.per_example_grad. Behind dpadambc.clipped_grad, which has"
            " clipped and summed already, chain dpadambc.add_dp_noise with an optimizer"
            " of the private gradient, such as dpadambc.adam_bc. optax.MultiSteps"
            " around a chain averages before the clip: to save memory give"
            " microbatch_size to dpadambc.clipped_grad or training.fit."
        )
    raise TypeError(
        f"Expected {name} as dpadambc.per_example_grad returns it, got an array of"
        f" shape {shape}, which may have been changed: put clip_per_example"
        " first, with nothing before it that could mix examples. Gradients per example"
        " of your own go through dpadambc.as_per_example."
    )


def _refuse_touched(name: str, leaf: _leaves.PerExampleGradient) -> None:
    """Raises where something has been between the gradient function and the clip."""
    if not seal.has_its_kind(leaf.seal):
        raise TypeError(
            f"Expected {name} as dpadambc.per_example_grad returned it, got one that"
            f" was changed since: its seal, of dtype {leaf.seal.dtype}, is broken. Put"
            " clip_per_example first, with nothing before it."
        )
    varying = set(shard_map.varying_axes(leaf.seal))
    summed = set(leaf.axes) & shard_map.all_axes() - varying
    if summed:
        raise ValueError(
            f"Expected {name} of the device's own examples, got one that combines"
            f" devices along {sorted(summed)}, as jax.lax.psum does. Put"
            " clip_per_example first, and sum what it returns over devices."
        )
    split = set(shard_map.varying_axes(leaf.sealed)) - varying
    if split:
        raise ValueError(
            f"Expected {name} whole on each device, got parameters that are split"
            f" along {sorted(split)} of a jax.shard_map: the norm of a part is not that"
            " of the gradient. Gather them before the gradient is taken, or leave it to"
            " jax.jit to split them, on a mesh with Auto or Explicit axes."
        )


def refuse_some_gradients(leaves: Sequence[_leaves.PerExampleGradient]) -> None:
    """Raises where gradients of other parameters were taken with these."""
    together = max(leaf.num_together for leaf in leaves)
    if together > len(leaves):
        raise ValueError(
            f"Expected the gradients of all {together} parameters that were"
            f" differentiated together, got {len(leaves)} of them: two parts that are"
            " clipped apart move by more than one clip norm. Clip all of them together,"
            " and divide them behind the noise, by optax.multi_transform; to train a"
            " part alone, differentiate that part (argnums), of an nnx module what"
            " nnx.split(model, nnx.Param, ...) gives: with wrt=, nnx.Optimizer leaves"
            " out gradients that were taken."
        )


def refuse_parts(params: optax.Params) -> None:
    """Raises where a part of the parameters is hidden."""
    if validate.sees_a_part(params):
        raise ValueError(
            "Expected all parameters that are trained, got a part of them, inside"
            " optax.masked or optax.multi_transform: the others would be released"
            " without noise, or the sensitivities of several parts add up to more than"
            " the mechanism accounts for. Privatize all of them first, as in"
            " optax.chain(dpadambc.privatize(...), optax.multi_transform(...)); to"
            " train a part alone, differentiate that part (argnums)."
        )


def leaves_of(
    gradients: optax.Updates, params: optax.Params | None
) -> list[_leaves.PerExampleGradient]:
    """The leaves; raises unless each is sealed, of its parameter, and as long."""
    if params is None:
        raise ValueError(
            "clip_per_example needs the parameters, to tell per-example gradients from"
            " averaged ones. Call update(gradients, state, params)."
        )
    parameters = dict(jax.tree_util.tree_leaves_with_path(params))
    paths = jax.tree_util.tree_leaves_with_path(
        gradients, is_leaf=_leaves.is_per_example
    )
    sizes: dict[int, str] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path) or "the gradient"
        if path not in parameters:
            raise ValueError(f"Expected gradients shaped like params, got {name} too.")
        expected = jnp.shape(parameters[path])
        if not _leaves.is_per_example(leaf):
            _refuse_array(name, leaf, expected)
        if leaf.shape != expected:
            raise ValueError(
                f"Expected {name} to hold gradients of shape {expected}, got"
                f" {leaf.shape}."
            )
        _refuse_touched(name, leaf)
        sizes.setdefault(leaf.batch_size, name)
    if len(sizes) > 1:
        listed = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(
            f"Expected all gradients to have the same batch size, but {listed}."
        )
    return [leaf for _, leaf in paths]
