"""What is wrong with a run can mostly be told before its first step."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc._core import precision
from dpadambc.clipping import explanation
from dpadambc.gradients import _batched
from dpadambc.graphs import _subgraphs
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _correction, _data
from dpadambc.training.step import Seen, Step
from dpadambc.transforms.noise import AddDPNoiseState


def mechanism_of(mechanism: Any, num_examples: int) -> None:
    """Raises unless it is a mechanism that draws batches of this data."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected a mechanism that draws each batch from a key, such as a"
            f" PoissonGaussian, got {mechanism!r}."
        )
    draw = functools.partial(mechanism.sample_step, num_examples=num_examples)
    jax.eval_shape(draw, jax.random.key(0), 0)


def optimizer_of(
    optimizer: Any, params: optax.Params, mechanism: Mechanism
) -> jex.ClosedJaxpr:
    """The program of an update; raises unless it is of the private gradient."""
    has = lambda name: callable(getattr(optimizer, name, None))
    if isinstance(optimizer, type) or not (has("init") and has("update")):
        raise TypeError(
            "Expected optimizer to be an Optax transformation of the private gradient,"
            " such as optax.adam(1e-3) or"
            " dpadambc.adam_bc(1e-3, mechanism.noise_stddev), got"
            f" {optimizer!r}."
        )
    if not jax.tree.leaves(params):
        raise ValueError("Expected parameters to train, got a tree without arrays.")
    _batched.check_parameters(params)
    params = _shapes(params)
    optimizer = optax.GradientTransformation(
        _noted(optimizer.init, "init(params)"),
        _noted(optimizer.update, "update(private_gradient, state, params)"),
    )
    state = jax.eval_shape(optimizer.init, jax.tree.map(precision.wide, params))
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
        program = _correction.check(optimizer, state, params, mechanism)
    except TypeError as error:
        if "keyword-only argument" not in str(error):
            raise
        raise TypeError(
            "Expected an optimizer of the private gradient and the parameters alone:"
            f" {error}. Losses are not private, and fit gives it none."
        ) from error
    _refuse_other_shapes(program, params)
    return program


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


def _refuse_nodes(gathers: bool, mechanism: Mechanism) -> None:
    """Raises for terms of a graph under the epsilon of one term."""
    if gathers and not hasattr(mechanism, "max_terms"):
        raise ValueError(
            "Expected a mechanism of nodes for a loss with graphs.gather, such as"
            " graphs.PoissonGaussian(max_terms=graphs.max_terms(max_memberships), ...),"
            f" got {type(mechanism).__name__}, whose epsilon is for one term of the"
            " sum: a node is in those of several roots. With max_terms=1 it is that of"
            " one term, for subgraphs that share no node. Features that are public need"
            " no graphs.gather: index them, features[members]."
        )


def _check_terms(
    traced: jex.ClosedJaxpr, num_shared: int, data: Any, mechanism: Mechanism
) -> None:
    """Raises where a node is in more terms than the mechanism accounts for."""
    leaves: list[Any] = [] if _data.is_source(data) else jax.tree.leaves(data)
    own = dict(enumerate(leaves, start=num_shared))
    allowed = getattr(mechanism, "max_terms", math.inf)
    for members in map(own.get, _subgraphs.members_of(traced.jaxpr)):
        if members is None or not _data.is_here(members):
            continue
        most = _subgraphs.most_terms(np.asarray(members))
        if most > allowed:
            raise ValueError(
                f"Expected each node in at most {allowed} terms, the max_terms of this"
                f" {type(mechanism).__name__}, got one in {most}: its epsilon would not"
                " hold. Give max_terms=graphs.max_terms(max_memberships), which counts"
                " the node's own term too. Features that are public need no"
                " graphs.gather: index them, features[members]."
            )


def _warn_of_gaps(gathers: bool, data: Any, mechanism: Mechanism) -> None:
    """Warns where -1 may have taken the last node of a graph for every gap."""
    max_terms = getattr(mechanism, "max_terms", None)
    if gathers or max_terms is None or _data.is_source(data):
        return
    has_gaps = lambda x: (
        jnp.ndim(x) > 1
        and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        and _data.is_here(x)
        and np.min(np.asarray(x), initial=0) < 0
    )
    if any(map(has_gaps, jax.tree.leaves(data))):
        warnings.warn(
            "Expected graphs.gather(features, members) in the loss, got members with"
            " -1 where there is none, and no gather. features[members] takes the last"
            " node for each -1, so that it is in the terms of all roots with a gap, and"
            f" not in the {max_terms} that its epsilon is for.",
            stacklevel=5,  # of the call of fit
        )


def loss_of(
    step: Step, params: optax.Params, frozen: Any, data: Any
) -> jex.ClosedJaxpr:
    """The program of a loss; raises or warns where it shows that it is not of one.

    That is, not of one example alone.
    """
    example = _data.one_example(data)
    shared = (frozen,) if step.has_frozen else ()
    key = (jax.random.key(0),) if step.uses_key else ()
    arguments = _shapes((params, *shared, *example, *key))
    first = 1 + len(shared)
    of_one = _batched.scalar_loss(step.loss_fn, has_aux=False)
    traced = jax.make_jaxpr(of_one)(*arguments)
    gathers = _subgraphs.gathers(traced.jaxpr)
    _refuse_nodes(gathers, step.mechanism)
    _warn_of_gaps(gathers, data, step.mechanism)
    num_shared = len(jax.tree.leaves((params, *shared)))
    _check_terms(traced, num_shared, data, step.mechanism)
    found = explanation.explain(
        step.loss_fn,
        *arguments,
        batch_size=1,
        batch_argnums=tuple(range(first, first + len(example))),
        prng_argnum=len(arguments) - 1 if key else None,
    )
    for sentence in (*found.without_gradient, *found.mixing):
        warnings.warn(sentence, stacklevel=4)  # of the call of fit
    return traced


@dataclasses.dataclass
class FirstBatch:
    """Looks at the first batch that is not empty, for what was not in the program."""

    warn: Callable[..., Any] = warnings.warn
    is_done: bool = False

    def look(self, seen: Seen) -> None:
        """Warns where no loss of the batch is a number, or no example has a gradient.

        The warning is *not private*: it is for whoever may see the data.
        """
        if self.is_done:
            return
        _, num_examples, num_nan, has_gradient = map(np.asarray, jax.device_get(seen))
        self.is_done = bool(num_examples)
        if not num_examples:
            return
        if num_nan == num_examples:
            self.warn(
                "The loss of every example of the first steps is NaN: nothing is"
                " learned from them, and epsilon is spent all the same.",
                stacklevel=3,
            )
        elif not has_gradient:
            self.warn(
                "No example of the first steps has a gradient: the loss is constant (a"
                " contrastive one is, in a batch of one) or not finite. Noise alone"
                " moves the parameters, and epsilon is spent all the same.",
                stacklevel=3,
            )
