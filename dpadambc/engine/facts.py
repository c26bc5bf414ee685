"""Facts of the arrays in the program of a gradient, known before it is evaluated.

Which are the same for all examples, which repeat a number along an axis, and which have
a form that is smaller than they are. Where such arrays meet, the form is kept.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from dpadambc.engine import jaxprs

Axes = frozenset[int]


class Fact(NamedTuple):
    """Of one array."""

    shared: bool = False  # it depends on no example
    constant: Axes = frozenset()  # axes along which it repeats one number
    factored: bool = False  # it is a gradient with a form smaller than itself


# The first operand that is a factor.
_PRODUCERS = {"dot_general": 0, "conv_general_dilated": 0, "scatter-add": 2}
_ENTRYWISE = {"add", "add_any", "sub", "mul", "div", "neg", "copy", "square"} | {
    *("convert_element_type", "integer_pow", "pow", "sqrt", "rsqrt", "exp", "log"),
    *("max", "min", "sign", "abs", "select_n", "tanh", "logistic"),
}
_LINEAR = {"add", "add_any", "sub", "neg", "copy", "convert_element_type"} | {
    *("broadcast_in_dim", "concatenate", "dot_general", "pad", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "transpose", "unstack"),
}
_ENTERED = jaxprs.INLINED | jaxprs.REMATERIALIZED


def _stacked(eqn: jex.JaxprEqn, outs: Sequence[Fact], shared: bool) -> list[Fact]:
    """Of what a scan returns, from what each step does, and whether all is shared."""
    _, num_carry = jaxprs.scan_counts(eqn)
    return [
        Fact(
            shared or (i >= num_carry and out.shared),
            frozenset(1 + axis for axis in out.constant if i >= num_carry),
            out.factored and not shared,
        )
        for i, out in enumerate(outs)
    ]


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


class Facts:
    """Of all variables of a jaxpr; none, where those of its inputs are None."""

    def __init__(self, jaxpr: jex.Jaxpr, of_inputs: Sequence[Fact] | None):
        self._known: dict[Any, Fact] = {}
        self._is_empty = of_inputs is None
        if of_inputs is not None:
            self._known |= dict.fromkeys(jaxpr.constvars, Fact(shared=True))
            self._known |= dict(zip(jaxpr.invars, of_inputs, strict=True))
            for eqn in jaxpr.eqns:
                facts = self._of_outputs(eqn)
                self._known |= dict(zip(eqn.outvars, facts, strict=True))

    def of(self, atom: Any) -> Fact:
        if jaxprs.is_literal(atom):
            return Fact(shared=not self._is_empty)
        return self._known.get(atom, Fact())

    def of_operands(self, eqn: jex.JaxprEqn) -> list[Fact] | None:
        return None if self._is_empty else [self.of(atom) for atom in eqn.invars]

    def is_narrow(self, atom: Any, beside: Any) -> bool:
        """Whether it has fewer numbers than the other, repeated ones counted once."""
        constant = self.of(atom).constant
        sizes = (n for i, n in enumerate(_shape(atom)) if i not in constant)
        return not self._is_empty and math.prod(sizes) < math.prod(_shape(beside))

    def of_step(self, eqn: jex.JaxprEqn) -> list[Fact] | None:
        """Of the inputs of a step of a scan; nothing is known of what is carried."""
        facts = self.of_operands(eqn)
        if facts is None:
            return None
        consts, carry = jaxprs.scan_counts(eqn)
        within = lambda axes: frozenset(i - 1 for i in axes if i)
        xs = [x._replace(constant=within(x.constant)) for x in facts[consts + carry :]]
        return [*facts[:consts], *[Fact()] * carry, *xs]

    def _of_outputs(self, eqn: jex.JaxprEqn) -> list[Fact]:
        name, facts = eqn.primitive.name, [self.of(atom) for atom in eqn.invars]
        if not eqn.outvars:
            return []
        shared = not eqn.effects and all(fact.shared for fact in facts)
        if name in _ENTERED or name == "scan":
            jaxpr = jaxprs.body(eqn).jaxpr
            inner = Facts(jaxpr, facts if name in _ENTERED else self.of_step(eqn))
            outs = list(map(inner.of, jaxpr.outvars))
            return outs if name in _ENTERED else _stacked(eqn, outs, shared)
        fact = Fact(shared, self._constant(eqn), not shared and self._is_factored(eqn))
        return [fact for _ in eqn.outvars]

    def _constant(self, eqn: jex.JaxprEqn) -> Axes:
        shape = _shape(eqn.outvars[0])
        if eqn.primitive.name == "broadcast_in_dim":
            places = dict(enumerate(eqn.params["broadcast_dimensions"]))
        elif eqn.primitive.name in _ENTRYWISE:
            places = dict(enumerate(range(len(shape))))
        else:
            return frozenset()

        def varies(atom):
            sizes, constant = _shape(atom), self.of(atom).constant
            axes = (j for j, n in enumerate(sizes) if n > 1 and j not in constant)
            return {places[j] for j in axes}

        atoms = [atom for atom in eqn.invars if _shape(atom)]
        return frozenset(range(len(shape))).difference(*map(varies, atoms))

    def _is_factored(self, eqn: jex.JaxprEqn) -> bool:
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        if name in ("mul", "div"):
            x, y = eqn.invars
            pairs = [(x, y)] if name == "div" else [(x, y), (y, x)]
            scaled = lambda a, b: (
                self.of(a).factored and (self.of(b).shared or self.is_narrow(b, out))
            )
            shared = lambda a, b: (
                self.of(a).shared
                and not self.is_narrow(a, out)
                and self.is_narrow(b, out)
            )
            return any(scaled(*pair) or shared(*pair) for pair in pairs)
        if name in _LINEAR and any(self.of(atom).factored for atom in eqn.invars):
            return True
        factors = eqn.invars[_PRODUCERS.get(name, len(eqn.invars)) :]
        size = sum(math.prod(_shape(atom)) for atom in factors)
        unshared = not any(self.of(atom).shared for atom in factors)
        return bool(factors) and unshared and size < math.prod(_shape(out))
