"""One step: draw a batch, clip the gradient of each example, sum, add noise, update."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import clipped_grad, keys, mesh, modules, validate
from dpadambc.core import data as _data
from dpadambc.core.arrays import widen
from dpadambc.core.keys import folded_in
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.mesh import Layout
from dpadambc.core.per_example import Arguments
from dpadambc.core.sampling import Batch, padded
from dpadambc.engine import rounding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state of a run: *secret*, for its keys. See `releasable`.

    A pytree. The mechanism is a static part of it, so that a step of another mechanism
    refuses it: epsilon is of one mechanism.

    Attributes:
      step: the number of steps taken. shape=(), int32.
      params: the parameters.
      opt_state: the optimizer's state.
      noise: the key of the noise, a bound that moves, and the noise of earlier steps if
        later ones cancel it. Whoever has it can subtract all later noise.
      sampling_key: decides who takes part. It must stay secret, since amplification
        rests on it.
      loss_key: gives each example a key, if the loss is random.
      mechanism: the mechanism that draws the batches and sets the noise.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    noise: Any
    sampling_key: jax.Array
    loss_key: jax.Array
    mechanism: Mechanism = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Hides the arrays: a notebook that is shared must not show the keys."""
        return f"TrainState(step={self.step}, ...: secret)"


_OTHER = (
    "Expected a state of {!r}, got one of {!r}. Begin a run of its own by init; to go"
    " on with more iterations, give dataclasses.replace(state, mechanism=mechanism)."
)


class Seen(NamedTuple):
    """Sums over the examples of a step: *not private*.

    Attributes:
      loss: the sum of their losses.
      num_examples: how many took part.
    """

    loss: jax.Array
    num_examples: jax.Array


def takes_key(loss_fn: Callable[..., Any]) -> bool:
    """Returns whether a loss has a keyword-only parameter `key` without a value.

    `functools.partial(loss_fn, key=key)` gives it a value: such a loss is not random.
    """
    try:
        found = inspect.signature(loss_fn).parameters.get("key")
    except ValueError:  # it has no signature
        return False
    if found is None or found.kind is not inspect.Parameter.KEYWORD_ONLY:
        return False
    return found.default is None or found.default is inspect.Parameter.empty


def positional(loss_fn: Callable[..., Any], *, has_frozen: bool) -> Callable[..., Any]:
    """Returns the loss with its key, if any, as the last positional argument."""
    if getattr(loss_fn, "has_frozen", has_frozen) != has_frozen:
        raise ValueError(
            f"Expected a loss of with_rows with has_frozen={has_frozen}, as fit is"
            f" given frozen, got has_frozen={not has_frozen}. It would take one"
            " argument for another."
        )
    if not takes_key(loss_fn):
        return loss_fn
    return lambda *arguments: loss_fn(*arguments[:-1], key=arguments[-1])


