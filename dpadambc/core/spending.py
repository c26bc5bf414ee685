r"""What several runs on the same people's data spend together.

Trainings, a fine-tuning, a run that was discarded: each depends on the same
data, and an attacker may see the outputs of all. Neighbors differ in one person's data
in every run at once. So the privacy losses of all runs compose. Epsilon of the
composition is no less than that of any run, and mostly well below their sum.

*What is assumed.* The neighbors of the whole must be neighbors of each run, or equal
there. They are where each run is on all of the data, or on a part of which who is in it
was settled without looking at the data; a part chosen by its content (the examples with
a high loss, say) may change in size when one person's data are replaced, and then it is
no neighbor of a known size. Hence runs that state a size (`num_examples`) must state
the same one.

Do not compose runs on disjoint sets of people: each person then has the epsilon of the
run that they are in.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

import dp_accounting
import jax.numpy as jnp

from dpadambc.core import accounting as _events
from dpadambc.core import epsilon as _epsilon
from dpadambc.core import names as _names
from dpadambc.core import validate
from dpadambc.core.clip import FLAT, NeighboringRelation
from dpadambc.core.mechanism import Mechanism

__all__ = ["Spending", "compose"]

# What of a mechanism does not change epsilon, or is told apart from it.
_UNTOLD = {"l2_clip_norm", "normalize_by", "iterations", "neighboring_relation"}
_LEVELS = "noise_multiplier"
_RULE = "clip_rule"
_KIND, _STEPS, _RELATION = "mechanism", "steps", "neighboring_relation"
_PARTS = "parts"


def _fields(mechanism: Mechanism) -> dict[str, Any]:
    fields = dataclasses.fields(mechanism)  # pyright: ignore[reportArgumentType]
    names = [f.name for f in fields if f.init and f.name != _RULE]
    return {name: _names.plain(getattr(mechanism, name)) for name in names}


def _with(mechanism: Mechanism, **changes: Any) -> Mechanism:
    return dataclasses.replace(mechanism, **changes)  # pyright: ignore[reportArgumentType]


def _spender(mechanism: Mechanism) -> Mechanism:
    """With the usual rule of clipping: none changes epsilon, and JSON has no rules."""
    if mechanism.clip_rule == FLAT:
        return mechanism
    return _with(mechanism, clip_rule=FLAT)


def _kinds(kind: type[Mechanism] = Mechanism) -> Iterator[type[Mechanism]]:
    """All mechanisms that there are in this process."""
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


def _read_levels(found: dict[str, Any]) -> tuple[tuple[float, int], ...]:
    """The noise multipliers of what `to_json` wrote, each with its steps."""
    missing = {_KIND, _STEPS, _LEVELS, _RELATION} - set(found)
    if missing:
        raise ValueError(
            f"Expected a run with {', '.join(sorted(missing))}, got {found!r}."
        )
    levels = tuple((z, n) for z, n in found[_LEVELS])
    for z, n in levels:
        validate.non_negative(noise_multiplier=z)
        validate.count(steps=n)
    steps = sum(n for _, n in levels)
    if not levels or steps != found[_STEPS]:
        raise ValueError(f"Expected {found[_STEPS]} steps in all, got {steps}.")
    return levels


@dataclasses.dataclass(frozen=True)
class _Run:
    """Steps of one mechanism, by noise multiplier: a schedule may change afterwards."""

    mechanism: Mechanism  # with the first of the levels
    levels: tuple[tuple[float, int], ...]  # noise multiplier, number of steps
    # Of a run of `training.fit`: the random names of the calls that it is made of, each
    # with the step at which it ended, for it counts once however often it is given.
    parts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        steps: int | None,
        parts: tuple[tuple[str, int], ...] = (),
    ) -> Self:
        steps = mechanism.iterations if steps is None else steps
        validate.count(steps=steps)
        mechanism = _spender(mechanism)
        z, steps = mechanism.noise_multiplier, int(steps)
        if not callable(z):
            return cls(mechanism, ((float(z), steps),), parts)
        first: Any = z(jnp.zeros([], int))
        counts = _events.level_counts(z, steps) or {float(first): 0}
        mechanism = _with(mechanism, noise_multiplier=[*counts][0])
        return cls(mechanism, (*counts.items(),), parts)

    @property
    def steps(self) -> int:
        return sum(n for _, n in self.levels)

    def dp_events(self, accountant: _events.Accountant) -> list[dp_accounting.DpEvent]:
        return [
            _with(self.mechanism, noise_multiplier=z).dp_event(n, accountant=accountant)
            for z, n in self.levels
        ]

    @property
    def accountants(self) -> tuple[_events.Accountant, ...]:
        return self.mechanism._relations[self.mechanism.neighboring_relation]

    def __str__(self) -> str:
        numbers = {k: v for k, v in _fields(self.mechanism).items() if k not in _UNTOLD}
        if len(self.levels) > 1:
            multipliers = [z for z, _ in self.levels]
            numbers[_LEVELS] = f"{min(multipliers):g} to {max(multipliers):g}"
        listed = ", ".join(f"{name}={value}" for name, value in numbers.items())
        return f"{self.steps} steps of {type(self.mechanism).__name__}({listed})"

    def to_json(self) -> dict[str, Any]:
        named = {_KIND: _names.name_of(type(self.mechanism)), _STEPS: self.steps}
        if self.parts:
            named[_PARTS] = [list(part) for part in self.parts]
        levels = {_LEVELS: [list(level) for level in self.levels]}
        return named | _fields(self.mechanism) | levels

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        known = {_names.name_of(kind): kind for kind in _kinds()}
        levels = _read_levels(found)
        used = (_KIND, _STEPS, _LEVELS, _RELATION, _PARTS)
        numbers = {k: v for k, v in found.items() if k not in used}
        name, relation = found[_KIND], NeighboringRelation[found[_RELATION]]
        if name not in known:
            raise ValueError(
                f"Expected a mechanism that this process knows, got {name}. Import the"
                " module that defines it."
            )
        kind: Any = known[name]
        mechanism = kind(
            **numbers, noise_multiplier=levels[0][0], neighboring_relation=relation
        )
        return cls(mechanism, levels, tuple(map(tuple, found.get(_PARTS, ()))))

    def begins(self, other: "_Run") -> bool:
        """Whether the other has all steps of this one, by the same calls of `fit`."""
        if not self.parts:
            return False
        *before, (name, last) = self.parts
        size = len(before)
        if other.parts[:size] != tuple(before) or other.steps < self.steps:
            return False
        return any(x == name and n >= last for x, n in other.parts[size : size + 1])


def _the_same_relation(runs: Sequence[_Run]) -> None:
    kinds = {run.mechanism.neighboring_relation: run for run in reversed(runs)}
    if len(kinds) > 1:
        listed = " and ".join(
            f"{relation.name} ({type(run.mechanism).__name__})"
            for relation, run in reversed(kinds.items())
        )
        raise ValueError(
            f"Expected one neighboring relation for all runs, got {listed}: an epsilon"
            " is for neighbors of one kind. Make all mechanisms with one relation."
        )


def _the_same_size(runs: Sequence[_Run]) -> None:
    sizes = dict.fromkeys(run.mechanism._known_size for run in runs)
    sizes.pop(None, None)
    if len(sizes) > 1:
        listed = " and ".join(map(str, sizes))
        raise ValueError(
            "Expected runs on data of one size, since the epsilon of these mechanisms"
            f" is for data of a known size, got num_examples={listed}. A part of the"
            " data, chosen by what is in it, need not keep its size when one person's"
            " data are replaced. State privacy under ADD_OR_REMOVE_ONE, which knows no"
            " size, for all runs; runs on the data of other people are not composed."
        )


def _accountants(runs: Sequence[_Run]) -> tuple[_events.Accountant, ...]:
    """Those that can account for every run, the tightest first."""
    found: list[_events.Accountant] = [
        name for name in ("pld", "rdp") if all(name in run.accountants for run in runs)
    ]
    if not found:
        listed = "; ".join(
            f"{type(run.mechanism).__name__} ({', '.join(run.accountants)})"
            for run in runs
        )
        raise ValueError(
            f"Expected mechanisms that one accountant knows all of, got {listed}. State"
            " one of them under another way of sampling or neighboring relation."
        )
    return tuple(found)


def _counted(events: list[dp_accounting.DpEvent]) -> list[dp_accounting.DpEvent]:
    """Equal ones together, which are accounted for at once."""
    counts: list[list[Any]] = []
    for event in events:
        alike = next((entry for entry in counts if entry[0] == event), None)
        if alike is None:
            counts.append([event, 1])
        else:
            alike[1] += 1
    return [
        event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count)
        for event, count in counts
    ]


@dataclasses.dataclass(frozen=True, repr=False)
class Spending:
    """What several runs on the same people's data spend together: see `compose`.

    It compares by value. Spendings are added by `+`. A run of `training.fit` counts
    once, however often it is given. Where it went on from one checkpoint twice, both
    ways count as runs.

    Attributes:
      runs: each with its mechanism and its steps.

    Example:
      >>> import json
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> spent = accounting.compose([mechanism])
      >>> spent.epsilon(1e-5) == mechanism.epsilon(1e-5)
      True
      >>> text = json.dumps(spent.to_json())
      >>> accounting.Spending.from_json(json.loads(text)) == spent
      True
    """

    runs: tuple[_Run, ...]

    def __post_init__(self):
        if not self.runs:
            raise ValueError(
                "Expected at least one run, got none, for which no relation is known."
            )
        _the_same_relation(self.runs)
        _the_same_size(self.runs)
        _accountants(self.runs)

    def __repr__(self) -> str:
        lines = f"{self.neighboring_relation.name}:", *map(str, self.runs)
        return "Spending(" + "\n  ".join(lines) + ")"

    def __add__(self, other: "Spending | Mechanism") -> "Spending":
        """Both together."""
        if not isinstance(other, Spending | Mechanism):
            return NotImplemented
        return compose([self, other])

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        """What two neighboring datasets differ in, in every run."""
        return self.runs[0].mechanism.neighboring_relation

    @property
    def num_examples(self) -> int | None:
        """The size of the data, where a run states one."""
        sizes = (run.mechanism._known_size for run in self.runs)
        return next((size for size in sizes if size is not None), None)

    def _accountant(self, name: _events.Accountant | None) -> _events.Accountant:
        if name is not None:
            _events.check_accountant(name)
        known = _accountants(self.runs)
        if name not in (None, *known):
            raise ValueError(
                f"Expected an accountant that knows all runs, {' or '.join(known)}, got"
                f" {name!r} for {self!r}."
            )
        return name or known[0]

    def dp_event(
        self, *, accountant: _events.Accountant | None = None
    ) -> dp_accounting.ComposedDpEvent:
        """What was run, as a dp-accounting event.

        Args:
          accountant: which accountant will read it, and no other (see
            `Mechanism.dp_event`); by default the tightest that knows all runs.

        Returns:
          A `dp_accounting.ComposedDpEvent` of the steps of all runs.

        Raises:
          ValueError: for an accountant that is unknown, or does not know all runs.
        """
        accountant = self._accountant(accountant)
        events = [event for run in self.runs for event in run.dp_events(accountant)]
        return dp_accounting.ComposedDpEvent(_counted(events))

    def epsilon(
        self, target_delta: float, *, accountant: _events.Accountant | None = None
    ) -> float:
        """The epsilon of all runs together.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          accountant: "pld" or "rdp"; by default the tightest that knows all runs.

        Returns:
          Epsilon under `neighboring_relation`, or infinity: see `Mechanism.epsilon`.

        Raises:
          ValueError: for an accountant that is unknown, or does not know all runs, or a
            delta outside (0, 1).
        """
        _events.check_delta(target_delta, self.num_examples)
        accountant = self._accountant(accountant)
        return _epsilon.epsilon(
            self.dp_event(accountant=accountant),
            target_delta=target_delta,
            neighboring_relation=self.neighboring_relation,
            accountant=accountant,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """What JSON can hold: of each run the mechanism, by name, and its steps.

        Of a schedule it has the noise multipliers, each with its number of steps.
        """
        return [run.to_json() for run in self.runs]

    @classmethod
    def from_json(cls, found: Sequence[dict[str, Any]]) -> Self:
        """The spending of which `to_json` made this.

        Args:
          found: a list of dictionaries.

        Returns:
          A `Spending` that equals the one that was written.

        Raises:
          ValueError: if a mechanism is not known in this process, or a number is
            missing or out of its range.
          TypeError: if a mechanism has other numbers.
        """
        return cls(tuple(map(_Run.from_json, found)))

    @classmethod
    def of_run(
        cls, mechanism: Mechanism, steps: int, parts: tuple[tuple[str, int], ...]
    ) -> Self:
        """Of one run, with the names and last steps of its parts."""
        return cls((_Run.of(mechanism, steps, parts),))


class _Result(Protocol):
    """What `training.fit` and `training.search` return, as far as it is read here."""

    @property
    def spent(self) -> Spending: ...


def _runs_of(entry: Any) -> tuple[_Run, ...]:
    entry = getattr(entry, "spent", entry)  # of a result
    if isinstance(entry, Spending):
        return entry.runs
    mechanism, steps = entry if _is_pair(entry) else (entry, None)
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected a mechanism, a (mechanism, steps), an earlier result of compose,"
            f" or what fit or search returned, for each run, got {entry!r}."
        )
    return (_Run.of(mechanism, steps),)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2


def compose(
    runs: Iterable[Spending | Mechanism | tuple[Mechanism, int | None] | _Result],
) -> Spending:
    """What several runs on the same people's data spend together.

    Mechanisms and ways of sampling may differ. A result of `fit` that is given twice,
    or that another was told of, counts once; a mechanism that is given twice is two
    runs. Steps that go on from the state of earlier ones are of the same run: give
    them together. With correlated noise they spend more than two
    runs of as many steps do, since later noise takes back earlier noise.

    Part of an epoch of a `ShuffledGaussian` counts as the whole of it, for each run.

    Do not compose runs on the data of *other* people: each person then has the epsilon
    of the run that they are in.

    Args:
      runs: for each run `(mechanism, steps)`, where None stands for all
        `mechanism.iterations`; or a mechanism, for all of its steps; or what `compose`
        returned; or what `training.fit` or `training.search` returned, which counts as
        its `spent`: more steps than were taken where what was released decided when to
        stop. All are under one neighboring relation. (A `PoissonGaussian` under
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
      >>> [round(x.epsilon(1e-5), 2) for x in (first, second, both, both + first)]
      [2.34, 0.19, 2.1, 3.19]
      >>> print(both)
      Spending(ADD_OR_REMOVE_ONE:
        80 steps of PoissonGaussian(noise_multiplier=2.0, sampling_prob=0.1)
        100 steps of PoissonGaussian(noise_multiplier=2.0, sampling_prob=0.01))
    """
    if isinstance(runs, Spending | Mechanism):
        runs = [runs]
    return Spending(_counted_once([run for entry in runs for run in _runs_of(entry)]))


def _counted_once(runs: Sequence[_Run]) -> tuple[_Run, ...]:
    """Without runs that others begin with, step by step."""
    kept: list[_Run] = []
    for run in runs:
        if not any(map(run.begins, kept)):
            kept = [other for other in kept if not other.begins(run)]
            kept.append(run)
    return tuple(kept)
