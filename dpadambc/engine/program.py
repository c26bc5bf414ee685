"""Analyses of the jaxpr of a gradient before it is evaluated.

They find the variables that may stay factored: those that reach only gradients, through
linear maps that preserve the form. They also find the carries of a scan that are sums.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from dpadambc.engine import isolation, jaxprs, rules

_ENTERED = jaxprs.INLINED | jaxprs.REMATERIALIZED | jaxprs.CUSTOM
_SUMS = {"add", "add_any"}
_MOVES = {"convert_element_type", "reshape", "squeeze", "transpose"}


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def origins(jaxpr: jex.Jaxpr) -> list[str]:
    """Returns the reason that each output is dense: a product, or an array by itself.

    A product is an array where another operation needs it, such as when parameters
    share a kernel, `w + jnp.exp(v)`.
    """
    products: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _MOVES and not jaxprs.is_literal(eqn.invars[0]):
            name = products.get(eqn.invars[0], name)
        if name in rules.PRODUCERS:
            products[eqn.outvars[0]] = name
    of = lambda x: "direct" if jaxprs.is_literal(x) else products.get(x, "direct")
    return list(map(of, jaxpr.outvars))


class Demand:
    """The variables of a jaxpr that are used, and those that are used as arrays.

    Args:
      jaxpr: the program.
      lazy: for each output, whether it may be a gradient.
      of_tables: for each input, whether it may be the gradient of a table.
    """

    def __init__(
        self, jaxpr: jex.Jaxpr, lazy: Sequence[bool], of_tables: Sequence[bool]
    ):
        self._used, self._strict = set(), set()
        self._uniform = {
            eqn.outvars[0]
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "broadcast_in_dim" and not _shape(eqn.invars[0])
        }
        self._of_tables = _gradients_of_tables(jaxpr, of_tables)
        self._use(jaxpr.outvars, lazy)
        for eqn in reversed(jaxpr.eqns):
            if self.needs(eqn):
                self._use(eqn.invars, self._may_be_grads(eqn))

    def needs(self, eqn: jex.JaxprEqn) -> bool:
        return bool(eqn.effects) or any(v in self._used for v in eqn.outvars)

    def lazy(self, variables: Sequence[Any]) -> list[bool]:
        """Returns, for each variable, whether it may be a gradient."""
        return [v in self._used and v not in self._strict for v in variables]

    def strict(self, variables: Sequence[Any]) -> list[bool]:
        """Returns, for each variable, whether it must be an array."""
        return [v in self._strict for v in variables]

    def _use(self, atoms: Sequence[Any], lazy: Sequence[bool]) -> None:
        for atom, is_lazy in zip(atoms, lazy, strict=True):
            if not jaxprs.is_literal(atom):
                self._used.add(atom)
                if not is_lazy:
                    self._strict.add(atom)

    def _may_be_grads(self, eqn: jex.JaxprEqn) -> list[bool]:
        """Returns, for each operand, whether it may be a gradient."""
        name, outs = eqn.primitive.name, eqn.outvars
        if name in jaxprs.INLINED or name in jaxprs.REMATERIALIZED:
            jaxpr = jaxprs.body(eqn).jaxpr
            inner = Demand(jaxpr, self.lazy(outs), self._are_of_tables(eqn.invars))
            return [not strict for strict in inner.strict(jaxpr.invars)]
        if name not in rules.MAPS or any(self.strict(outs)):
            return [False for _ in eqn.invars]
        of_tables = self._are_of_tables(eqn.invars)
        if name in rules.OF_ENTRIES:
            # A gradient times a number is a gradient; times an array, only a lookup is.
            uniform = [
                name in ("mul", "div") and self._is_uniform(atom) for atom in eqn.invars
            ]
            operands = rules.OF_ENTRIES[name]
            return [
                i in operands and not is_uniform and (any(uniform) or of_table)
                for i, (is_uniform, of_table) in enumerate(
                    zip(uniform, of_tables, strict=True)
                )
            ]
        if name == "dot_general":
            # Of a product of three arrays, the larger product of two stays factored. So
            # does a product that a square matrix multiplies, which keeps its size.
            *sizes, out = (math.prod(_shape(atom)) for atom in (*eqn.invars, *outs))
            others = reversed(sizes)
            return [
                of_table or size == out or size > max(other, out)
                for of_table, size, other in zip(of_tables, sizes, others, strict=True)
            ]
        # The padding value of a gradient is not a gradient.
        return [i == 0 or name != "pad" for i in range(len(eqn.invars))]

    def _are_of_tables(self, atoms: Sequence[Any]) -> list[bool]:
        return [not jaxprs.is_literal(x) and x in self._of_tables for x in atoms]

    def _is_uniform(self, atom: Any) -> bool:
        return not _shape(atom) or atom in self._uniform


def _gradients_of_tables(jaxpr: jex.Jaxpr, given: Sequence[bool]) -> set[Any]:
    """Returns the outputs of lookups' transposes, and linear maps of them."""
    found = {v for v, is_one in zip(jaxpr.invars, given, strict=True) if is_one}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        are = [not jaxprs.is_literal(x) and x in found for x in eqn.invars]
        if name == "scan" or name in _ENTERED:
            body = jaxprs.body(eqn).jaxpr
            inside = _gradients_of_tables(body, are)
            pairs = zip(eqn.outvars, body.outvars, strict=True)
            found |= {v for v, x in pairs if not jaxprs.is_literal(x) and x in inside}
        elif name in rules.OF_TABLES or (name in rules.MAPS and any(are)):
            found |= set(eqn.outvars)
    return found


def accumulates(jaxpr: jex.Jaxpr, before: Any, after: Any) -> bool:
    """Returns whether `after` is `before` plus other terms, without any other use.

    No sum between them may be used twice: the other use would miss the dropped carry.
    """
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    uses = collections.Counter(atom for atom in atoms if not jaxprs.is_literal(atom))

    def leads_back(atom):
        if jaxprs.is_literal(atom) or uses[atom] != 1:
            return False
        if atom is before:
            return True
        is_sum = atom in made_by and made_by[atom].primitive.name in _SUMS
        return is_sum and any(map(leads_back, made_by[atom].invars))

    return leads_back(after)


def needs_isolation(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation, or one inside it, needs `isolation`."""
    inner = (x for each in jaxprs.inner(eqn) for x in each.jaxpr.eqns)
    return eqn.primitive.name in isolation.BY_PRIMITIVE or any(
        map(needs_isolation, inner)
    )
