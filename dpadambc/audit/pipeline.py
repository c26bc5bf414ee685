"""A step of training, its first state, its data, and the mechanism that it claims."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import neighbors
from dpadambc.core import data as data_
from dpadambc.core import leaves, modules
from dpadambc.core.clipped_sum import materialize
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.per_example import per_example_grad
from dpadambc.core.privatize import privatize
from dpadambc.core.step import Step, positional, takes_key
from dpadambc.engine import rounding
from dpadambc.mechanisms.checks import check_independent_noise

_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A step of training, its first state, and the mechanism that it claims.

    `of_fit` makes one from the arguments of `training.fit`, `of_chain` one from a loss
    and a chain that begins with `privatize`. Describe any other step by its functions.
    A check without its function is *not tested*.

    Args:
      mechanism: the mechanism whose epsilon is claimed.
      init: a function of a key that returns the state before the first step.
      step: a function of `(state, *batch, is_padding_example=None)` that returns the
        next state: everything that is kept or released. A function of JAX; its
        randomness comes from keys in the state. Without an argument for the mask,
        examples are replaced only.
      batch: a tuple of pytrees of arrays, a few examples along axis 0.
      per_example: a function of `(params, *batch)` that returns values of each example,
        such as losses, with the examples along axis 0; for `isolation`.
      params: the first argument of `per_example`.
      gradients_by: a function of `(method, params, *batch)` that returns the gradients
        of `per_example_grad` with this method; for `factored`.
      make_optimizer: a function of a key that returns the optimizer; for `correction`.
      loader: a function of a seed that returns batches of indices, as many as
        `mechanism.iterations`; for `sampling`.
      num_examples: the size of the data set of `loader`.
      precision: the precision of products in the step's clip; see `clip_per_example`.

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
    batch: neighbors.Batch = dataclasses.field(repr=False)  # may be people's
    per_example: Callable[..., Any] | None = None
    params: Any = None
    gradients_by: Callable[..., Any] | None = None
    make_optimizer: Callable[[jax.Array], optax.GradientTransformation] | None = None
    loader: Callable[[int], Iterable[Any]] | None = None
    num_examples: int | None = None
    precision: rounding.Precision = None

    def __post_init__(self):
        check_independent_noise(self.mechanism)
        neighbors.num_examples(self.batch)

    @property
    def takes_mask(self) -> bool:
        """Whether the step takes a padding mask."""
        found = inspect.signature(self.step).parameters
        kinds = {parameter.kind for parameter in found.values()}
        return "is_padding_example" in found or inspect.Parameter.VAR_KEYWORD in kinds

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
        precision: rounding.Precision = None,
        wrt: Any = None,
    ) -> "Pipeline":
        """Makes the pipeline of the step that `training.fit` takes.

        Args:
          loss_fn: as for `fit`.
          params: as for `fit`.
          data: as for `fit`; a source gives its first examples.
          mechanism: as for `fit`.
          optimizer: as for `fit`.
          frozen: as for `fit`.
          microbatch_size: as for `Step`.
          precision: as for `fit`.
          wrt: as for `fit`.

        Returns:
          A `Pipeline`.
        """
        # Padding is skipped, as on one device.
        chosen: dict[str, Any] = dict(skip_padding=True, precision=precision, wrt=wrt)
        own = Step(loss_fn, mechanism, optimizer, microbatch_size, **chosen)

        def step(state, *batch, is_padding_example=None):
            return own(state, batch, _mask(batch, is_padding_example), frozen)[0]

        def loader(seed):
            return mechanism.batches(jax.random.key(seed), num_examples=num_examples)

        chain = lambda key: optax.chain(privatize(mechanism, key=key), optimizer)
        data = leaves.with_dictionaries(data)
        num_examples = data_.num_examples(data)
        trained, rest = modules.split(params, wrt)
        shared = () if frozen is None else (frozen,)
        keys = (jax.random.key(0),) if takes_key(loss_fn) else ()
        loss_fn = positional(loss_fn, has_frozen=frozen is not None)
        return cls(
            mechanism=mechanism,
            init=lambda key: own.init(params, key=key),
            step=step,
            params=trained,
            make_optimizer=chain,
            loader=loader,
            num_examples=num_examples,
            precision=precision,
            **_of_examples(_of_trained(loss_fn, rest), data, shared, keys),
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
        """Makes a pipeline of a chain: `privatize`, `dp_adam_bc`, or your own.

        Args:
          loss_fn: the loss of one example, of `(params, *example)`.
          params: the parameters before the first step.
          data: a tuple of the arguments of an example, with examples along axis 0.
          mechanism: the mechanism whose epsilon is claimed.
          make_optimizer: a function of a key that returns the chain, which takes
            gradients of `per_example_grad`.
          loader: a function of a seed that returns batches of indices, as your loop
            draws them in a whole run. Without it `sampling` is not tested: a chain does
            not show them.

        Returns:
          A `Pipeline`.
        """
        params, rest = modules.split(params)
        grad_fn = per_example_grad(_of_trained(loss_fn, rest))

        init = lambda key: (key, params, make_optimizer(key).init(params))

        def step(state, *batch, is_padding_example=None):
            key, params, opt_state = state
            mask = _mask(batch, is_padding_example)
            grads = grad_fn(params, *batch, is_padding_example=mask)
            optimizer = make_optimizer(key)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return key, optax.apply_updates(params, updates), opt_state

        return cls(
            mechanism=mechanism,
            init=init,
            step=step,
            params=params,
            make_optimizer=make_optimizer,
            loader=loader,
            num_examples=data_.num_examples(data),
            **_of_examples(_of_trained(loss_fn, rest), data),
        )


def _mask(batch: Any, is_padding_example: Any) -> Any:
    size = jax.tree.leaves(batch)[0].shape[0]
    return jnp.zeros(size, bool) if is_padding_example is None else is_padding_example


def _of_trained(loss_fn: Callable[..., Any], rest: Any) -> Callable[..., Any]:
    """Returns the loss as a function of the trained parameters."""
    return lambda params, *others: loss_fn(modules.merge(params, rest), *others)


def _of_examples(
    loss_fn: Callable[..., Any], data: Any, shared: Any = (), keys: Any = ()
) -> dict[str, Any]:
    """Returns the first examples as arguments, and a loss's values and gradients."""
    rows = range(min(_BATCH_SIZE, data_.num_examples(data)))
    if data_.is_source(data):
        examples = [data_.arguments(data[i]) for i in rows]
        batch = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *examples)
    else:
        first = jax.tree.map(lambda x: jnp.asarray(x[: rows.stop]), data)
        batch = data_.arguments(first)
    start = 1 + len(shared)

    def value_and_grad(method, params, *batch):
        fun = per_example_grad(
            loss_fn,
            return_values=True,
            batch_argnums=tuple(range(start, start + len(batch))),
            prng_argnum=start + len(batch) if keys else None,
            method=method,
        )
        return fun(params, *shared, *batch, *keys)

    @jax.jit
    def per_example(params, *batch):
        values, grads = value_and_grad("factored", params, *batch)
        return values, materialize(grads)

    gradients_by = lambda method, *args: value_and_grad(method, *args)[1]
    return dict(batch=batch, per_example=per_example, gradients_by=gradients_by)
