"""Programs as JAX traces them (jaxprs): nested programs, and single equations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex

INLINED = {"jit", "pjit", "closed_call", "core_call"}
# Calls with a custom derivative, which is not needed after differentiation.
CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
REMATERIALIZED = {"checkpoint", "remat", "remat2"}


def closed(jaxpr: Any) -> jex.ClosedJaxpr:
    """Returns a jaxpr as a `ClosedJaxpr`, with its constants if it has any."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())


def body(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Returns the program that a call runs, or a scan runs at each step."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
    return closed(next(eqn.params[name] for name in names if name in eqn.params))


def inner(eqn: jex.JaxprEqn) -> Iterator[jex.ClosedJaxpr]:
    """Yields the programs among the parameters of an equation."""
    values = list(eqn.params.values())
    while values:
        value = values.pop(0)
        if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
            yield closed(value)
        elif isinstance(value, tuple | list):
            values[:0] = value


def programs_in(program: jex.ClosedJaxpr) -> Iterator[jex.ClosedJaxpr]:
    """Yields a program and all programs inside it."""
    yield program
    for eqn in program.jaxpr.eqns:
        for each in inner(eqn):
            yield from programs_in(each)


def equations_in(program: jex.ClosedJaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a program and of all programs inside it."""
    for each in programs_in(program):
        yield from each.jaxpr.eqns


def is_literal(atom: Any) -> bool:
    """Returns whether an operand is a literal number."""
    return isinstance(atom, jex.Literal)


def scan_counts(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns the number of constant operands, and the number of carried ones.

    It compares ranks, since releases of JAX store the numbers differently: a per-step
    operand or output has one more axis outside the body.
    """
    jaxpr = body(eqn).jaxpr
    same = lambda outer, inner: [
        a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True)
    ]
    num_carry = sum(same(eqn.outvars, jaxpr.outvars))
    return sum(same(eqn.invars, jaxpr.invars)) - num_carry, num_carry


def bind(
    jaxpr: jex.Jaxpr,
    eqn: jex.JaxprEqn,
    values: Sequence[Any],
    transform: Callable[..., Any] | None = None,
) -> list[Any]:
    """Evaluates one equation of a jaxpr on arrays, as JAX does.

    Args:
      jaxpr: the program of the equation.
      eqn: the equation.
      values: the values of its operands.
      transform: a transformation of the function that evaluates it, if any.
    """
    known = {
        atom: value
        for atom, value in zip(eqn.invars, values, strict=True)
        if not is_literal(atom)
    }
    outs = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
    alone = jaxpr.replace(
        constvars=[], invars=list(known), outvars=outs, eqns=[eqn], effects=eqn.effects
    )
    fun = jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, ()))
    fun = transform(fun) if transform else fun
    results = dict(zip(outs, fun(*known.values()), strict=True))
    return [results.get(v) for v in eqn.outvars]
