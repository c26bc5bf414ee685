"""The public numbers of a private run, as one frozen value.

Noise, correction, sampler and accountant all read it, so they cannot disagree. There is
one abstract class with two abstract methods, the event of its steps and the draw of a
batch. Everything derived from them is final, so no sampling method can weaken it. Only
`contrib` has other noise: it overrides `noise_stddev`, `add_noise` or
`private_gradient`, and vouches for its event.

No field is private. The size of the data set is private when an example may be added or
removed, so it is an argument; it is a field where privacy is stated for data sets of a
known size.
"""

import abc
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, cast, final

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import mesh, validate
from dpadambc.core.accounting import (
    PLD,
    RDP,
    Accountant,
    check_delta,
    gaussian,
    least_epsilon,
    levels_of,
)
from dpadambc.core.arrays import make_varying, varying_axes
from dpadambc.core.clip import (
    FLAT,
    ClipRule,
    NeighboringRelation,
    Sums,
    check_parameters,
    check_rule,
    clipped_sums,
)
from dpadambc.core.clipped_sum import close_sums, open_sums
from dpadambc.core.leaves import summary
from dpadambc.core.noise import add_dp_noise
from dpadambc.core.sampling import Batch, padded, poisson_batch

_ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = NeighboringRelation.REPLACE_ONE
_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


class PrivateGradient(NamedTuple):
    """The two halves of a private gradient, which share a state.

    Attributes:
      init: returns the state for the parameters.
      clip: computes the `clip.Sums` over the examples from per-example gradients, the
        state, the parameters, the padding mask and the `precision` of products. Those
        of microbatches add up.
      add_noise: returns the private gradient and the next state from these sums, the
        state and the parameters.
    """

    init: optax.TransformInitFn
    clip: Callable[..., Sums]
    add_noise: Callable[..., tuple[optax.Updates, Any]]


def scaled_multiplier(
    noise_multiplier: float | optax.Schedule, sensitivity: float
) -> float | optax.Schedule:
    """Scales a noise multiplier, or each value of a schedule, by the sensitivity."""
    if callable(noise_multiplier):
        return lambda step: jnp.asarray(noise_multiplier(step), float) * sensitivity
    return noise_multiplier * sensitivity


