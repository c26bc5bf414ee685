r"""The spending of several runs on the same people's data.

Trainings, a fine-tuning, a run that was discarded: each depends on the same data, and
an attacker may see the outputs of all. Neighbors differ in one person's data in every
run at once. So the privacy losses of all runs compose. Epsilon of the composition is no
less than that of any run, and mostly well below their sum.

*Assumption.* The neighbors of the whole must be neighbors of each run, or equal there.
This holds where each run is on all of the data, or on a part whose members were chosen
without looking at the data. A part chosen by its content (the examples with a high
loss, say) may change in size when one person's data are replaced, and then it is no
neighbor of a known size. Hence runs that state a size (`num_examples`) must state the
same one.

Do not compose runs on disjoint sets of people: each person then has the epsilon of the
run that they are in.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import dp_accounting
import jax.numpy as jnp

from dpadambc.core import validate
from dpadambc.core.accounting import Accountant, check_delta, least_epsilon, levels_of
from dpadambc.core.clip import ClipRule, NeighboringRelation
from dpadambc.core.mechanism import Mechanism

Parts = tuple[tuple[str, int], ...]


def class_name(kind: type) -> str:
    """Returns the name that a class is imported by, in this package the public one.

    A mechanism of `core` and `mechanisms` is public in `dpadambc`, and any other
    mechanism in its folder.
    """
    module = re.sub(r"^dpadambc\.(core|mechanisms)\b.*", "dpadambc", kind.__module__)
    module = re.sub(r"^(dpadambc\.\w+)\..*", r"\1", module)
    return f"{module}.{kind.__qualname__}"


def public_numbers(mechanism: Any) -> dict[str, Any]:
    """Returns the class of a mechanism and every field, as JSON can hold them.

    Args:
      mechanism: the public numbers, such as a `PoissonGaussian`.

    Returns:
      A dictionary. It has the first value of a schedule, as text, and the text of a
      clip rule.

    Example:
      >>> import dpadambc
      >>> from dpadambc.core.spending import public_numbers
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> numbers = public_numbers(mechanism)
      >>> numbers["mechanism"], numbers["noise_multiplier"], numbers["iterations"]
      ('dpadambc.PoissonGaussian', 1.0, 4)
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mechanism):
            return public_numbers(value)
        if isinstance(value, tuple):
            return [*value]
        if isinstance(value, ClipRule):
            return re.sub(" at 0x[0-9a-f]+", "", repr(value))  # of a function
        if callable(value):
            first: Any = value(jnp.zeros([], int))
            return f"a schedule from {float(first):g}"
        return getattr(value, "name", value)  # of a member of an enumeration

    fields = (field.name for field in dataclasses.fields(mechanism) if field.init)
    numbers = {name: plain(getattr(mechanism, name)) for name in fields}
    if inner := numbers.pop("mechanism", None):
        numbers["inner_mechanism"] = inner
    return {"mechanism": class_name(type(mechanism)), **numbers}


@dataclasses.dataclass(frozen=True)
class Run:
    """Steps of one mechanism, by noise multiplier: a schedule may change afterwards.

    Attributes:
      mechanism: the mechanism with the first of the levels.
      levels: each noise multiplier with its number of steps.
      parts: the random names of the calls of `training.fit` that the run is made of,
        each with the step at which it ended. A run counts once, however often it is
        given.
    """

    mechanism: Mechanism
    levels: tuple[tuple[float, int], ...]
    parts: Parts = ()

    @property
    def steps(self) -> int:
        """The number of steps."""
        return sum(n for _, n in self.levels)

    def is_part_of(self, other: "Run") -> bool:
        """Returns whether `other` has all steps of this run, by the same calls."""
        if not self.parts or other.steps < self.steps:
            return False
        *before, (name, last) = self.parts
        after = other.parts[len(before) : len(before) + 1]
        begins = other.parts[: len(before)] == tuple(before)
        return begins and any(x == name and n >= last for x, n in after)


def run_of(mechanism: Mechanism, steps: int | None = None, parts: Parts = ()) -> Run:
    """Makes a run of `steps` steps of a mechanism; all of its iterations by default."""
    steps = mechanism.iterations if steps is None else steps
    validate.count(steps=steps)
    accounted: Any = mechanism.accounted_as
    levels = tuple(levels_of(accounted.noise_multiplier, int(steps)).items())
    first, _ = levels[0]
    return Run(dataclasses.replace(accounted, noise_multiplier=first), levels, parts)


