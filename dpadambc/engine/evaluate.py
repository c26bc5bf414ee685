"""Evaluates the program of a gradient, and keeps the gradient in factored form.

The program is the jaxpr of the gradient of one example. A first pass, from the outputs
back, finds the variables that reach only gradients, through linear maps that preserve
the form; a second pass evaluates, and leaves these variables in factored form. It
enters the calls `jit`, `checkpoint`, `cond` and `scan`. JAX computes an equation
without a rule, and only that gradient is materialized.

No rule can help where the gradient itself is not a product of small arrays:

* A kernel that is a function of another, entry by entry or through statistics: a mask,
  a norm, weight standardization. Reverse mode multiplies the gradient of the one by an
  array of its size. Scale or standardize the activations instead, where that is
  equivalent: `(x @ w) * scale` for `x @ (w * scale)`. Rows of a table keep their form.
* A kernel in a penalty: its gradient is a product and an array that all examples share.
  That array is public, so it can be added behind the noise instead.
* A kernel at a traced index, `w[i]`. Steps of a loop may use a kernel again, so their
  gradients are materialized and added. Let `jax.lax.scan` go through the kernels, as
  its `xs`. Rows of a table keep their form.
* Kernels gathered for each token, `w[experts]`. The forward pass copies a kernel for
  each token, so the gradients take no more memory. Send tokens to experts instead.

The factors of all layers are held until the norms are known. Microbatches, which hold
the factors of a few examples, replace the memory savings of `jax.checkpoint`. Ghost
clipping has another answer, two passes: norms in the first, and in the second the
gradient of the losses, each times its weight. This module does not do that. It takes
another forward and backward pass, where microbatches take little. And norm and sum
would come from two computations, which may round differently, through cotangents that
are scaled, in which a custom backward pass need not be linear. (`benchmarks/README.md`,
Speed, has the time of microbatches.)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpadambc.engine import forms, isolation, jaxprs, program, rules, scan
from dpadambc.engine.interface import Gradient

Values = list[Any]  # arrays and gradients


def _array(value: Any, aval: Any) -> jax.Array:
    """Returns the array that a value represents."""
    return value.dense().astype(aval.dtype) if isinstance(value, Gradient) else value


def _bind(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: Values) -> Values:
    """Evaluates one equation of a jaxpr on arrays, as JAX does."""
    arrays = [
        value if jaxprs.is_literal(atom) else _array(value, atom.aval)
        for atom, value in zip(eqn.invars, values, strict=True)
    ]
    transform = isolation.BY_PRIMITIVE.get(eqn.primitive.name)
    return jaxprs.bind(jaxpr, eqn, arrays, transform)


def _map_grads(eqn: jex.JaxprEqn, values: Values) -> Values | None:
    """Applies a linear map to gradients, or returns None where the form is lost."""
    name = eqn.primitive.name
    if name not in rules.MAPS or not any(isinstance(v, Gradient) for v in values):
        return None
    if name in ("add", "add_any", "sub", "concatenate"):
        values = [forms.as_gradient(value, name) for value in values]
    out = rules.MAPS[name](eqn.params, *values)
    if out is None:
        return None
    return out if isinstance(out, list) else [out]


def _produce(eqn: jex.JaxprEqn, values: Values) -> Values | None:
    """Returns the factored output of an equation on arrays, or None without a rule."""
    name = eqn.primitive.name
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    is_real = jnp.issubdtype(avals[-1].dtype, jnp.floating)
    if name not in rules.PRODUCERS or not is_real:
        return None
    # These primitives add into their first operand: the output is a gradient only if
    # that is zero.
    kept = 1 if name in rules.INTO_ZEROS else 0
    if not all(map(rules.is_zero, values[:kept])):
        return None
    arrays = map(_array, values[kept:], avals[kept:])
    grad = rules.PRODUCERS[name](eqn.params, *values[:kept], *arrays)
    if grad is None:
        return None
    is_empty = any(0 in aval.shape for aval in avals)
    return [rules.no_gradient(avals[-1]) if is_empty else grad]


def _origin(eqn: jex.JaxprEqn, values: Values) -> str:
    """Returns the reason that a gradient is materialized for each example."""
    name = eqn.primitive.name
    lost = any(
        isinstance(v, Gradient) and not isinstance(v, forms.Dense | forms.Full)
        for v in values
    )
    return f"materialized: {name}" if lost or name in rules.PRODUCERS else name


def _equation(
    jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: Values, lazy: list[bool]
) -> Values:
    """Evaluates one equation: returns gradients where `lazy`, else arrays."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        full = rules.full(eqn.params, values[0])
        if full is not None:
            return [full]
    if not any(lazy) and not program.needs_isolation(eqn):
        return _bind(jaxpr, eqn, values)
    if name in _ENTERED and program.needs_isolation(eqn):
        outs = _ENTERED[name](eqn, values)
        return [
            forms.as_gradient(out, name) if is_lazy else out
            for out, is_lazy in zip(outs, lazy, strict=True)
        ]
    if name in _CALLS and eqn.params.get("length") != 0:
        return _CALLS[name](eqn, values, lazy)
    if any(lazy):
        outs = _map_grads(eqn, values) or _produce(eqn, values)
        if outs is not None:
            return outs
    origin = _origin(eqn, values)
    return [
        forms.as_gradient(out, origin) if is_lazy else out
        for out, is_lazy in zip(_bind(jaxpr, eqn, values), lazy, strict=True)
    ]


