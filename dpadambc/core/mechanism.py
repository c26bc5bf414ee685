"""The public numbers of a private run, as one frozen value.

Noise, correction, sampler and accountant all read it, so they cannot disagree. Each way
of sampling has its class in a file beside this one.

No field is private. The size of the data set is private when an example may be added or
removed, so it is an argument; it is a field where privacy is stated for data sets of a
known size.
"""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import clip, validate
from dpadambc.core.accounted import Accounted
from dpadambc.core.arrays import make_varying, varying_axes
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation, check_rule
from dpadambc.core.privatize import INDEPENDENT, Noise, PrivateGradient
from dpadambc.core.sampling import Batch


def _of_devices(key: jax.Array, batch: Batch) -> Batch:
    """The same batch, known to differ where the key does: JAX forgets it in a sort."""
    return make_varying(batch, varying_axes(key))


class Mechanism(Accounted):
    """What all mechanisms share: a Gaussian on a clipped sum, step after step.

    Subclasses are frozen dataclasses with the fields annotated here. A subclass of your
    own may leave out `clip_rule`, which is `Flat()` then.

    Attributes:
      l2_clip_norm: C, the bound on one example's gradient norm.
      noise_multiplier: z, the noise over the sensitivity; a number, or a schedule of
        the step.
      iterations: T, the number of steps.
      normalize_by: B, the public number that the clipped sum is divided by.
      neighboring_relation: what two neighboring data sets differ in.
      clip_rule: which share of each gradient is taken. All that clip for the mechanism
        use it. A rule with a fixed bound does not change epsilon.
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation
    clip_rule: ClipRule = FLAT

    _noise: ClassVar[Noise] = INDEPENDENT

    @property
    def _draws_steps_alone(self) -> bool:
        """Whether a batch has nothing of others, so that each may have its own key."""
        kind = type(self)
        own = kind.sample_step, kind._sample_step
        return own == (Mechanism.sample_step, Mechanism._sample_step)

    def __post_init__(self):
        self._keep_python_numbers()
        validate.positive(l2_clip_norm=self.l2_clip_norm)
        validate.positive(normalize_by=self.normalize_by)
        check_rule(self.clip_rule)
        if not callable(self.noise_multiplier):
            validate.non_negative(noise_multiplier=self.noise_multiplier)
        validate.count(iterations=self.iterations)
        self._check_relation()

    def _keep_python_numbers(self) -> None:
        """In place of arrays, which have no hash."""
        given = (x.name for x in dataclasses.fields(cast(Any, self)) if x.init)
        for name in given:
            number = validate.python_number(**{name: getattr(self, name)})
            object.__setattr__(self, name, number)

    @property
    def has_independent_noise(self) -> bool:
        """Whether the noise of a step has nothing of that of another."""
        return self._noise is INDEPENDENT

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the clipped sum after division by `normalize_by`."""
        return clip.sensitivity(
            self.l2_clip_norm,
            normalize_by=self.normalize_by,
            neighboring_relation=self.neighboring_relation,
        )

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding, so that the clip must be told of it."""
        return True

    @property
    def _largest_batch(self) -> int | None:
        """The most examples that a step draws, where the epsilon is for so many."""
        return None

    @property
    def noise_stddev(self) -> float | optax.Schedule:
        """Standard deviation of the noise in the gradient that Adam sees.

        The noise multiplier times the sensitivity, a schedule if the multiplier is one.
        Give this value, or the mechanism, to `add_dp_noise` and to `scale_by_adam_bc`.
        """
        return self._noise.stddev(self)

    @property
    def noise_variance(self) -> float | optax.Schedule:
        """The square of `noise_stddev`: the papers' Φ."""
        stddev = self.noise_stddev
        if callable(stddev):
            return lambda step: stddev(step) ** 2
        return stddev**2

    def add_noise(self, *, key: jax.Array) -> optax.GradientTransformation:
        """The transformation that adds this mechanism's noise to the clipped sum.

        `privatize` and `training` add noise in this way only.

        Args:
          key: a typed key for the noise; a new one for each run.

        Returns:
          `add_dp_noise` of `noise_stddev`, but for mechanisms with noise of their own.
        """
        return self._noise.transformation(self, key)

    def private_gradient(self, key: jax.Array) -> PrivateGradient:
        """The clip and the noise of this mechanism, as two halves.

        Args:
          key: a typed key for the noise; a new one for each run.
        """
        return self._noise.private_gradient(self, key)

    def batches(
        self, rng: np.random.Generator, *, num_examples: int
    ) -> Iterator[Batch]:
        """One batch for each iteration, on the host.

        Args:
          rng: the generator to draw from; its seed is secret, and fresh for each run.
          num_examples: the size of the data set.

        Yields:
          One `Batch` of NumPy arrays a step: see the function of `sampling` for this
          way of sampling.

        Raises:
          TypeError: if `rng` is no generator.
          ValueError: if the mechanism is for another number of examples.
        """
        self._check_size(num_examples)
        validate.generator(rng=rng)
        return self._batches(rng, num_examples)

    def sample(self, key: jax.Array, *, num_examples: int) -> Batch:
        """One batch on the device, inside `jax.jit` and `jax.lax.scan`.

        Args:
          key: a typed key, secret, and a fresh one for each step.
          num_examples: the size of the data set; static.

        Returns:
          A `Batch` of static size: see the function of `sampling` for this way of
          sampling.

        Raises:
          TypeError: if `key` is not a typed key, or batches cannot be drawn one by one.
          ValueError: if the mechanism is for another number of examples.
        """
        self._check_size(num_examples)
        return _of_devices(key, self._sample(key, num_examples))

    def sample_step(
        self, run_key: jax.Array, step: int | jax.Array, *, num_examples: int
    ) -> Batch:
        """The batch of a step of a run, inside `jax.jit` and `jax.lax.scan`.

        Where steps are drawn independently, it is `sample` with
        `jax.random.fold_in(run_key, step)`. Where the batches of an epoch depend on
        each other, this is the only way to draw them on the device.

        Args:
          run_key: a typed key, secret, and *the same for all steps* of one run.
          step: of the run, counted from 0; it may be traced. A Python or NumPy number
            is checked; one on a device is not waited for.
          num_examples: the size of the data set; static.

        Returns:
          A `Batch` of static size.

        Raises:
          TypeError: if `run_key` is not a typed key, or the batches can only be drawn
            on the host.
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
        self._check_size(num_examples)
        self._check_step(step)
        return _of_devices(run_key, self._sample_step(run_key, step, num_examples))

    def _sample_step(
        self, run_key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> Batch:
        return self._sample(jax.random.fold_in(run_key, step), num_examples)

    def _check_size(self, num_examples: int) -> None:
        known = self._known_size
        if known not in (None, num_examples):
            raise ValueError(
                f"Expected num_examples={known}, the size that the epsilon of this"
                f" {type(self).__name__} is for, got {num_examples}."
            )

    def _check_step(self, step: int | jax.Array) -> None:
        """Raises for a step that nobody has accounted for, and for no step at all."""
        is_on_device = isinstance(step, jax.Array)  # to read it is to wait for it
        seen = step if is_on_device else np.asarray(step)
        is_number = seen.ndim == 0 and jnp.issubdtype(seen.dtype, jnp.integer)
        if not is_number or (not is_on_device and step < 0):
            raise ValueError(
                "Expected step to be a whole number >= 0, counted over all epochs, got"
                f" {step!r}. Fractions of one draw the same batch."
            )
        if is_on_device:
            return
        if step >= self.iterations:
            raise ValueError(
                f"Expected a step below {self.iterations}, since the epsilon of this"
                f" {type(self).__name__} is for iterations={self.iterations}, got"
                f" {step}. To go on, make the mechanism with more iterations: its"
                " epsilon is larger."
            )

    @abc.abstractmethod
    def _batches(self, rng: np.random.Generator, num_examples: int) -> Iterator[Batch]:
        """One batch for each iteration."""

    @abc.abstractmethod
    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        """One batch on the device."""
