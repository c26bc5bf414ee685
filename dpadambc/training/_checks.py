"""What is wrong with a run can mostly be told before its first step."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax

from dpadambc._core import jaxprs, precision, validate
from dpadambc.clipping import explanation
from dpadambc.gradients import _batched
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _correction, _data, _nodes, users
from dpadambc.training.step import Seen, Step
from dpadambc.transforms.noise import AddDPNoiseState

_LEAST_EXPECTED = 0.5  # examples in a step
_LEAST_EXAMPLES = 100  # a toy has fewer
_MOST_APART = 4  # of the size of a batch and what its sum is divided by


def mechanism_of(mechanism: Any, num_examples: int) -> None:
    """Raises unless it is a mechanism that draws batches of this data."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected a mechanism that draws each batch from a key, such as a"
            f" PoissonGaussian, got {mechanism!r}."
        )
    draw = functools.partial(mechanism.sample_step, num_examples=num_examples)
    jax.eval_shape(draw, jax.random.key(0), 0)
    if hasattr(mechanism, "sampling_prob") and num_examples >= _LEAST_EXAMPLES:
        _warn_of_other_data(mechanism, num_examples, stacklevel=4)  # of the call of fit


def _warn_of_other_data(mechanism: Any, num_examples: int, *, stacklevel: int) -> None:
    """Where the numbers of a mechanism are those of more examples, or of fewer."""
    sampling_prob, divisor = mechanism.sampling_prob, mechanism.normalize_by
    # Parts of the data may take turns, and a batch may be cut.
    drawn = sampling_prob * num_examples / getattr(mechanism, "parts", 1)
    expected = min(drawn, getattr(mechanism, "truncated_batch_size", drawn))
    is_a_mean = divisor != 1  # else Adam makes up for the sum
    if expected < _LEAST_EXPECTED:
        warnings.warn(
            "Expected an example in most steps, got"
            f" sampling_prob={sampling_prob:.3g} of {num_examples} examples:"
            f" {expected:.2g} in a step, and noise in all. Is the mechanism for data of"
            " another size?",
            stacklevel=stacklevel + 1,
        )
    elif is_a_mean and not 1 / _MOST_APART <= expected / divisor <= _MOST_APART:
        warnings.warn(
            "Expected normalize_by to be about the number of examples in a step, got"
            f" normalize_by={divisor:g} where {type(mechanism).__name__} draws"
            f" {expected:.3g} of {num_examples}. Epsilon holds, and the"
            " optimizer sees no mean. Is the mechanism for data of another size?",
            stacklevel=stacklevel + 1,
        )


def optimizer_of(
    optimizer: Any, params: optax.Params, mechanism: Mechanism
) -> jex.ClosedJaxpr:
    """The program of an update; raises unless it is of the private gradient."""
    validate.of_private_gradient(optimizer)
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


def loss_of(
    step: Step, params: optax.Params, frozen: Any, data: Any
) -> jex.ClosedJaxpr:
    """The program of a loss; raises or warns where it shows that it is not of one.

    That is, not of one example alone.
    """
    users._check_arguments(step.loss_fn, frozen is not None, step.uses_key)
    example = _data.one_example(data)
    shared = (frozen,) if step.has_frozen else ()
    key = (jax.random.key(0),) if step.uses_key else ()
    arguments = _shapes((params, *shared, *example, *key))
    first = 1 + len(shared)
    of_one = _batched.scalar_loss(step.loss_fn, has_aux=False)
    traced = jax.make_jaxpr(of_one)(*arguments)
    _nodes.check(traced, params, shared, data, step.mechanism)
    _warn_of_frozen_keys(traced, params, shared)
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


def _warn_of_frozen_keys(
    traced: jex.ClosedJaxpr, params: optax.Params, shared: tuple[Any, ...]
) -> None:
    """Where all examples of all steps have the same random numbers, as of a dropout."""
    used = jaxprs.used_inputs(traced)[len(jax.tree.leaves(params)) :]
    named = jax.tree_util.tree_leaves_with_path(shared)
    for is_used, (path, leaf) in zip(used, named, strict=False):
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        if is_key and is_used:
            warnings.warn(
                "Expected a random loss to take its key last, with uses_key=True, got a"
                f" key at frozen{jax.tree_util.keystr(path[1:])}: by itself it gives"
                " all examples the same random numbers in all steps, such as one mask"
                " of dropout. To an nnx.Dropout give rngs=key where it is called. What"
                " shall be the same for all, draw before.",
                stacklevel=5,  # of the call of fit
            )
            return


# Some examples may be broken; of so many the loss or the data are.
_MOST_NAN = 0.01
_MOST_NAN_AT_THE_END = 0.5  # the last batch may be small


def _share_of_nan(seen: Seen, most: float) -> str | None:
    """Of how many examples the loss is NaN, where they are too many."""
    num_examples, num_nan = int(seen.num_examples), int(seen.num_nan)
    if num_nan <= most * num_examples:
        return None
    if num_nan == num_examples:
        return "every example"
    return f"{num_nan} of {num_examples} examples"


@dataclasses.dataclass
class Watch:
    """Looks at the first steps that have examples, and at the last ones.

    They show what was not in the program. The warnings are *not private*: they are for
    whoever may see the data.
    """

    warn: Callable[..., Any] = warnings.warn
    last: Seen | None = None
    is_done: bool = False
    is_told_of_nan: bool = False

    def look(self, seen: Seen) -> None:
        """Warns where many losses are no numbers, or no example has a gradient."""
        self.last = seen
        if self.is_done:
            return
        seen = jax.device_get(seen)
        self.is_done = bool(seen.num_examples)
        if not self.is_done:
            return
        if how_many := _share_of_nan(seen, _MOST_NAN):
            self.is_told_of_nan = True
            self.warn(
                f"The loss of {how_many} of the first steps is NaN: nothing is"
                " learned from them, and epsilon is spent all the same. Where NaN is a"
                " missing value of the data, put a public number in its place, and say"
                " by one more column that it was missing.",
                stacklevel=5,  # of the call of fit
            )
        elif not seen.has_gradient:
            self.warn(
                "No example of the first steps has a gradient: the loss is constant (a"
                " contrastive one is, in a batch of one) or not finite. Noise alone"
                " moves the parameters, and epsilon is spent all the same.",
                stacklevel=5,  # of the call of fit
            )

    def look_back(self) -> None:
        """Warns where many losses are no numbers at the end, and were at first."""
        if self.last is None or self.is_told_of_nan:
            return
        if how_many := _share_of_nan(jax.device_get(self.last), _MOST_NAN_AT_THE_END):
            self.warn(
                f"The loss of {how_many} of the last steps is NaN, of fewer at first,"
                " and epsilon is spent all the same. Is the learning rate too large, or"
                " NaN?",
                stacklevel=4,  # of the call of fit
            )
