"""What is wrong with a run can mostly be told before its first step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax

from dpadambc.core import data as _data
from dpadambc.core import fingerprint, validate
from dpadambc.core.arrays import widen
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import AddDPNoiseState
from dpadambc.core.per_example import check_floating, scalar_loss
from dpadambc.core.step import Step
from dpadambc.training import _nodes, users
from dpadambc.transforms.dtypes import wide_zeros_like


def mechanism_of(mechanism: Any, num_examples: int) -> None:
    """Raises unless it is a mechanism that draws batches of this data."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected a mechanism that draws each batch from a key, such as a"
            f" PoissonGaussian, got {mechanism!r}."
        )
    draw = functools.partial(mechanism.sample_step, num_examples=num_examples)
    jax.eval_shape(draw, jax.random.key(0), 0)


def optimizer_of(optimizer: Any, params: optax.Params) -> list[jex.ClosedJaxpr]:
    """Its two programs; raises unless it is of the private gradient."""
    validate.transformation(optimizer=optimizer)
    if not jax.tree.leaves(params):
        raise ValueError("Expected parameters to train, got a tree without arrays.")
    check_floating(params)
    params = _shapes(params)
    optimizer = optax.GradientTransformation(
        _noted(optimizer.init, "init(params)"),
        _noted(optimizer.update, "update(private_gradient, state, params)"),
    )
    wide = jax.tree.map(widen, params)
    init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(wide)
    is_noise = lambda node: isinstance(node, AddDPNoiseState)
    if any(map(is_noise, jax.tree.leaves(state, is_leaf=is_noise))):
        raise ValueError(
            "Expected an optimizer of the private gradient, got one that adds noise of"
            " its own: fit clips and adds the noise itself, at the mechanism's level."
            " Instead of dp_sgd, dp_adam or dp_adam_bc pass optax.sgd(1e-3),"
            " optax.adam(1e-3) or dpadambc.adam_bc(1e-3, mechanism.noise_stddev)."
            " dp2_rmsprop divides gradients before they are clipped, for which it needs"
            " a loop of your own."
        )
    try:
        gradient = jax.eval_shape(wide_zeros_like, params)
        update = jax.make_jaxpr(optimizer.update)(gradient, state, params)
    except TypeError as error:
        if "keyword-only argument" not in str(error):
            raise
        raise TypeError(
            "Expected an optimizer of the private gradient and the parameters alone:"
            f" {error}. Losses are not private, and fit gives it none."
        ) from error
    _refuse_other_shapes(update, params)
    return [init, update]


def _refuse_other_shapes(update: jex.ClosedJaxpr, params: optax.Params) -> None:
    """Raises for updates that would be broadcast to the parameters."""
    expected = [x.shape for x in jax.tree.leaves(params)]
    found = [x.shape for x in update.out_avals[: len(expected)]]
    if found != expected:
        pairs = zip(expected, found, strict=False)
        apart = next((p for p in pairs if p[0] != p[1]), (expected, found))
        raise ValueError(
            "Expected an optimizer whose updates have the shapes of the parameters,"
            f" such as {apart[0]}, got {apart[1]}. One that takes the gradients of"
            " single examples, such as optax.contrib.dpsgd, sums over their first axis:"
            " fit clips and sums them itself."
        )


def _noted(fun: Callable[..., Any], call: str) -> Callable[..., Any]:
    """The function, whose errors say how it was called."""

    def called(*args):
        try:
            return fun(*args)
        except Exception as error:
            error.add_note(
                f"dpadambc called optimizer.{call}, and with nothing else. An optimizer"
                " that needs more, such as the loss, or parameters in a container of"
                " its own, is for a loop of your own, behind dpadambc.privatize."
            )
            raise

    return called


def _shapes(tree: Any) -> Any:
    """The same tree without its arrays, and without the devices that they are on."""
    of_one = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    return jax.tree.map(of_one, tree)


def loss_of(
    step: Step, params: optax.Params, frozen: Any, data: Any
) -> jex.ClosedJaxpr:
    """The program of a loss; raises where it shows that it is not of one example."""
    users._check_arguments(step.loss_fn, frozen is not None, step.uses_key)
    shared = (frozen,) if step.has_frozen else ()
    key = (jax.random.key(0),) if step.uses_key else ()
    arguments = _shapes((params, *shared, *_data.one_example(data), *key))
    of_one = scalar_loss(step.loss_fn, has_aux=False)
    traced = jax.make_jaxpr(of_one)(*arguments)
    _nodes.check(traced, data, step.mechanism)
    return traced


def programs_of(
    step: Step, params: optax.Params, frozen: Any, data: Any, *, is_saved: bool
) -> list[jex.ClosedJaxpr]:
    """What a run computes besides its clip and its noise; raises as the above do.

    Where it is saved, the programs must show all that they compute.
    """
    programs = [
        *optimizer_of(step.optimizer, params),
        loss_of(step, params, frozen, data),
    ]
    levels = step.mechanism.noise_multiplier
    if callable(levels):
        programs.append(jax.make_jaxpr(levels)(jnp.zeros([], int)))
    for program in programs if is_saved else ():
        fingerprint.refuse_callbacks(program.jaxpr)
    return programs