@dataclasses.dataclass(frozen=True)
class Step:
    """One private step on sampled examples, for a loop of your own.

    `step(state, examples, is_padding_example, frozen=None)` returns the next
    `TrainState` and the sums over the examples, which are not private. It is a function
    of arrays: compile it, with `donate_argnums=0` to update in place.

    Guarantees:
      * The gradient of each example is clipped, and noise of the mechanism's level is
        added to every coordinate of the sum before the optimizer sees it. Parameters
        and the optimizer's state are functions of noised gradients alone.
      * The state comes from `init`, with its keys; no step uses a key of another.
      * Epsilon is `mechanism.epsilon(delta, iterations=int(state.step))` if each batch
        was drawn as the mechanism says, by `draw_batch` for example, and no state was
        used twice.
      * Under `jax.vmap` over states, each from its own key, every row is a separate
        run. k runs of T steps cost `accounting.compose(k * [(mechanism, T)])`.

    Args:
      loss_fn: the loss of one example; see `fit`.
      mechanism: the public numbers.
      optimizer: any Optax transformation of the private gradient, such as
        `optax.adam(1e-3)` or `dpadambc.adam_bc(1e-3, mechanism)`.
      microbatch_size: how many examples are in memory at once; all by default.
      skip_padding: see `clipped_grad`; `fit` sets it where the run has one device.
      precision: the precision of products in the clip; see `clip_per_example`.
      layout: the layout of arrays on several devices; `fit` sets it.
      wrt: which variables of modules of Flax NNX are trained; see `fit`.

    Raises:
      TypeError: if `mechanism` is no mechanism, a state is of another mechanism, or the
        mask or a gradient has the wrong dtype.
      ValueError: if a number is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> data = {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}
      >>> loss_fn = lambda w, example: (w @ example["x"] - example["y"]) ** 2
      >>> step = training.Step(loss_fn, mechanism, optax.sgd(0.1))
      >>> state = step.init(jnp.zeros(2), key=training.secret_key())
      >>> take_step = jax.jit(step, donate_argnums=0)
      >>> for _ in range(mechanism.iterations):
      ...     batch = training.draw_batch(mechanism, state, num_examples=8)
      ...     state, seen = take_step(
      ...         state, batch.gather(data), batch.is_padding_example)
      >>> int(state.step)
      4
    """

    loss_fn: Callable[..., jax.Array]
    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    microbatch_size: int | None = None
    skip_padding: bool = False
    precision: rounding.Precision = None
    layout: Layout = Layout()
    wrt: Any = None

    def __post_init__(self):
        validate.function(loss_fn=self.loss_fn)
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(
                "Expected mechanism to be a dpadambc mechanism that draws each batch"
                f" from a key, such as a PoissonGaussian, got {type(self.mechanism)}."
            )
        validate.transformation(optimizer=self.optimizer)
        validate.precision(self.precision)
        if self.microbatch_size is not None:
            validate.count(least=1, microbatch_size=self.microbatch_size)
            if self.microbatch_size % (shards := mesh.num_shards(self.layout)):
                raise ValueError(
                    f"Expected microbatch_size to be a multiple of the {shards} shards"
                    f" of a batch, got {self.microbatch_size}."
                )

    @property
    def expected_size(self) -> float | None:
        """The size of a batch behind which padding is skipped, or None."""
        return self.mechanism.normalize_by if self.skip_padding else None

    def init(self, params: optax.Params, *, key: jax.Array) -> TrainState:
        """Returns the state before the first step.

        Args:
          params: the parameters.
          key: a typed key, a new one for each run; secret. The keys of the noise, of
            the sampling and of the loss are made from it, and repeat nothing that was
            drawn with it elsewhere. The sampling key depends on the microbatch size,
            the layout, the precision and the platform too.

        Returns:
          A `TrainState`, with the optimizer's state in at least float32.
        """
        noise_key, run_key = jax.random.split(keys.of_domain(key, "fit"))
        sampling_key, loss_key = jax.random.split(run_key)
        # A run repeated with other rounding has new noise. It needs new batches too: on
        # one batch, the noises of several runs average out.
        known = self.microbatch_size, self.skip_padding, self.precision, self.layout
        platforms = enumerate(("cpu", "cuda", "rocm", "tpu"), start=1)
        numbers = {name: functools.partial(np.uint32, i) for i, name in platforms}
        platform = jax.lax.platform_dependent(**numbers, default=lambda: np.uint32(0))
        words = keys.words_of(repr(known)) + platform
        sampling_key = folded_in(sampling_key, words)
        modules.refuse_shared(params)
        # Copies: a step may donate the buffers of its state, and must not take others.
        params = jax.tree.map(jnp.array, params)
        trained, _ = modules.split(params, self.wrt)
        wide = jax.tree.map(lambda x: jnp.array(widen(x)), trained)
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.optimizer.init(wide),
            noise=self.mechanism.private_gradient(noise_key).init(trained),
            sampling_key=sampling_key,
            loss_key=loss_key,
            mechanism=self.mechanism,
        )

    def __call__(
        self,
        state: TrainState,
        examples: Any,
        is_padding_example: Any,
        frozen: Any = None,
    ) -> tuple[TrainState, Seen]:
        """Takes a step, and returns the state after it and sums over the examples."""
        if state.mechanism != self.mechanism:  # epsilon is of one
            raise TypeError(_OTHER.format(self.mechanism, state.mechanism))
        layout = self.layout
        kind = jax.random.key_impl(state.sampling_key)
        noise_key = jax.random.wrap_key_data(state.noise.key_data, impl=kind)
        private = self.mechanism.private_gradient(noise_key)

        # The arguments of the loss: parameters, frozen, examples, a key.
        params, examples = state.params, _data.arguments(examples)
        padding, shared = is_padding_example, () if frozen is None else (frozen,)
        if layout.axes:
            examples, padding = mesh.split((examples, padding), layout)
            params = mesh.constrained(params, layout, mesh.gathered_specs(layout))
        first, last = 1 + len(shared), 1 + len(shared) + len(examples)
        own_key, prng_argnum = (), None
        if takes_key(self.loss_fn):
            own_key = (jax.random.fold_in(state.loss_key, state.step),)
            prng_argnum = last
        parts = Arguments(0, tuple(range(first, last)), prng_argnum, self.wrt)

        # Gradients of examples, clipped and summed, a microbatch at a time.
        clipped = clipped_grad.values_and_sums(
            functools.partial(private.clip, precision=self.precision),
            positional(self.loss_fn, has_frozen=frozen is not None),
            parts,
            has_aux=False,
            microbatch_size=self.microbatch_size,
            expected_size=self.expected_size,
        )
        arguments = (state.noise, params, *shared, *examples, *own_key)
        losses, sums = clipped(*arguments, is_padding_example=padding)
        gradient = mesh.constrained(sums.gradient, layout, layout.trained)

        # Noise on the sum. The rest is post-processing.
        sums = sums._replace(gradient=gradient)
        trained, rest = modules.split(state.params, self.wrt)
        noised, noise = private.add_noise(sums, state.noise, trained)
        update = self.optimizer.update
        updates, opt_state = update(noised, state.opt_state, trained)
        after = dataclasses.replace(
            state,
            step=state.step + 1,
            params=modules.merge(optax.apply_updates(trained, updates), rest),
            opt_state=opt_state,
            noise=noise,
        )
        present = ~is_padding_example
        seen = Seen(loss=jnp.sum(losses, where=present), num_examples=jnp.sum(present))
        return mesh.constrained(after, layout, mesh.state_specs(after, layout)), seen


