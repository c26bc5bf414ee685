"""The public numbers of a private run, as one frozen value.

Noise, correction, sampler and accountant all read it, so they cannot disagree. Each way
of sampling has its class in a file beside this one.

No field is private. The size of the data set is private when an example may be added or
removed, so it is an argument; it is a field where privacy is stated for data sets of a
known size.
"""

import abc
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc._core import validate
from dpadambc.clipping import flat, rules
from dpadambc.clipping.flat import NeighboringRelation
from dpadambc.mechanisms import (
    _epochs,
    _epsilon,
    _events,
    _search_target,
    trade_off,
    tuning,
)
from dpadambc.mechanisms._selection import least_bound
from dpadambc.mechanisms.batch import Batch
from dpadambc.mechanisms.trials import Trials
from dpadambc.transforms.noise import add_dp_noise


class Mechanism(abc.ABC):
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
    clip_rule: rules.ClipRule = rules.FLAT

    # Which fields `calibrate` can solve for, and who accounts for the sampling under
    # which relation: the tightest accountant first.
    _solvable: ClassVar[tuple[str, ...]] = ("noise_multiplier", "iterations")
    _relations: ClassVar[dict[NeighboringRelation, tuple[_events.Accountant, ...]]]
    _refusal: ClassVar[str]
    # Whether an epoch deals all examples into a whole number of batches.
    _deals_epochs: ClassVar[bool] = False
    # Whether the noise of a step has nothing of that of another.
    _has_independent_noise: ClassVar[bool] = True

    def __post_init__(self):
        validate.positive(l2_clip_norm=self.l2_clip_norm)
        validate.positive(normalize_by=self.normalize_by)
        rules._check(self.clip_rule)
        if not callable(self.noise_multiplier):
            validate.non_negative(noise_multiplier=self.noise_multiplier)
        validate.count(iterations=self.iterations)
        self._check_relation()
        self._check_moving()

    def _check_moving(self) -> None:
        """Raises where a bound that moves would not be accounted for."""
        if not self.clip_rule._moves:
            return
        kind = type(self)
        ours = Mechanism.add_noise, Mechanism.noise_stddev
        if (kind.add_noise, kind.noise_stddev) != ours:
            raise ValueError(
                f"Expected a rule with a fixed bound for {kind.__name__}, which has a"
                f" way of its own to add noise, got {self.clip_rule!r}, whose sum is"
                " hidden by independent noise at the level of noise_stddev alone."
            )
        self._multiplier_of_gradient  # noqa: B018

    @property
    def _multiplier_of_gradient(self) -> Any:
        """The noise over the sensitivity: what a sum beside the gradient leaves."""
        rule: Any = self.clip_rule
        if not rule._moves:
            return self.noise_multiplier
        changed = self.sensitivity / self.l2_clip_norm
        return rule._multiplier_left(self.noise_multiplier, changed)

    def _check_relation(self, accountant: str | None = None) -> None:
        relation = self.neighboring_relation
        if not isinstance(relation, NeighboringRelation):
            raise TypeError(
                "Expected neighboring_relation to be a dpadambc.NeighboringRelation,"
                f" got {relation!r}."
            )
        accountants = self._relations.get(relation, ())
        if not accountants or (accountant and accountant not in accountants):
            supported = "; ".join(
                f"{r.name} ({', '.join(names)})" for r, names in self._relations.items()
            )
            what = relation.name + (f" by {accountant!r}" if accountant else "")
            raise ValueError(
                f"{type(self).__name__} cannot be accounted for under {what}:"
                f" {self._refusal} Supported: {supported}."
            )

    @property
    def _default_accountant(self) -> _events.Accountant:
        return self._relations[self.neighboring_relation][0]

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the clipped sum after division by `normalize_by`."""
        return flat.sensitivity(
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

        The noise multiplier times the sensitivity, a schedule if the multiplier is one;
        a little more with `clipping.QuantileClipping`. Give this value to
        `add_dp_noise` and to `scale_by_adam_bc`. Account with `noise_multiplier`: this
        value over the sensitivity leaves out the count of such a rule.
        """
        z, sensitivity = self._multiplier_of_gradient, self.sensitivity
        if callable(z):
            return lambda step: jnp.asarray(z(step), float) * sensitivity
        return z * sensitivity

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
        return add_dp_noise(self.noise_stddev, key=key)

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
          ValueError: if the mechanism is for another number of examples.
        """
        self._check_size(num_examples)
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
        return self._sample(key, num_examples)

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
        return self._sample_step(run_key, step, num_examples)

    def _sample_step(
        self, run_key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> Batch:
        return self.sample(jax.random.fold_in(run_key, step), num_examples=num_examples)

    def _check_size(self, num_examples: int) -> None:
        known = self._known_size
        if known not in (None, num_examples):
            raise ValueError(
                f"Expected num_examples={known}, the size that the epsilon of this"
                f" {type(self).__name__} is for, got {num_examples}."
            )

    def _check_step(self, step: int | jax.Array) -> None:
        """Raises for a step that nobody has accounted for, and for no step at all."""
        is_number = jnp.ndim(step) == 0 and jnp.isdtype(
            jnp.result_type(step), "integral"
        )
        is_on_device = isinstance(step, jax.Array)  # to read it is to wait for it
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

    @property
    def _known_size(self) -> int | None:
        """The size of the data set, where privacy is stated for one."""
        return getattr(self, "num_examples", None)

    @abc.abstractmethod
    def _batches(self, rng: np.random.Generator, num_examples: int) -> Iterator[Batch]:
        """One batch for each iteration."""

    @abc.abstractmethod
    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        """One batch on the device."""

    @abc.abstractmethod
    def _step_event(
        self, noise_multiplier: float, accountant: _events.Accountant
    ) -> dp_accounting.DpEvent:
        """One step, in the unit of the accountant."""

    def _gaussian(
        self, noise_multiplier: float, accountant: _events.Accountant
    ) -> dp_accounting.GaussianDpEvent:
        """One step on the whole data set, in the unit of the accountant."""
        relation = self.neighboring_relation
        return _events.gaussian(noise_multiplier, relation, accountant)

    def _compositions(self, iterations: int) -> int:
        """How many times `_step_event` is composed in so many steps."""
        return iterations

    def dp_event(
        self,
        iterations: int | None = None,
        *,
        accountant: _events.Accountant | None = None,
    ) -> dp_accounting.DpEvent:
        """What was run, as a dp-accounting event.

        Under REPLACE_ONE dp-accounting's accountants read a Gaussian's noise
        multiplier in two units: the PLD accountant relative to the clip norm, doubling
        the sensitivity itself, the RDP accountant relative to the sensitivity. Hence
        the argument; compose the event with that accountant and no other.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: which accountant will read it, "pld" or "rdp"; the tightest that
            can, by default.

        Returns:
          A `dp_accounting.DpEvent`.

        Raises:
          ValueError: for an unknown accountant, or one that cannot account for the
            sampling under the neighboring relation.
        """
        accountant = accountant or self._default_accountant
        _events.check_accountant(accountant)
        self._check_relation(accountant)
        iterations = self.iterations if iterations is None else iterations
        validate.count(iterations=iterations)
        iterations = int(iterations)  # dp-accounting takes no other kind
        if iterations == 0:
            return dp_accounting.NoOpDpEvent()
        return self._run_event(iterations, accountant)

    def _run_event(
        self, iterations: int, accountant: _events.Accountant
    ) -> dp_accounting.DpEvent:
        """So many steps, at least one."""
        return _events.composed(
            lambda z: self._step_event(z, accountant),
            self.noise_multiplier,
            self._compositions(iterations),
        )

    def epsilon(
        self,
        target_delta: float,
        *,
        iterations: int | None = None,
        accountant: _events.Accountant | None = None,
        num_examples: int | None = None,
        trials: Trials | None = None,
    ) -> float:
        """The epsilon spent.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: "pld" (tight) or "rdp" (an upper bound, faster); by default "pld"
            where it can account for the sampling.
          num_examples: if given, used for a warning where delta is too large for it.
          trials: the distribution of the number of runs of which the best is published;
            one run by default. See `tuned_epsilon`.

        Returns:
          Epsilon under `self.neighboring_relation`; infinity without noise, or where it
          is too large to compute: beyond some 700, and in any case where the noise
          multiplier is below 0.005. By "pld" it is infinite too where delta is below
          4e-16 for each step, unless "rdp" can account for the sampling.

        Raises:
          ValueError: for an unknown accountant, one that cannot account for the
            sampling under the neighboring relation, or a delta outside (0, 1).
        """
        _events.check_delta(target_delta, num_examples or self._known_size)
        if trials is not None:
            return least_bound(
                self.dp_events(iterations, accountant=accountant),
                trials,
                target_delta=target_delta,
                neighboring_relation=self.neighboring_relation,
            ).epsilon
        accountant = accountant or self._default_accountant
        return _epsilon.epsilon(
            self.dp_event(iterations, accountant=accountant),
            target_delta=target_delta,
            neighboring_relation=self.neighboring_relation,
            accountant=accountant,
        )

    def trade_off(self, iterations: int | None = None) -> trade_off.TradeOff:
        """The errors that an attacker cannot avoid: what epsilon means.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.

        Returns:
          A `TradeOff`: the largest share of members that an attack can find at each
          rate of false alarms, and the μ of Gaussian differential privacy.

        Raises:
          ValueError: if the sampling has no privacy loss distribution under
            `self.neighboring_relation`, but a bound by Rényi divergences alone.
        """
        return trade_off.of_event(
            self.dp_event(iterations, accountant="pld"),
            neighboring_relation=self.neighboring_relation,
        )

    @classmethod
    def of_epochs(cls, **public_numbers: Any) -> Self:
        """The mechanism for so many epochs in batches of a size.

        Args:
          **public_numbers: the fields of the class; in place of `iterations`, `epochs`;
            and in place of `sampling_prob` or `batches_per_epoch`, `batch_size`. Both
            go with `num_examples`.

            An epoch has num_examples / batch_size steps. Where it deals all examples
            into batches (shuffled data, random allocation), that is rounded up. The
            product with `epochs` is rounded up to `iterations`. Batches that are drawn
            have `batch_size` examples on average; `normalize_by` is the batch size
            unless it is given.

            Fields are public, and tell `num_examples`: where examples may be added or
            removed, give a public number near it in its place.

        Returns:
          A mechanism. It keeps steps and probabilities, and no number of epochs.

        Raises:
          TypeError: if one number is given in two ways, or is missing.
          ValueError: if a number is out of its range.

        Example:
          >>> import dpadambc
          >>> mechanism = dpadambc.PoissonGaussian.of_epochs(
          ...     epochs=30, batch_size=1024, num_examples=60_000, noise_multiplier=1.0,
          ...     l2_clip_norm=1.0)
          >>> mechanism.iterations, round(mechanism.sampling_prob, 5)
          (1758, 0.01707)
          >>> mechanism.normalize_by
          1024
        """
        return cls(**cls._as_fields(public_numbers))

    @classmethod
    def _as_fields(cls, public_numbers: dict[str, Any]) -> dict[str, Any]:
        names = inspect.signature(cls).parameters
        return _epochs.as_fields(names, public_numbers, deals_epochs=cls._deals_epochs)

    def dp_events(
        self,
        iterations: int | None = None,
        *,
        accountant: _events.Accountant | None = None,
    ) -> dict[_events.Accountant, dp_accounting.DpEvent]:
        """What was run, as an event for each accountant that can read it.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: the only one to make an event for; by default all.

        Returns:
          Events by accountant, in the unit of each: see `dp_event`.

        Raises:
          ValueError: as `dp_event`.
        """
        every = self._relations[self.neighboring_relation]
        return {
            name: self.dp_event(iterations, accountant=name)
            for name in ((accountant,) if accountant else every)
        }

    def tuned_epsilon(
        self,
        target_delta: float,
        *,
        trials: Trials,
        iterations: int | None = None,
        accountant: _events.Accountant | None = None,
    ) -> tuning.TunedEpsilon:
        """The epsilon of publishing the best of a random number of runs.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          trials: the distribution of the number of runs, such as `trials.Geometric(8)`.
          iterations: the number of steps of each; `self.iterations` by default.
          accountant: "pld" or "rdp"; by default the least bound of all.

        Returns:
          A `TunedEpsilon`: that of the search, of one run, and of as many as are
          expected, all of them published. `tuning.tuned_epsilon` says what it covers.

        Raises:
          TypeError: if `trials` is no such distribution.
          ValueError: as `epsilon`.
        """
        _events.check_delta(target_delta, self._known_size)
        return tuning.tuned_epsilon(
            self.dp_events(iterations, accountant=accountant),
            trials,
            target_delta=target_delta,
            neighboring_relation=self.neighboring_relation,
        )

    @classmethod
    def calibrate(
        cls,
        *,
        target_epsilon: float,
        target_delta: float,
        accountant: _events.Accountant | None = None,
        trials: Trials | None = None,
        **public_numbers: Any,
    ) -> Self:
        """The mechanism that meets a target, solved for the one number left out.

        Args:
          target_epsilon: the epsilon to reach and not to exceed.
          target_delta: the delta that goes with it.
          accountant: "pld" (tight) or "rdp" (an upper bound); by default "pld" where it
            can account for the sampling.
          trials: the distribution of the number of runs of which the best is published,
            so that the target is that of the whole search; one run by default. It takes
            some five times as long.
          **public_numbers: the fields of the class, all but one of `noise_multiplier`,
            `iterations` and `sampling_prob` (where it has one). The field left out, or
            given as None, is solved for: the least noise, the most iterations or the
            largest probability. `epochs`, `batch_size` and `num_examples` may stand
            in place of fields, as in `of_epochs`; `num_examples` alone may be given to
            any class, for the warning of `epsilon`.

        Returns:
          A mechanism whose epsilon at `target_delta` is at most `target_epsilon`.

        Raises:
          TypeError: if not exactly one field is left out, or an unknown one is given.
          ValueError: if the target cannot be reached, or a number is out of its range.
        """
        if accountant is not None:
            _events.check_accountant(accountant)
        if trials is not None:
            return _search_target.calibrated(
                lambda target: cls.calibrate(
                    target_epsilon=target,
                    target_delta=target_delta,
                    accountant=accountant,
                    **public_numbers,
                ),
                lambda found: found.epsilon(
                    target_delta, accountant=accountant, trials=trials
                ),
                target_epsilon,
            )
        _events.check_delta(target_delta, public_numbers.get("num_examples"))
        public_numbers = cls._as_fields(public_numbers)
        # No rule changes epsilon, and not every trial would do for one.
        rule = {k: public_numbers.pop(k) for k in {"clip_rule"} & set(public_numbers)}
        unknown = [x for x in cls._solvable if public_numbers.get(x) is None]
        if len(unknown) != 1:
            raise TypeError(
                f"Expected all but one of {', '.join(cls._solvable)} to be given, and"
                f" to solve for that one; missing: {', '.join(unknown) or 'none'}."
            )
        (name,) = unknown
        with_value = lambda x: cls(**{**public_numbers, name: x})
        trial = with_value(1)
        accountant = accountant or trial._default_accountant
        solution = _epsilon.calibrate(
            lambda x: with_value(x).dp_event(accountant=accountant),
            name,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            neighboring_relation=trial.neighboring_relation,
            accountant=accountant,
        )
        return cls(**{**public_numbers, name: solution, **rule})
