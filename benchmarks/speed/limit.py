"""How many operations a private gradient takes, against those of an ordinary one.

On a machine that does nothing but arithmetic, their ratio is the ratio of the times.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend

from benchmarks.speed import contenders
from benchmarks.speed.models import Problem

Jaxpr = jax.extend.core.Jaxpr
ClosedJaxpr = jax.extend.core.ClosedJaxpr


class Operations(NamedTuple):
    """Floating-point operations of one call."""

    non_private: float
    private: float

    @property
    def ratio(self) -> float:
        return self.private / self.non_private


def _compiled_operations(fun: Callable[..., Any], args: Sequence[Any]) -> float:
    """What the compiler counts, which is the body of a loop once.

    That for CPUs: others call libraries, and do not know what these do.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.default_device(jax.devices("cpu")[0]):
        analysis: Any = jax.jit(fun).lower(*shapes).compile().cost_analysis()
    return analysis.get("flops", 0.0)


def _inner_jaxprs(value: Any) -> Iterator[Jaxpr]:
    """The jaxprs in a parameter of an equation."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner_jaxprs(item)


def _other_iterations(jaxpr: Jaxpr) -> float:
    """The operations in all iterations of all scans but the first ones."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body, length = equation.params["jaxpr"], equation.params["length"]
            once = _compiled_operations(
                jax.extend.core.jaxpr_as_fun(body), body.in_avals
            )
            total += (length - 1) * once + length * _other_iterations(body.jaxpr)
            continue
        params = dict(equation.params)
        if platforms := params.pop("branches_platforms", None):
            is_cpu = [of is None or "cpu" in of for of in platforms]
            params = {"branch": params["branches"][is_cpu.index(True)]}
        for inner in _inner_jaxprs(list(params.values())):
            total += _other_iterations(inner)
    return total


def count(fun: Callable[..., Any], *args: Any) -> float:
    """The operations of a call, with those of every iteration of its scans."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    return _compiled_operations(fun, args) + _other_iterations(jaxpr.jaxpr)


def of_contenders(problem: Problem) -> dict[str, float]:
    """The operations of the gradient of each contender."""
    grad_fns, _ = contenders.build(problem)
    args = (problem.params, *problem.batch)
    return {name: count(grad_fn, *args) for name, grad_fn in grad_fns.items()}


def operations(problem: Problem) -> Operations:
    """The operations of the ordinary and of the private gradient."""
    args = (problem.params, *problem.batch)
    return Operations(
        non_private=count(contenders.non_private(problem), *args),
        private=count(contenders.private(problem), *args),
    )
