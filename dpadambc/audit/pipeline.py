"""Your own training, as far as an audit has to know it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import _arrays, _neighbors
from dpadambc.core import check
from dpadambc.core import data as _data
from dpadambc.core.batched import Method
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.step import Step, positional, takes_key
from dpadambc.gradients import per_example_value_and_grad

_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A step of training, its first state, and the mechanism that it claims.

    `of_fit` makes one from the arguments of `training.fit`, `of_chain` one from a loss
    and a chain that begins with `privatize`. Describe any other step by its functions.
    A check without its function is *not tested*.

    Args:
      mechanism: whose epsilon is claimed.
      init: of a key, returns the state before the first step.
      step: of `(state, *batch, is_padding_example=None)`, returns the next state: all
        that is kept or given out. A function of JAX; its randomness comes from keys in
        the state. Without an argument for the mask, examples are replaced only.
      batch: a tuple of pytrees of arrays, a few examples along axis 0.
      per_example: of `(params, *batch)`, returns what is computed of each example, such
        as losses, with the examples along axis 0; for `isolation`.
      params: the first argument of `per_example`.
      gradients_by: of `(method, params, *batch)`, returns what `per_example_grad` with
        this method does; for `factored`.
      make_optimizer: of a key, returns the optimizer; for `correction`.
      loader: of a seed, returns batches of indices, as many as `mechanism.iterations`;
        for `sampling`.
      num_examples: of the data set that `loader` takes from.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1,
      ...     iterations=100, normalize_by=6)
      >>> loss_fn = lambda w, x, y: (w @ x - y) ** 2
      >>> pipeline = audit.Pipeline.of_chain(
      ...     loss_fn, jnp.zeros(50), (jnp.ones((64, 50)), jnp.ones(64)), mechanism,
      ...     lambda key: dpadambc.dp_adam_bc(0.1, mechanism, key=key))
      >>> audit.state(pipeline).passed
      True
    """

    mechanism: Mechanism
    init: Callable[[jax.Array], Any]
    step: Callable[..., Any]
    batch: _neighbors.Batch = dataclasses.field(repr=False)  # may be people's
    per_example: Callable[..., Any] | None = None
    params: Any = None
    gradients_by: Callable[..., Any] | None = None
    make_optimizer: Callable[[jax.Array], optax.GradientTransformation] | None = None
    loader: Callable[[int], Iterable[Any]] | None = None
    num_examples: int | None = None

    def __post_init__(self):
        check.has_independent_noise(self.mechanism)
        _neighbors.num_examples(self.batch)

    @property
    def takes_mask(self) -> bool:
        """Whether the step is told what is padding."""
        found = inspect.signature(self.step).parameters.values()
        kinds = {parameter.kind for parameter in found}
        names = {parameter.name for parameter in found}
        return "is_padding_example" in names or inspect.Parameter.VAR_KEYWORD in kinds

    @classmethod
    def of_fit(
        cls,
        loss_fn: Callable[..., jax.Array],
        params: optax.Params,
        data: Any,
        mechanism: Mechanism,
        optimizer: optax.GradientTransformation,
        *,
        frozen: Any = None,
        microbatch_size: int | None = None,
    ) -> "Pipeline":
        """The step that `training.fit` takes with these arguments.

        Args:
          loss_fn: as for `fit`.
          params: as for `fit`.
          data: as for `fit`; a source gives its first examples.
          mechanism: as for `fit`.
          optimizer: as for `fit`.
          frozen: as for `fit`.
          microbatch_size: as for `Step`.

        Returns:
          A `Pipeline`.
        """
        own = Step(
            loss_fn,
            mechanism,
            optimizer,
            microbatch_size=microbatch_size,
            skip_padding=True,  # as on one device
        )

        def step(state, *batch, is_padding_example=None):
            mask = _mask(batch, is_padding_example)
            return own(state, batch, mask, frozen)[0]

        num_examples = _data.num_examples(data)
        shared = () if frozen is None else (frozen,)
        keys = (jax.random.key(0),) if takes_key(loss_fn) else ()
        loss_fn = positional(loss_fn, has_frozen=frozen is not None)
        return cls(
            mechanism=mechanism,
            init=functools.partial(_init, own, params),
            step=step,
            batch=_first(data, num_examples),
            per_example=_per_example(loss_fn, shared, keys),
            params=params,
            gradients_by=_gradients_by(loss_fn, shared, keys),
            make_optimizer=lambda key: _behind_noise(mechanism, optimizer, key),
            loader=lambda seed: _drawn(mechanism, seed, num_examples),
            num_examples=num_examples,
        )

    @classmethod
    def of_chain(
        cls,
        loss_fn: Callable[..., jax.Array],
        params: optax.Params,
        data: tuple[Any, ...],
        mechanism: Mechanism,
        make_optimizer: Callable[[jax.Array], optax.GradientTransformation],
        *,
        loader: Callable[[int], Iterable[Any]] | None = None,
    ) -> "Pipeline":
        """A chain of per-example gradients: `privatize`, `dp_adam_bc`, or your own.

        Args:
          loss_fn: the loss of one example, of `(params, *example)`.
          params: what is trained.
          data: a tuple of the arguments of an example, with examples along axis 0.
          mechanism: whose epsilon is claimed.
          make_optimizer: of a key, returns the chain, which takes gradients as
            `per_example_grad` makes them.
          loader: of a seed, returns batches of indices, as your loop draws them in a
            whole run.
            Without it `sampling` is not tested: a chain does not show them.

        Returns:
          A `Pipeline`.
        """
        num_examples = _data.num_examples(data)
        value_and_grad = per_example_value_and_grad(loss_fn)

        def init(key):
            return key, params, make_optimizer(key).init(params)

        def step(state, *batch, is_padding_example=None):
            key, params, opt_state = state
            mask = _mask(batch, is_padding_example)
            _, grads = value_and_grad(params, *batch, is_padding_example=mask)
            optimizer = make_optimizer(key)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return key, optax.apply_updates(params, updates), opt_state

        return cls(
            mechanism=mechanism,
            init=init,
            step=step,
            batch=_first(data, num_examples),
            per_example=_per_example(loss_fn, (), ()),
            params=params,
            gradients_by=_gradients_by(loss_fn, (), ()),
            make_optimizer=make_optimizer,
            loader=loader,
            num_examples=num_examples,
        )


