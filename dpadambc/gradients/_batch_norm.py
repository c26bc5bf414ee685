"""Finds batch normalization of one example: a mean over an axis of size one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

_VIEWS = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy"}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CONTROL_FLOW = {"scan", "while", "cond"}
# What they make of a mean is no statistic any more.
_MIXING = {"dot_general", "conv_general_dilated", "gather"} | _CONTROL_FLOW


class _Value(NamedTuple):
    """An array: what it is a view of, what it is a mean of, whether examples set it."""

    root: Any = None
    means: frozenset[Any] = frozenset()
    varies: bool = False


class CentersOverOne(Exception):
    """Raised where an array has its mean over an axis of size one subtracted."""


def check(jaxpr: Any, of_example: Sequence[bool]) -> None:
    """Raises `CentersOverOne` where the loss of one example sees a batch of one.

    `of_example` are the inputs that an example sets: a kernel may have its mean
    subtracted, as standardized weights do.
    """
    pairs = zip(jaxpr.invars, of_example, strict=True)
    _follow(jaxpr, [_Value(x, varies=varies) for x, varies in pairs])


def _follow(jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda x: (
        _Value() if isinstance(x, jex.Literal) else values.get(x, _Value(x))
    )
    for eqn in jaxpr.eqns:
        outputs = _outputs(eqn, [read(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _outputs(eqn: jex.JaxprEqn, operands: list[_Value]) -> list[_Value]:
    varies = any(operand.varies for operand in operands)
    name = eqn.primitive.name
    outputs = [_Value(out, varies=varies) for out in eqn.outvars]
    called = [eqn.params[key] for key in _CALLS if key in eqn.params]
    if called and name not in _CONTROL_FLOW:
        inner = getattr(called[0], "jaxpr", called[0])
        fits = len(inner.invars) == len(operands)
        return _follow(inner, operands) if fits else outputs
    if name in _VIEWS:
        return operands[:1]
    if name == "reduce_sum":
        shape = getattr(eqn.invars[0].aval, "shape", ())
        if not eqn.params["axes"] or 1 in (shape[i] for i in eqn.params["axes"]):
            means = {operands[0].root} - {None}  # a constant has no root
            return [outputs[0]._replace(means=frozenset(means if varies else ()))]
        return outputs
    if name == "sub" and operands[0].root in operands[1].means:
        raise CentersOverOne
    if name in _MIXING:
        return outputs
    means = frozenset[Any]().union(*(operand.means for operand in operands))
    return [output._replace(means=means) for output in outputs]
