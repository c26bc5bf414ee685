"""How many floating-point operations the products of a program take."""

import math
from typing import Any

import jax.extend.core as jex

from dpadambc.engine import jaxprs


def of_products(jaxpr: jex.Jaxpr) -> int:
    """Of matrix products and convolutions: two for each multiplication and addition.

    Products take nearly all the time of a gradient. Each step of a scan is counted, of
    the branches of a `cond` the dearest, and the body of a `while` once.
    """
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(lhs[i] for i in contracted)
    if name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval
        of_one = kernel.size // max(kernel.shape[features], 1)
        return 2 * eqn.outvars[0].aval.size * of_one
    bodies = [of_products(inner.jaxpr) for inner in jaxprs.inner(eqn)]
    if name == "cond":
        return max(bodies)
    return eqn.params["length"] * sum(bodies) if name == "scan" else sum(bodies)