def draw_batch(mechanism: Any, state: TrainState, num_examples: int) -> Batch:
    """Draws the batch of the next step, as a function of the state alone.

    Where a mechanism draws steps independently, the key of each has a checksum of the
    parameters, as the key of the noise has one of the sum. So two runs with one key
    draw different batches once their parameters differ. Parameters are functions of
    earlier releases, so for every data set the batches have the same distribution.

    Args:
      mechanism: the mechanism, which samples from a key.
      state: the state before the step.
      num_examples: the size of the data set.

    Returns:
      A `Batch`. If parameters are on a mesh with axes of type Explicit, its devices
      divide the size of a batch with padding.

    Raises:
      TypeError: if the state is of another mechanism.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> step = training.Step(lambda w, x: w @ x, mechanism, optax.sgd(0.1))
      >>> state = step.init(jnp.zeros(2), key=jax.random.key(0))
      >>> batch = training.draw_batch(mechanism, state, num_examples=8)
      >>> batch.gather(jnp.arange(10, 90, 10)).shape  # with padding
      (8,)
    """
    if state.mechanism != mechanism:  # epsilon is of one
        raise TypeError(_OTHER.format(mechanism, state.mechanism))
    key = state.sampling_key
    if mechanism.draws_steps_alone:
        key = folded_in(key, keys.checksum(state.params))
    batch = mechanism.sample_step(key, state.step, num_examples=num_examples)
    if mechanism.pads_batches:
        batch = padded(batch, mesh.num_explicit_devices(state.params))
    return batch