@dataclasses.dataclass(frozen=True)
class Spending:
    """The spending of several runs on the same people's data: see `compose`.

    It compares by value. A run of `training.fit` counts once, however often it is
    given. If a run was resumed twice from one checkpoint, both continuations count.

    Attributes:
      runs: the runs, each with its mechanism and its steps.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> spent = accounting.compose([mechanism])
      >>> spent.epsilon(1e-5) == mechanism.epsilon(1e-5)
      True
    """

    runs: tuple[Run, ...]

    def __post_init__(self):
        if not self.runs:
            raise ValueError("Expected at least one run to compose, got none.")
        mechanisms = [run.mechanism for run in self.runs]
        relations = {mechanism.neighboring_relation.name for mechanism in mechanisms}
        if len(relations) > 1:
            raise ValueError(f"Expected one neighboring_relation, got {relations}.")
        sizes = {mechanism.known_size for mechanism in mechanisms} - {None}
        if len(sizes) > 1:
            raise ValueError(
                f"Expected one num_examples for all runs that state it, got {sizes}."
                " Runs on other people's data are not composed."
            )
        if not self.accountants:
            raise ValueError(f"Expected runs that one accountant can read, got {self}.")

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        """The difference of two neighboring data sets, in every run."""
        return self.runs[0].mechanism.neighboring_relation

    @property
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants that can read every run, the tightest first."""
        first, *others = (run.mechanism.accountants for run in self.runs)
        return tuple(x for x in first if all(x in known for known in others))

    def dp_event(self) -> dp_accounting.ComposedDpEvent:
        """Returns the run as a dp-accounting event: see `Mechanism.dp_event`.

        Returns:
          A `dp_accounting.ComposedDpEvent` of the steps of all runs.
        """
        levels = ((run.mechanism, *level) for run in self.runs for level in run.levels)
        events = [mechanism._event(n, z) for mechanism, z, n in levels if n]
        kinds = [x for i, x in enumerate(events) if x not in events[:i]]
        repeated = lambda x, n: dp_accounting.SelfComposedDpEvent(x, n) if n > 1 else x
        # Equal events are accounted for at once.
        return dp_accounting.ComposedDpEvent(
            [repeated(x, events.count(x)) for x in kinds]
        )

    def epsilon(
        self, target_delta: float, *, accountant: Accountant | None = None
    ) -> float:
        """Returns the epsilon of all runs together.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          accountant: `accounting.PLD` or `accounting.RDP`; by default the tightest that
            can read all runs.

        Returns:
          Epsilon under `neighboring_relation`, or infinity: see `Mechanism.epsilon`.

        Raises:
          TypeError: if the accountant is neither of these.
          ValueError: if it cannot read all runs, or delta is outside (0, 1).
        """
        for run in self.runs:
            check_delta(target_delta, run.mechanism.known_size)
        accountants = (accountant,) if accountant else self.accountants
        event, relation = self.dp_event(), self.neighboring_relation
        return least_epsilon(event, accountants, target_delta, relation=relation)


def _runs_of(entry: Any) -> tuple[Run, ...]:
    entry = getattr(entry, "spent", entry)  # of a result
    if isinstance(entry, Spending):
        return entry.runs
    is_pair = isinstance(entry, tuple | list) and len(entry) == 2
    mechanism, steps = entry if is_pair else (entry, None)
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"Expected mechanisms or results as runs, got {type(entry)}.")
    return (run_of(mechanism, steps),)


def compose(runs: Iterable[Any]) -> Spending:
    """Composes several runs on the same people's data.

    Mechanisms and sampling methods may differ. A result of `fit` that is given twice,
    or that a later result includes, counts once; a mechanism that is given twice is two
    runs. Steps that go on from the state of earlier ones belong to the same run: give
    them together. With correlated noise they spend more than two runs of as many steps
    do, since later noise cancels earlier noise.

    Part of an epoch of a `ShuffledGaussian` counts as the whole of it, for each run.

    Do not compose runs on the data of *other* people: each person then has the epsilon
    of the run that they are in.

    Args:
      runs: for each run `(mechanism, steps)`, where None stands for all
        `mechanism.iterations`; or a mechanism, for all of its steps; or a `Spending`;
        or a result of `training.fit` or `training.search`, which counts as its
        `spent`: more steps than were taken where a release decided when to stop. All
        are under one neighboring relation. (A `PoissonGaussian` under
        ADD_OR_REMOVE_ONE adds the noise of one under REPLACE_ONE with half its
        `noise_multiplier`, and may be stated as that.)

    Returns:
      A `Spending`, with `epsilon`, `dp_event` and `neighboring_relation`.

    Raises:
      TypeError: if a run is none of these, or steps not an int.
      ValueError: if there is no run, the neighboring relations differ, the sizes of the
        data differ where mechanisms state them, no accountant knows all mechanisms, or
        a search drew the number of its trials.

    Example:
      >>> import dataclasses
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> first = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> second = dataclasses.replace(first, sampling_prob=0.01)
      >>> both = accounting.compose([(first, 80), second])
      >>> [round(x.epsilon(1e-5), 2) for x in (first, second, both)]
      [2.34, 0.19, 2.1]
      >>> [(run.steps, run.mechanism.sampling_prob) for run in both.runs]
      [(80, 0.1), (100, 0.01)]
    """
    if isinstance(runs, Spending | Mechanism):
        runs = [runs]
    kept: list[Run] = []
    for run in (run for entry in runs for run in _runs_of(entry)):
        if not any(map(run.is_part_of, kept)):
            kept = [other for other in kept if not other.is_part_of(run)] + [run]
    return Spending(tuple(kept))