def evaluate(
    closed: jex.ClosedJaxpr, args: Sequence[Any], lazy: Sequence[bool]
) -> Values:
    """Evaluates a jaxpr: returns gradients where `lazy`, else arrays."""
    jaxpr = closed.jaxpr
    formed = forms.Dense | forms.Full
    factored = [isinstance(x, Gradient) and not isinstance(x, formed) for x in args]
    demand = program.Demand(jaxpr, lazy, factored)
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if jaxprs.is_literal(atom) else known[atom]
    for eqn in jaxpr.eqns:
        if demand.needs(eqn):
            values = [read(atom) for atom in eqn.invars]
            outs = _equation(jaxpr, eqn, values, demand.lazy(eqn.outvars))
            known.update(zip(eqn.outvars, outs, strict=True))
    return [
        forms.as_gradient(read(atom), origin)
        if is_lazy
        else _array(read(atom), atom.aval)
        for atom, is_lazy, origin in zip(
            jaxpr.outvars, lazy, program.origins(jaxpr), strict=True
        )
    ]


def _call(eqn: jex.JaxprEqn, values: Values, lazy: list[bool]) -> Values:
    return evaluate(jaxprs.body(eqn), values, lazy)


def _checkpoint(eqn: jex.JaxprEqn, values: Values, lazy: list[bool]) -> Values:
    """Evaluates the body behind a barrier: XLA must not reuse the forward pass."""
    if eqn.params["prevent_cse"]:
        values = list(jax.lax.optimization_barrier(tuple(values)))
    return evaluate(jaxprs.body(eqn), values, lazy)


def _zeros_like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _signature(grad: Gradient) -> tuple:
    """Identifies the form of a gradient, with its shapes and dtypes."""
    leaves, structure = jax.tree.flatten(grad)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def _cond(eqn: jex.JaxprEqn, values: Values, lazy: list[bool]) -> Values:
    """Evaluates the branches with one output for each form that any branch returns."""
    index, *operands = values
    branches = [jaxprs.closed(branch) for branch in eqn.params["branches"]]
    avals = [atom.aval for atom in eqn.invars[1:]]
    operands = [_array(v, aval) for v, aval in zip(operands, avals, strict=True)]
    run = lambda branch, *args: evaluate(branch, args, lazy)
    outs = [jax.eval_shape(functools.partial(run, b), *operands) for b in branches]
    # A branch returns zeros for the forms of the other branches, so that all have one
    # type. The sum over the forms is the gradient of the branch taken.
    places: list[dict] = [{} for _ in lazy]
    for out in outs:
        for place, grad, is_lazy in zip(places, out, lazy, strict=True):
            if is_lazy and not forms.is_no_gradient(grad):
                place.setdefault(_signature(grad), grad)

    def in_places(branch, *args):
        placed = []
        for value, place, is_lazy in zip(run(branch, *args), places, lazy, strict=True):
            if is_lazy:
                own = None if forms.is_no_gradient(value) else _signature(value)
                value = [
                    value if form == own else _zeros_like(like)
                    for form, like in place.items()
                ]
            placed.append(value)
        return placed

    placed = jax.lax.switch(
        index, [functools.partial(in_places, b) for b in branches], *operands
    )
    return [
        functools.reduce(forms.add, value, rules.no_gradient(v.aval))
        if is_lazy
        else value
        for value, v, is_lazy in zip(placed, eqn.outvars, lazy, strict=True)
    ]


def _scan(eqn: jex.JaxprEqn, values: Values, lazy: list[bool]) -> Values:
    arrays = [_array(v, a.aval) for v, a in zip(values, eqn.invars, strict=True)]
    return scan.scan(eqn, values, arrays, lazy, evaluate)


def _custom(eqn: jex.JaxprEqn, values: Values) -> Values:
    """Evaluates the body of a call whose custom derivative is not needed here."""
    arrays = [_array(v, a.aval) for v, a in zip(values, eqn.invars, strict=True)]
    return evaluate(jaxprs.body(eqn), arrays, [False] * len(eqn.outvars))


def _while(eqn: jex.JaxprEqn, values: Values) -> Values:
    params = eqn.params
    arrays = [_array(v, a.aval) for v, a in zip(values, eqn.invars, strict=True)]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = arrays[:first], arrays[first : first + second]
    cond, body = (jaxprs.closed(params[x]) for x in ("cond_jaxpr", "body_jaxpr"))
    init = arrays[first + second :]
    return jax.lax.while_loop(
        lambda carry: evaluate(cond, (*of_cond, *carry), [False])[0],
        lambda carry: evaluate(body, (*of_body, *carry), [False] * len(carry)),
        init,
    )


# Entered only to isolate the examples; see `isolation`.
_ENTERED: dict[str, Callable[[jex.JaxprEqn, Values], Values]] = {
    **dict.fromkeys(jaxprs.CUSTOM, _custom),
    "while": _while,
}

_CALLS: dict[str, Callable[[jex.JaxprEqn, Values, list[bool]], Values]] = {
    **dict.fromkeys(jaxprs.INLINED, _call),
    **dict.fromkeys(jaxprs.REMATERIALIZED, _checkpoint),
    "cond": _cond,
    "scan": _scan,
}
