"""What a run of a mechanism costs: events, epsilon, and the target that it meets."""

import abc
import inspect
from typing import Any, ClassVar, Self

import dp_accounting
import optax

from dpadambc.accounting import search_target, trade_off, tuning
from dpadambc.accounting.selection import least_bound
from dpadambc.accounting.trials import Trials
from dpadambc.core import accounting, epochs, validate
from dpadambc.core import epsilon as _epsilon
from dpadambc.core.clip import NeighboringRelation


class Accounted(abc.ABC):
    """A `Mechanism` as its accountants see it: steps, each an event."""

    noise_multiplier: float | optax.Schedule
    iterations: int
    neighboring_relation: NeighboringRelation

    # Which fields `calibrate` can solve for, and who accounts for the sampling under
    # which relation: the tightest accountant first.
    _solvable: ClassVar[tuple[str, ...]] = ("noise_multiplier", "iterations")
    _relations: ClassVar[dict[NeighboringRelation, tuple[accounting.Accountant, ...]]]
    _refusal: ClassVar[str]
    # Whether an epoch deals all examples into a whole number of batches.
    _deals_epochs: ClassVar[bool] = False

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
    def _default_accountant(self) -> accounting.Accountant:
        return self._relations[self.neighboring_relation][0]

    @property
    def _known_size(self) -> int | None:
        """The size of the data set, where privacy is stated for one."""
        return getattr(self, "num_examples", None)

    @abc.abstractmethod
    def _step_event(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        """One step, in the unit of the accountant."""

    def _gaussian(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.GaussianDpEvent:
        """One step on the whole data set, in the unit of the accountant."""
        relation = self.neighboring_relation
        return accounting.gaussian(noise_multiplier, relation, accountant)

    def _compositions(self, iterations: int) -> int:
        """How many times `_step_event` is composed in so many steps."""
        return iterations

    def _run_event(
        self, iterations: int, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        """So many steps, at least one."""
        return accounting.composed(
            lambda z: self._step_event(z, accountant),
            self.noise_multiplier,
            self._compositions(iterations),
        )

    def dp_event(
        self,
        iterations: int | None = None,
        *,
        accountant: accounting.Accountant | None = None,
    ) -> dp_accounting.DpEvent:
        """What was run, as a dp-accounting event.

        Under REPLACE_ONE dp-accounting's accountants read a Gaussian's noise
        multiplier in two units: the PLD accountant relative to the clip norm, doubling
        the sensitivity itself, the RDP accountant relative to the sensitivity. Hence
        the argument; compose the event with that accountant and no other. Those of
        `accounting` refuse an event of the other kind.

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
        accounting.check_accountant(accountant)
        self._check_relation(accountant)
        iterations = self.iterations if iterations is None else iterations
        validate.count(iterations=iterations)
        iterations = int(iterations)  # dp-accounting takes no other kind
        if iterations == 0:
            return dp_accounting.NoOpDpEvent()
        return self._run_event(iterations, accountant)

    def dp_events(
        self,
        iterations: int | None = None,
        *,
        accountant: accounting.Accountant | None = None,
    ) -> dict[accounting.Accountant, dp_accounting.DpEvent]:
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

    def epsilon(
        self,
        target_delta: float,
        *,
        iterations: int | None = None,
        accountant: accounting.Accountant | None = None,
        num_examples: int | None = None,
        trials: Trials | None = None,
    ) -> float:
        """The epsilon spent.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: "pld" (tight) or "rdp" (an upper bound, faster); by default "pld"
            where it can account for the sampling.
          num_examples: if given, a delta of one over it or more is refused.
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
        accounting.check_delta(target_delta, num_examples or self._known_size)
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

    def tuned_epsilon(
        self,
        target_delta: float,
        *,
        trials: Trials,
        iterations: int | None = None,
        accountant: accounting.Accountant | None = None,
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
        accounting.check_delta(target_delta, self._known_size)
        return tuning.tuned_epsilon(
            self.dp_events(iterations, accountant=accountant),
            trials,
            target_delta=target_delta,
            neighboring_relation=self.neighboring_relation,
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
    def calibrate(
        cls,
        *,
        target_epsilon: float,
        target_delta: float,
        accountant: accounting.Accountant | None = None,
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
            any class, for which a delta of one over it or more is refused.

        Returns:
          A mechanism whose epsilon at `target_delta` is at most `target_epsilon`.

        Raises:
          TypeError: if not exactly one field is left out, or an unknown one is given.
          ValueError: if the target cannot be reached, or a number is out of its range.
        """
        if accountant is not None:
            accounting.check_accountant(accountant)
        if trials is not None:
            return search_target.calibrated(
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
        accounting.check_delta(target_delta, public_numbers.get("num_examples"))
        public_numbers = cls._as_fields(public_numbers)
        # No rule changes epsilon, and not every trial would do for one.
        rule = {k: public_numbers.pop(k) for k in {"clip_rule"} & set(public_numbers)}
        unknown = [x for x in cls._solvable if public_numbers.get(x) is None]
        if len(unknown) != 1:
            raise TypeError(
                f"Expected all but one of {', '.join(cls._solvable)} to be given: the"
                " one left out is solved for. Left out:"
                f" {', '.join(unknown) or 'none'}."
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

    @classmethod
    def _as_fields(cls, public_numbers: dict[str, Any]) -> dict[str, Any]:
        names = inspect.signature(cls).parameters
        return epochs.as_fields(names, public_numbers, deals_epochs=cls._deals_epochs)
