"""The base of all mechanisms, with constructors for epochs and for a target.

Epsilon does not rest on this file. `core.mechanism` computes it for any numbers of a
mechanism.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, Unpack, final

from dpadambc.accounting.calibrate import as_fields, solved
from dpadambc.core import mechanism
from dpadambc.core.accounting import Accountant, check_delta, least_epsilon
from dpadambc.mechanisms import names
from dpadambc.mechanisms.names import PublicNumbers
from dpadambc.mechanisms.terms import check_terms


class Mechanism(mechanism.Mechanism):
    """The base of mechanisms, which add Gaussian noise to each clipped sum.

    Subclasses are frozen dataclasses with the fields below. They define `_event` and
    `_draw`, and the class attributes below. Without `clip_rule` it is `Flat()`.

    Attributes:
      l2_clip_norm: C, the bound on one example's gradient norm.
      noise_multiplier: z, the noise over the sensitivity; a number, or a schedule of
        the step.
      iterations: T, the number of steps.
      normalize_by: B, the public number that the clipped sum is divided by.
      neighboring_relation: the difference of two neighboring data sets.
      clip_rule: the fraction of each gradient that is taken. All functions that clip
        for the mechanism use it. It does not change epsilon.
      relations: the neighboring relations that privacy can be stated for, each with the
        accountants that can read the events, the tightest first.
      solvable: the fields that `calibrate` can solve for.
      deals_epochs: whether an epoch deals all examples into a whole number of batches.
      draws_steps_alone: whether a batch is independent of all others, so that each step
        can be drawn with a key of its own. It is False unless a class sets it.
      has_independent_noise: whether the noise of a step is independent of the noise of
        every other step.
    """

    solvable: ClassVar[tuple[str, ...]] = ("noise_multiplier", "iterations")
    deals_epochs: ClassVar[bool] = False

    def _check_loss(self, loss: Any, example: Any) -> None:
        check_terms(loss, example, self.terms_per_unit)

    @names.of_fields
    @final
    def of_epochs(cls, **public_numbers: Unpack[PublicNumbers]) -> Self:
        """Makes the mechanism for a number of epochs in batches of a size.

        Args:
          **public_numbers: the fields of the class; in place of `iterations`, `epochs`;
            and in place of `sampling_prob` or `batches_per_epoch`, `batch_size`. Both
            go with `num_examples`.

            An epoch has num_examples / batch_size steps. Where it deals all examples
            into batches (shuffled data, random allocation), that is rounded up. The
            product with `epochs` is rounded up to `iterations`. Batches that are drawn
            have `batch_size` examples on average; `normalize_by` is the batch size
            unless it is given.

            Fields are public, and reveal `num_examples`: where examples may be added or
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

    @names.of_fields
    @final
    def calibrate(
        cls,
        *,
        target_epsilon: float,
        target_delta: float,
        accountant: Accountant | None = None,
        **public_numbers: Unpack[PublicNumbers],
    ) -> Self:
        """Makes the mechanism that meets a target, solved for the number left out.

        Args:
          target_epsilon: the epsilon to reach and not to exceed.
          target_delta: the delta that goes with it.
          accountant: `accounting.PLD` (tight) or `accounting.RDP` (an upper bound); by
            default the tightest that can account for the sampling.
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
        check_delta(target_delta, public_numbers.get("num_examples"))
        fields = cls._as_fields(public_numbers)
        unknown = [name for name in cls.solvable if fields.get(name) is None]
        if len(unknown) != 1:
            raise TypeError(
                f"Expected all but one of {', '.join(cls.solvable)}, which is solved"
                f" for, got none of {', '.join(unknown) or 'them left out'}."
            )
        (name,) = unknown
        with_value = lambda x: cls(**{**fields, name: x})

        def epsilon_of(x: float, **how: Any) -> float:
            trial = with_value(x)
            used = (accountant,) if accountant else trial.accountants
            how |= {"relation": trial.neighboring_relation}
            return least_epsilon(trial.dp_event(), used, float(target_delta), **how)

        return with_value(solved(epsilon_of, name, target_epsilon))

    @classmethod
    def _as_fields(cls, public_numbers: Mapping[str, Any]) -> dict[str, Any]:
        return as_fields(cls, public_numbers)