def _init(step: Step, params: optax.Params, key: jax.Array) -> Any:
    return step.init(params, key=key)


def _mask(batch: Any, is_padding_example: Any) -> Any:
    size = jax.tree.leaves(batch)[0].shape[0]
    return jnp.zeros(size, bool) if is_padding_example is None else is_padding_example


def _first(data: Any, num_examples: int) -> _neighbors.Batch:
    """A few examples, as arguments of the loss."""
    rows = range(min(_BATCH_SIZE, num_examples))
    if not _data.is_source(data):
        first = jax.tree.map(lambda x: jnp.asarray(x[: rows.stop]), data)
        return _data.arguments(first)
    examples = [_data.arguments(data[i]) for i in rows]
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *examples)


def _value_and_grad(
    method: Method, loss_fn: Callable[..., Any], shared: Any, keys: Any
) -> Callable[..., Any]:
    """Losses and gradients of each example, of `(params, *batch)`."""

    def value_and_grad(params, *batch):
        first = 1 + len(shared)
        fun = per_example_value_and_grad(
            loss_fn,
            batch_argnums=tuple(range(first, first + len(batch))),
            prng_argnum=first + len(batch) if keys else None,
            method=method,
        )
        return fun(params, *shared, *batch, *keys)

    return value_and_grad


def _per_example(loss_fn: Callable[..., Any], shared: Any, keys: Any):
    """Losses and gradients of each example of a batch, as arrays."""
    value_and_grad = _value_and_grad("factored", loss_fn, shared, keys)

    @jax.jit
    def per_example(params, *batch):
        values, grads = value_and_grad(params, *batch)
        return values, _arrays.opened(grads)

    return per_example


def _gradients_by(loss_fn: Callable[..., Any], shared: Any, keys: Any):
    """Gradients of each example of a batch, by either method."""

    def gradients_by(method, params, *batch):
        return _value_and_grad(method, loss_fn, shared, keys)(params, *batch)[1]

    return gradients_by


def _behind_noise(
    mechanism: Mechanism, optimizer: optax.GradientTransformation, key: jax.Array
) -> optax.GradientTransformation:
    return optax.chain(mechanism.add_noise(key=key), optimizer)


def _drawn(mechanism: Mechanism, seed: int, num_examples: int) -> Iterable[Any]:
    """The batches that a mechanism draws from a key, or on the host if it cannot."""
    key = jax.random.key(seed)
    draw = jax.jit(
        lambda step: mechanism.sample_step(key, step, num_examples=num_examples)
    )
    try:
        jax.eval_shape(draw, 0)
    except TypeError:
        rng = np.random.default_rng(seed)
        return mechanism.batches(rng, num_examples=num_examples)
    return (draw(step) for step in range(mechanism.iterations))
