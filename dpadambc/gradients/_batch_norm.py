"""Finds normalisation over an axis of size one: a BatchNorm that sees one example."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex

_VIEWS = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy"}
_STOP = {"dot_general", "conv_general_dilated", "gather", "scan", "while", "cond"}


def _inner(eqn: jex.JaxprEqn) -> Any:
    """The jaxpr of a call, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        jaxpr = eqn.params.get(name)
        if jaxpr is not None and eqn.primitive.name not in _STOP:
            return getattr(jaxpr, "jaxpr", jaxpr)
    return None


class _Walk:
    """Follows a program forwards: what is a statistic of what, and what is centred."""

    def __init__(self):
        self.root: dict[Any, Any] = {}  # variable: the one that it is a view of
        self.statistics: dict[Any, set] = {}  # variable: those that it is a mean of
        self.names: dict[Any, set[str]] = {}  # variable: parameters it is made of
        self.centred: set[Any] = set()
        self.found: set[str] = set()
        self.any_found = False

    def run(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            inner = _inner(eqn)
            if inner is not None and len(inner.invars) == len(eqn.invars):
                self._enter(eqn, inner)
            elif eqn.primitive.name not in _STOP and eqn.outvars:
                self._equation(eqn)

    def _enter(self, eqn: jex.JaxprEqn, jaxpr: Any) -> None:
        self._copy(eqn.invars, jaxpr.invars)
        self.run(jaxpr)
        self._copy(jaxpr.outvars, eqn.outvars)

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if isinstance(source, jex.Literal):
                continue
            self.root[target] = self.root.get(source, source)
            self.statistics[target] = self.statistics.get(source, set())
            self.names[target] = self.names.get(source, set())
            if source in self.centred:
                self.centred.add(target)

    def _equation(self, eqn: jex.JaxprEqn) -> None:
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        operands = [x for x in eqn.invars if not isinstance(x, jex.Literal)]
        roots = [self.root.get(x, x) for x in operands]
        if name in _VIEWS and operands:
            self.root[out] = roots[0]
        elif name == "reduce_sum":
            shape = getattr(operands[0].aval, "shape", ())
            sizes = [shape[axis] for axis in eqn.params["axes"]]
            is_single = not sizes or 1 in sizes
            self.statistics[out] = {roots[0]} if is_single else set()
            return
        elif name == "sub" and len(operands) == 2:
            if roots[0] in self.statistics.get(operands[1], set()):
                self.centred.add(out)
                self.any_found = True
        self._spread(operands, out, name == "add")

    def _spread(self, operands: Sequence[Any], out: Any, is_sum: bool) -> None:
        collect = lambda sets: set().union(*(sets.get(x, set()) for x in operands))
        self.names[out] = collect(self.names)
        if out not in self.centred:
            self.statistics[out] = collect(self.statistics)
        if any(x in self.centred for x in operands):
            others = (x for x in operands if x not in self.centred)
            names = set().union(*(self.names.get(x, set()) for x in others))
            self.found.update(names)
            # The bias ends the normalisation; what comes after it is another layer's.
            if not (names and is_sum):
                self.centred.add(out)


def normalised_over_one(jaxpr: Any, names: Sequence[str | None]) -> Iterator[str]:
    """Yields a sentence where data are centred over an axis of size one.

    Args:
      jaxpr: of the loss of one example.
      names: of each input that is a parameter, None for others.
    """
    walk = _Walk()
    for var, name in zip(jaxpr.invars, names, strict=True):
        walk.names[var] = {name} if name is not None else set()
    walk.run(jaxpr)
    if walk.any_found:
        after = f", before {', '.join(sorted(walk.found))}" if walk.found else ""
        yield (
            f"The loss subtracts a mean over an axis of size one{after}: batch"
            " normalisation, say. It mixes the examples of a batch, which per-example"
            " gradients cannot, so it sees one example alone: other data than the model"
            " was made for, without a gradient where that is a single number. Use group"
            " or layer normalisation, or statistics that are fixed."
        )
