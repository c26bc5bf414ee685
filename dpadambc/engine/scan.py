"""Gradients in a `jax.lax.scan`: terms of all steps, stacked or summed.

Each step returns its terms in the cheaper of their two forms. A carry sums the gradient
of a weight that all steps share. Where its terms are factored, the carry is dropped,
and time is contracted with the other axes, in one product after the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpadambc.engine import forms, jaxprs, precision, program, rules
from dpadambc.engine.interface import Gradient

Values = list[Any]  # arrays and gradients
Evaluate = Callable[..., Values]  # (jaxpr, values, which outputs are gradients)
Name = Any  # identifies an output of a step: a variable, or an index


class _Step(NamedTuple):
    """A step of the loop, traced: a function of the carry and the inputs."""

    closed: jex.ClosedJaxpr
    outs: Values  # arrays and gradients, of shapes only
    names: list[list[Name]]  # of the arrays in each output; equal for equal arrays

    def __call__(self, carry: dict[int, jax.Array], x: Sequence[jax.Array]) -> Values:
        flat = jex.jaxpr_as_fun(self.closed)(*carry.values(), *x)
        return jax.tree.unflatten(jax.tree.structure(self.outs), flat)

    def over_steps(self, i: int, stacked: dict[Name, jax.Array]) -> Any:
        """Rebuilds output i with a leading axis of all steps."""
        arrays = [stacked[name] for name in self.names[i]]
        return jax.tree.unflatten(jax.tree.structure(self.outs[i]), arrays)


def _traced(
    step: Callable[..., Values], carry: dict[int, jax.Array], xs: Sequence[jax.Array]
) -> _Step:
    x = jax.eval_shape(lambda xs: [x[0] for x in xs], list(xs))
    closed, outs = jax.make_jaxpr(step, return_shape=True)(carry, x)
    variables = enumerate(closed.jaxpr.outvars)
    flat = [place if jaxprs.is_literal(v) else v for place, v in variables]
    names = jax.tree.unflatten(jax.tree.structure(outs), flat)
    return _Step(closed, outs, [jax.tree.leaves(part) for part in names])


def scan(
    eqn: jex.JaxprEqn,
    values: Values,
    operands: Sequence[jax.Array],
    lazy: Sequence[bool],
    evaluate: Evaluate,
) -> Values:
    """Evaluates a scan: returns gradients where `lazy`, else arrays.

    Args:
      eqn: the scan.
      values: the values of its operands, arrays and gradients.
      operands: the arrays that the values represent.
      lazy: for each output, whether it may be a gradient.
      evaluate: evaluates the body.
    """
    closed = jaxprs.body(eqn)
    num_consts, num_carry = jaxprs.scan_counts(eqn)
    consts, xs = operands[:num_consts], operands[num_consts + num_carry :]
    init = dict(enumerate(operands[num_consts : num_consts + num_carry]))
    before = closed.jaxpr.invars[num_consts : num_consts + num_carry]
    after = closed.jaxpr.outvars[:num_carry]
    sums = [
        is_lazy and program.accumulates(closed.jaxpr, a, b)
        for is_lazy, a, b in zip(lazy, before, after, strict=False)
    ]

    def terms(carry, x):
        """Returns the outputs of a step, with only the new term of a sum."""
        known = [
            rules.no_gradient(v.aval) if is_sum else carry[i]
            for i, (v, is_sum) in enumerate(zip(before, sums, strict=True))
        ]
        outs = evaluate(closed, (*consts, *known, *x), [*sums, *lazy[num_carry:]])
        return [x.cheaper_form() if isinstance(x, Gradient) else x for x in outs]

    step = _traced(terms, init, xs)
    is_formed = lambda out: isinstance(out, forms.Dense | forms.Full)
    dropped = [i for i in init if sums[i] and not is_formed(step.outs[i])]
    given = [*dropped, *range(num_carry, len(step.outs))]
    stacked = dict(zip(step.closed.jaxpr.invars[num_carry:], xs, strict=True))
    # Emit each array once, and no inputs of the steps, which are stacked already.
    names = dict.fromkeys(name for i in given for name in step.names[i])
    emitted = [name for name in names if name not in stacked]

    def one(carry, x):
        outs = step(init | carry, x)
        found = {
            name: array
            for part, out in zip(step.names, outs, strict=True)
            for name, array in zip(part, jax.tree.leaves(out), strict=True)
        }
        # Dense terms are added to their carry, in at least float32.
        added = lambda i: carry[i] + outs[i].dense().astype(carry[i].dtype)
        carry = {i: added(i) if sums[i] else outs[i] for i in carry}
        return carry, [found[name] for name in emitted]

    kept = {i: x for i, x in init.items() if i not in dropped}
    start = {
        i: jnp.asarray(x, precision.at_least_float32(x.dtype)) if sums[i] else x
        for i, x in kept.items()
    }
    loop = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, arrays = jax.lax.scan(one, start, xs, **loop)
    stacked |= dict(zip(emitted, arrays, strict=True))

    def carried(i):
        # sum_t sum_s a_ts g_ts^T is one product, with the steps contracted like t.
        if i in dropped:
            first = forms.as_gradient(values[num_consts + i], "reduce_sum")
            return forms.add(first, step.over_steps(i, stacked).summed())
        if sums[i]:
            return forms.as_gradient(carry[i], step.outs[i].rule)
        return forms.as_gradient(carry[i], "reduce_sum") if lazy[i] else carry[i]

    def stack(i):
        out = step.over_steps(i, stacked)
        return out.stacked() if isinstance(out, Gradient) else out

    return [*map(carried, init), *map(stack, range(num_carry, len(step.outs)))]