class Mechanism(abc.ABC):
    """A Gaussian mechanism on the clipped sum of every step: numbers and epsilon.

    Subclasses are frozen dataclasses with the fields annotated here, which define
    `_event` and `_draw`. `dpadambc.Mechanism` adds constructors.
    """

    l2_clip_norm: float  # C, the bound on one example's gradient norm
    noise_multiplier: float | optax.Schedule  # z, the noise over the sensitivity
    iterations: int  # T, the number of steps
    normalize_by: float  # B, the public number that the clipped sum is divided by
    neighboring_relation: NeighboringRelation
    clip_rule: ClipRule = FLAT  # it does not change epsilon

    # The relations that privacy can be stated for, each with the accountants that can
    # read the events, the tightest first.
    relations: ClassVar[Mapping[NeighboringRelation, tuple[Accountant, ...]]]
    # Whether a batch is independent of all others, so that each step can be drawn with
    # a key of its own. False unless a class sets it.
    draws_steps_alone: ClassVar[bool] = False
    # Whether the noise of a step is independent of the noise of every other step.
    has_independent_noise: ClassVar[bool] = True

    def __init_subclass__(cls):
        # A new `_draw` may depend on other steps, whatever that of its base class does.
        if "_draw" in vars(cls) and "draws_steps_alone" not in vars(cls):
            cls.draws_steps_alone = False

    def __post_init__(self):
        # Python numbers in place of arrays, which have no hash.
        for name in (x.name for x in dataclasses.fields(cast(Any, self)) if x.init):
            number = validate.python_number(**{name: getattr(self, name)})
            object.__setattr__(self, name, number)
        validate.positive(l2_clip_norm=self.l2_clip_norm)
        validate.positive(normalize_by=self.normalize_by)
        check_rule(self.clip_rule)
        if not callable(self.noise_multiplier):
            validate.non_negative(noise_multiplier=self.noise_multiplier)
        validate.count(least=1, iterations=self.iterations)
        if self.neighboring_relation not in self.relations:
            supported = " or ".join(map(str, self.relations))
            raise ValueError(
                f"Expected neighboring_relation {supported}, got"
                f" {self.neighboring_relation!r}."
            )

    @abc.abstractmethod
    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of `steps` steps at one noise level.

        Args:
          steps: the number of steps, at least one, from the first on.
          noise_multiplier: the noise of these steps over the sensitivity.
        """

    @abc.abstractmethod
    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        """Draws the batch of a step, on the device.

        Args:
          key: the key of the step where the mechanism `draws_steps_alone`, else of the
            run.
          step: counted from 0; it may be traced.
          num_examples: the size of the data set; static.
        """

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding, so that the clip needs its mask."""
        return True

    @property
    def terms_per_unit(self) -> int:
        """The number of clipped terms with one unit of privacy: one for an example."""
        return 1

    def _check_loss(self, loss: Any, example: Any) -> None:
        """Refuses a loss in which a unit may be in more terms than `terms_per_unit`.

        Here a unit is an example. `dpadambc.Mechanism` looks for nodes of a graph.

        Args:
          loss: its program.
          example: the arguments of one example, as shapes.
        """
        del loss, example

    @property
    def accounted_as(self) -> "Mechanism":
        """The mechanism with the same events whose fields are numbers alone."""
        if self.clip_rule == FLAT:
            return self
        return dataclasses.replace(cast(Any, self), clip_rule=FLAT)

    @property
    @final
    def known_size(self) -> int | None:
        """The size of the data set, where privacy is stated for one."""
        return getattr(self, "num_examples", None)

    @property
    @final
    def known_batch_size(self) -> int | None:
        """The largest batch that the epsilon is for, where it is for a given size."""
        return getattr(self, "batch_size", None)

    @property
    @final
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants of this relation's events, the tightest first."""
        return self.relations[self.neighboring_relation]

    @property
    @final
    def sensitivity(self) -> float:
        """The L2 sensitivity of the clipped sum after division by `normalize_by`.

        A term that is replaced moves the sum by 2 C, and a term that is removed by C.
        """
        goes = self.neighboring_relation != _REPLACE
        return (2 * self.terms_per_unit - goes) * self.l2_clip_norm / self.normalize_by

    @property
    def noise_stddev(self) -> float | optax.Schedule:
        """The standard deviation of the noise in the gradient that Adam sees.

        It is the noise multiplier times the sensitivity, a schedule if the multiplier
        is one.
        Give this value, or the mechanism, to `add_dp_noise` and to `scale_by_adam_bc`.
        """
        return scaled_multiplier(self.noise_multiplier, self.sensitivity)

    @property
    @final
    def noise_variance(self) -> float | optax.Schedule:
        """The square of `noise_stddev`: the papers' Φ."""
        stddev = self.noise_stddev
        return (lambda step: stddev(step) ** 2) if callable(stddev) else stddev**2

    @final
    def add_noise(self, *, key: jax.Array) -> optax.GradientTransformation:
        """Adds the noise of this mechanism to its clipped sum.

        Args:
          key: a typed key for the noise; a new one for each run.

        Returns:
          `add_dp_noise` of the mechanism, except where its noise is correlated. Each of
          them refuses a sum of other numbers, or without a mask where batches are
          padded.
        """
        noise = self._noise(key)

        def update_fn(updates, state, params=None, **extra_args):
            del extra_args
            open_sums(updates, params, self)
            return noise.update(updates, state, params)

        return optax.GradientTransformationExtraArgs(noise.init, update_fn)

    def _noise(self, key: jax.Array) -> optax.GradientTransformation:
        """Returns the transformation that draws and adds the noise."""
        return add_dp_noise(self, key=key)

    def private_gradient(self, key: jax.Array) -> PrivateGradient:
        """Clips at the bound of this mechanism, and adds its noise to the sum.

        Args:
          key: a typed key for the noise; a new one for each run.
        """
        numbers = self.l2_clip_norm, self.normalize_by
        rule, noise = self.clip_rule, self.add_noise(key=key)

        def init_fn(params):
            check_parameters(params, rule)
            return noise.init(params)

        def clip_fn(gradients, state, params, **extra_args):
            del state
            return clipped_sums(gradients, params, *numbers, rule, **extra_args)

        def noise_fn(sums, state, params=None):
            # `privatize` and `Step` check for the mask.
            closed = close_sums(sums.gradient, *numbers, is_masked=True)
            return noise.update(closed, state, params)

        return PrivateGradient(init_fn, clip_fn, noise_fn)

    @final
    def sample_step(
        self, run_key: jax.Array, step: int | jax.Array, *, num_examples: int
    ) -> Batch:
        """Returns the batch of a step of a run, inside `jax.jit` and `jax.lax.scan`.

        Args:
          run_key: a typed key, secret, and *the same for all steps* of one run.
          step: a step of the run, counted from 0; it may be traced. A Python or NumPy
            number is checked; a number on a device is not.
          num_examples: the size of the data set; static.

        Returns:
          A `Batch` of static size. If the key, or `jax.set_mesh`, has a mesh with
          Explicit axes, the number of its devices divides the size of a batch with
          padding.

        Raises:
          TypeError: if `run_key` is not a typed key.
          ValueError: if the mechanism is for another number of examples, the step is no
            whole number, or beyond its `iterations`, which its epsilon is for.

        Example:
          >>> import jax
          >>> import dpadambc
          >>> mechanism = dpadambc.RandomAllocationGaussian(
          ...     l2_clip_norm=1.0, noise_multiplier=1.0, batches_per_epoch=3,
          ...     iterations=3, normalize_by=2)
          >>> for step in range(3):
          ...     batch = mechanism.sample_step(jax.random.key(1), step, num_examples=6)
          ...     print(batch.indices)
          [ 2  3  4 -1 -1 -1]
          [ 0  1  5 -1 -1 -1]
          [-1 -1 -1 -1 -1 -1]
        """
        validate.typed_key(run_key=run_key)
        self._check_size(num_examples)
        is_on_device = isinstance(step, jax.Array)  # reading it would wait for it
        seen = step if is_on_device else np.asarray(step)
        is_number = seen.ndim == 0 and jnp.issubdtype(seen.dtype, jnp.integer)
        if not is_number or not (is_on_device or 0 <= step < self.iterations):
            raise ValueError(
                f"Expected step to be a whole number below {self.iterations}, got"
                f" {summary(step)}. To go on, make the mechanism with more iterations."
            )
        alone = self.draws_steps_alone
        key = jax.random.fold_in(run_key, step) if alone else run_key
        batch = self._draw(key, step, num_examples)
        if self.pads_batches:
            batch = padded(batch, mesh.num_explicit_devices(run_key))
        # The batch differs between devices where the key does, which a sort in JAX
        # loses.
        return make_varying(batch, varying_axes(run_key))

    @final
    def batches(self, key: jax.Array, *, num_examples: int) -> Iterator[Batch]:
        """Returns the batches of all steps as NumPy arrays: the draws of `sample_step`.

        Args:
          key: a typed key, secret, and a fresh one for each run.
          num_examples: the size of the data set.

        Yields:
          One `Batch` of static size for each iteration.

        Raises:
          TypeError: if `key` is not a typed key.
          ValueError: if the mechanism is for another number of examples.
        """
        validate.typed_key(key=key)
        self._check_size(num_examples)
        drawn = (_batch(self, key, t, num_examples) for t in range(self.iterations))
        return map(jax.device_get, drawn)

    def _check_size(self, num_examples: int) -> None:
        validate.count(num_examples=num_examples)
        if self.known_size not in (None, num_examples):
            raise ValueError(
                f"Expected num_examples={self.known_size}, which the epsilon of the"
                f" mechanism is for, got {num_examples}."
            )

    @final
    def dp_event(self, iterations: int | None = None) -> dp_accounting.DpEvent:
        """Returns the run as a dp-accounting event.

        The noise multiplier of a Gaussian is in units of the clip norm, as the
        accountants of `accounting` and dp-accounting's PLD accountant read it. Under
        REPLACE_ONE, dp-accounting's RDP accountant reads it in units of the
        sensitivity, and would state too small an epsilon: use `accounting.RDP`.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.

        Returns:
          A `dp_accounting.DpEvent`.
        """
        iterations = self.iterations if iterations is None else iterations
        validate.count(iterations=iterations)
        if iterations == 0:
            return dp_accounting.NoOpDpEvent()
        levels = levels_of(self.noise_multiplier, int(iterations)).items()
        events = [self._event(n, z) for z, n in levels]
        return dp_accounting.ComposedDpEvent(events) if events[1:] else events[0]

    @final
    def epsilon(
        self,
        target_delta: float,
        *,
        iterations: int | None = None,
        accountant: Accountant | None = None,
        num_examples: int | None = None,
    ) -> float:
        """Returns the epsilon spent.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: `accounting.PLD` (tight) or `accounting.RDP` (an upper bound,
            faster); by default the tightest that can account for the sampling.
          num_examples: if given, a delta of one over it or more is refused.

        Returns:
          Epsilon under `self.neighboring_relation`; infinity without noise, or where it
          is too large to compute: beyond some 700, and in any case where the noise
          multiplier is below 0.005. By `PLD` alone it is infinite too where delta is
          below 4e-16 for each step.

        Raises:
          TypeError: for another accountant.
          ValueError: if the accountant cannot account for the sampling under the
            neighboring relation, or delta is outside (0, 1).
        """
        check_delta(target_delta, num_examples or self.known_size)
        accountants = (accountant,) if accountant else self.accountants
        event, relation = self.dp_event(iterations), self.neighboring_relation
        return least_epsilon(event, accountants, target_delta, relation=relation)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _batch(mechanism: Mechanism, key: jax.Array, step: jax.Array, n: int) -> Batch:
    return mechanism.sample_step(key, step, num_examples=n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonGaussian(Mechanism):
    r"""The Poisson-subsampled Gaussian mechanism, `iterations` times: DP-SGD.

    `dpadambc.PoissonGaussian` explains the fields, and adds the ways to make one.
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    sampling_prob: float
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _ADD_OR_REMOVE
    clip_rule: ClipRule = FLAT

    # dp-accounting has no RDP bound for Poisson sampling under REPLACE_ONE.
    relations = types.MappingProxyType(
        {_ADD_OR_REMOVE: (PLD, RDP), _REPLACE: (PLD,), _SPECIAL: (PLD, RDP)}
    )
    draws_steps_alone = True

    def __post_init__(self):
        super().__post_init__()
        validate.probability(sampling_prob=self.sampling_prob)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.sampling_prob < 1

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        step = gaussian(noise_multiplier, self.neighboring_relation)
        if self.sampling_prob < 1:
            step = dp_accounting.PoissonSampledDpEvent(self.sampling_prob, step)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        del step
        return poisson_batch(key, num_examples, self.sampling_prob)
