"""What a program gathers by `graphs.gather`: which members, from which tables."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.extend.core as jex

from dpadambc._core import jaxprs


class Gather(NamedTuple):
    """One call.

    Attributes:
      members: which input of the program they are, just as they came in, if they are.
      num_nodes: how many rows the table has.
      made_of: by what the arrays are known that it is made of, inputs by their number,
        constants by their identity: those of as many rows, or else the longest.
    """

    members: int | None
    num_nodes: int
    made_of: frozenset[int | str]


class _Array(NamedTuple):
    """A variable: which input it is, and all arrays that it is made of."""

    place: int | None
    made_of: Mapping[int | str, int]  # with their lengths


_UNKNOWN = _Array(None, {})


def _length(x: Any) -> int:
    return x.shape[0] if getattr(x, "shape", ()) else 0


def _constants(program: jex.ClosedJaxpr) -> dict[Any, _Array]:
    pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
    return {v: _Array(None, {f"constant {id(x)}": _length(x)}) for v, x in pairs}


def in_program(program: jex.ClosedJaxpr) -> list[Gather]:
    """All calls of `gather` in a program, and in those inside it."""
    inputs = {
        var: _Array(i, {i: _length(var.aval)})
        for i, var in enumerate(program.jaxpr.invars)
    }
    return list(_in(program, inputs))


def are_in(jaxpr: Any) -> bool:
    """Whether there is a `gather` in a program, or in one inside it."""
    return any(True for _ in _calls(jaxpr))


def num_nodes(jaxpr: Any) -> set[int]:
    """How many rows the tables have that it gathers from."""
    return {_length(eqn.invars[0].aval) for eqn in _calls(jaxpr)}


def _is_gather(eqn: jex.JaxprEqn) -> bool:
    return eqn.params.get("name") == "graph_members"


def _calls(jaxpr: Any) -> Iterator[jex.JaxprEqn]:
    for eqn in jaxpr.eqns:
        if _is_gather(eqn):
            yield eqn
        else:
            for inner in jaxprs.inner(eqn):
                yield from _calls(inner.jaxpr)


def _in(program: jex.ClosedJaxpr, inputs: dict[Any, _Array]) -> Iterator[Gather]:
    """The same, given what the inputs of the program are."""
    known = _constants(program) | inputs
    for eqn in program.jaxpr.eqns:
        operands = [
            _UNKNOWN if jaxprs.is_literal(x) else known.get(x, _UNKNOWN)
            for x in eqn.invars
        ]
        if _is_gather(eqn):
            table, members = operands
            rows = _length(eqn.invars[0].aval)
            lengths = table.made_of.values()
            length = rows if rows in lengths else max(lengths, default=0)
            made_of = frozenset(x for x, n in table.made_of.items() if n == length)
            yield Gather(members.place, rows, made_of)
        for inner, given in _bodies(eqn, operands):
            own = dict(zip(inner.jaxpr.invars, given, strict=True))
            yield from () if _is_gather(eqn) else _in(inner, own)
        everything = {x: n for each in operands for x, n in each.made_of.items()}
        known |= dict.fromkeys(eqn.outvars, _Array(None, everything))


def _bodies(
    eqn: jex.JaxprEqn, operands: list[_Array]
) -> Iterator[tuple[jex.ClosedJaxpr, list[_Array]]]:
    """The programs inside an equation, and what their inputs are."""
    if eqn.primitive.name == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_cond, of_body = operands[:first], operands[first : first + second]
        carried = operands[first + second :]
        yield jaxprs.closed(eqn.params["cond_jaxpr"]), [*of_cond, *carried]
        yield jaxprs.closed(eqn.params["body_jaxpr"]), [*of_body, *carried]
        return
    given = operands[eqn.primitive.name == "cond" :]
    for inner in jaxprs.inner(eqn):
        several = len(inner.jaxpr.invars)
        # Of a primitive that is not known, nothing is known of the inputs.
        yield inner, given if several == len(given) else several * [_UNKNOWN]
