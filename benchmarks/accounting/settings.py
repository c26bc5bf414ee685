"""What is accounted for: one grid of settings for all accountants.

It imports no library, since it is read where only the peers are installed.
"""

import dataclasses
from typing import Any, Literal

Kind = Literal["poisson", "fixed", "node"]
Relation = Literal["ADD_OR_REMOVE_ONE", "REPLACE_ONE"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Public numbers of a run, and what is asked for.

    Args:
      batch_size: the expected one, B.
      num_examples: N; the rate of sampling is B / N.
      iterations: the number of steps.
      noise_multiplier: z; None where it is solved for.
      linear_to: if given, z falls to that along a line.
      target: the epsilon to calibrate for; None where epsilon is asked for.
      max_terms: of a node.
    """

    batch_size: int
    num_examples: int
    iterations: int
    noise_multiplier: float | None = None
    linear_to: float | None = None
    target: float | None = None
    delta: float = 1e-5
    relation: Relation = "ADD_OR_REMOVE_ONE"
    kind: Kind = "poisson"
    max_terms: int = 1

    @property
    def rate(self) -> float:
        return self.batch_size / self.num_examples

    @property
    def name(self) -> str:
        parts = [f"{self.batch_size:,} of {self.num_examples:,} × {self.iterations:,}"]
        if self.rate == 1:
            parts = [f"full batch × {self.iterations:,}"]
        if self.kind == "fixed":
            parts.append("fixed size")
        if self.kind == "node":
            parts.append(f"node in {self.max_terms} terms")
        if self.relation == "REPLACE_ONE" and self.kind == "poisson":
            parts.append("replace one")
        if self.delta != 1e-5:
            parts.append(f"δ {self.delta:g}")
        return ", ".join([*parts, self._asked])

    @property
    def _asked(self) -> str:
        if self.target is not None:
            return f"ε {self.target:g}"
        line = "" if self.linear_to is None else f" to {self.linear_to:g}"
        return f"z {self.noise_multiplier:g}{line}"

    def noise_levels(self, noise_multiplier: float | None = None) -> dict[float, int]:
        """Each noise multiplier with its number of steps."""
        first = self.noise_multiplier or noise_multiplier
        if first is None:
            raise ValueError(f"Expected a noise_multiplier for {self.name}, got None.")
        if self.linear_to is None:
            return {first: self.iterations}
        slope = (self.linear_to - first) / self.iterations
        return {first + slope * step: 1 for step in range(self.iterations)}


def _both(z: tuple[float, ...], targets: tuple[float, ...], **run) -> list[Setting]:
    """Of one run: epsilon of each noise multiplier, then noise for each target."""
    epsilons = [Setting(noise_multiplier=x, **run) for x in z]
    return epsilons + [Setting(target=x, **run) for x in targets]


_TARGETS = (0.1, 1.0, 3.0, 10.0, 50.0)
_MNIST: dict[str, Any] = dict(batch_size=4_096, num_examples=60_000, iterations=450)
_SMALL_BATCHES = dict(batch_size=256, num_examples=60_000, iterations=7_000)
_CIFAR: dict[str, Any] = dict(batch_size=1_024, num_examples=50_000, iterations=3_360)
_RARE: dict[str, Any] = dict(batch_size=1, num_examples=1_000, iterations=10_000)
_LONG: dict[str, Any] = dict(batch_size=1, num_examples=100, iterations=100_000)
_FULL: dict[str, Any] = dict(batch_size=1, num_examples=1, iterations=100)
_GRAPH: dict[str, Any] = dict(num_examples=90_941, iterations=200, kind="node")


def _all() -> list[Setting]:
    found = _both((1.0, 2.0), _TARGETS, **_MNIST)
    found += _both((0.7, 1.0), _TARGETS, **_SMALL_BATCHES)
    found += _both((1.85,), (3.0,), **_CIFAR)
    found += _both((0.7,), (3.0,), **_RARE)
    for delta in (1e-9, 1e-12):
        found += _both((1.0,), (), **_LONG, delta=delta)
        found += _both((1.0,), (8.0,), **_LONG, delta=delta, relation="REPLACE_ONE")
    found += _both((10.0,), (3.0,), **_FULL)
    found += [Setting(noise_multiplier=2.0, linear_to=1.0, **_MNIST)]
    found += _both((1.0,), (3.0,), **_MNIST, kind="fixed", relation="REPLACE_ONE")
    for max_terms in (2, 8):
        for batch_size in (2_500, 10_000):
            found += _both(
                (1.0,), (3.0,), **_GRAPH, batch_size=batch_size, max_terms=max_terms
            )
    return found


ALL = tuple(_all())
BY_NAME = {setting.name: setting for setting in ALL}
