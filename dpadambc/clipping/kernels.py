"""Finds the parameters that multiply the data in a loss, and those in penalties."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from dpadambc.core import modules
from dpadambc.core.per_example import Arguments
from dpadambc.engine import jaxprs

# In these products, the gradient of one operand can be larger than both others.
_PRODUCTS = {
    *("dot_general", "conv_general_dilated", "ragged_dot_general"),
    *("gather", "dynamic_slice"),
    *("triangular_solve", "custom_linear_solve"),
}
# A parameter that data multiplies entry by entry is a kernel too.
_BY_ENTRY = {"mul", "div", "select_n"}
# A term of these sums has a gradient of its own, which linear maps of the sum preserve.
_SUMS = {"add", "add_any", "sub", "concatenate", "stack"}
_LINEAR = {"mul", "div", "neg", "reduce_sum", "broadcast_in_dim", "reshape"} | {
    *("squeeze", "convert_element_type", "copy")
}
_CALLS = jaxprs.INLINED | jaxprs.REMATERIALIZED | jaxprs.CUSTOM
_CALLS |= {"cond", "scan", "while"}


class _Origin(NamedTuple):
    """The parameters and the data that a value of the loss is computed from."""

    params: frozenset[str] = frozenset()  # inputs of the value, without a sum
    repeated: frozenset[str] = frozenset()  # those that the value repeats along an axis
    has_data: bool = False
    penalized: frozenset[str] = frozenset()  # those in terms without data


_Origins = list[_Origin]
_Found = dict[str, bool]  # kernels, and whether in a loop of unknown length


class Uses(NamedTuple):
    """The paths of the parameters of a loss, by the way it uses them.

    Attributes:
      multiplying: those that multiply data, or that data index.
      looping: those of them that do so in a loop of unknown length.
      penalized: those in terms of the loss without data, whose gradient all examples
        share.
    """

    multiplying: frozenset[str]
    looping: frozenset[str]
    penalized: frozenset[str]


def uses(fun: Callable[..., Any], parts: Arguments, args: Sequence[Any]) -> Uses:
    """Finds the kernels of a loss, and the parameters in its penalties.

    Kernels multiply data by a matrix product or a convolution, directly or in functions
    of them such as `w * mask`. A bias, a scale and positions are added to data or
    multiply it entry by entry; their gradients are no larger than the arrays they are
    added to. A penalty is found where the loss adds it to the rest, through linear
    maps.

    Args:
      fun: the loss of one example, which is traced.
      parts: the roles of its arguments.
      args: the arguments for one example, arrays or `jax.ShapeDtypeStruct`.
    """
    args, rest = parts.split(args)
    leaves = jax.tree_util.tree_leaves_with_path(parts.params(args))
    paths = iter([jax.tree_util.keystr(path) or "params" for path, _ in leaves])
    origins = {
        i: [_Origin(frozenset({next(paths)})) for _ in jax.tree.leaves(args[i])]
        for i in parts.differentiated
    }
    for i in set(range(len(args))) - origins.keys():
        of_data = _Origin(has_data=i in parts.batched(args))
        origins[i] = [of_data] * len(jax.tree.leaves(args[i]))
    copied = lambda *args: jax.tree.map(lambda x: x, args)
    whole = lambda rest, *args: modules.merge_arguments(copied(*args), rest)
    closed = jax.make_jaxpr(lambda *args: fun(*whole(*args)))(rest, *args)
    still = [_Origin()] * len(jax.tree.leaves(rest))
    found: _Found = {}
    moving = [x for i in sorted(origins) for x in origins[i]]
    loss, *_ = _follow(closed.jaxpr, [*still, *moving], found)
    looping = frozenset(name for name, loops in found.items() if loops)
    return Uses(frozenset(found), looping, loss.penalized)


def _follow(jaxpr: jex.Jaxpr, origins: _Origins, found: _Found) -> _Origins:
    """Returns the origins of the outputs; adds the kernels to `found`."""
    known = dict(zip(jaxpr.invars, origins, strict=True))
    of = lambda x: _Origin() if jaxprs.is_literal(x) else known.get(x, _Origin())
    for eqn in jaxpr.eqns:
        operands = list(map(of, eqn.invars))
        if eqn.primitive.name in _CALLS:
            outs = _inside(eqn, operands, found)
        else:
            outs = [_of_primitive(eqn, operands, found)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outs, strict=True))
    return list(map(of, jaxpr.outvars))


def _inside(eqn: jex.JaxprEqn, origins: _Origins, found: _Found) -> _Origins:
    """Returns the origins of the outputs of an equation's programs, in any branch.

    A carry of a loop has the origins of its values at every step.
    """
    name, params = eqn.primitive.name, eqn.params
    num_consts = num_carry = 0
    if name == "cond":
        bodies, origins = map(jaxprs.closed, params["branches"]), origins[1:]
    elif name == "while":
        bodies = [jaxprs.closed(params["body_jaxpr"])]
        origins = origins[params["cond_nconsts"] :]
        num_consts, num_carry = params["body_nconsts"], len(eqn.outvars)
    else:
        bodies = [jaxprs.body(eqn)]
        if name == "scan":
            num_consts, num_carry = jaxprs.scan_counts(eqn)
    bodies, carried = list(bodies), slice(num_consts, num_consts + num_carry)
    inside: _Found = {}
    while True:
        each = [_follow(body.jaxpr, origins, inside) for body in bodies]
        outs = list(map(_joined, zip(*each, strict=True)))
        pairs = zip(origins[carried], outs[:num_carry], strict=True)
        carry = list(map(_joined, pairs))
        if carry == origins[carried]:
            for kernel, loops in inside.items():
                found[kernel] = found.get(kernel, False) or loops or name == "while"
            return [*carry, *outs[num_carry:]]
        origins[carried] = carry


def _of_primitive(eqn: Any, origins: _Origins, found: _Found) -> _Origin:
    name, joined = eqn.primitive.name, _joined(origins)
    if name in _PRODUCTS and joined.has_data:
        for i, factor in enumerate(origins):
            if _joined(origins[:i] + origins[i + 1 :]).has_data:
                for kernel in factor.params | factor.repeated:
                    found.setdefault(kernel, False)
        return _Origin(has_data=True)
    penalized = _penalized(name, origins)
    if name == "broadcast_in_dim" or name in _BY_ENTRY:
        size = eqn.outvars[0].aval.size
        origins = [
            _Origin(repeated=x.params | x.repeated, has_data=x.has_data)
            if atom.aval.size < size
            else x
            for atom, x in zip(eqn.invars, origins, strict=True)
        ]
        joined = _joined(origins)
    used = [x for x in origins if x != _Origin()]
    if joined.has_data and len(used) > 1 and name not in _BY_ENTRY:
        joined = _Origin(has_data=True)  # a bias added to data, say, is an activation
    elif joined.params and name in _BY_ENTRY:
        joined = joined._replace(repeated=frozenset())  # scales of a kernel
    return joined._replace(penalized=penalized)


def _penalized(name: str, origins: _Origins) -> frozenset[str]:
    """Returns the parameters in terms without data in the output of a primitive."""
    with_data = [x for x in origins if x.has_data]
    is_linear = name in _LINEAR and len(with_data) == 1
    is_reciprocal = name == "div" and not origins[0].has_data
    if not with_data or is_reciprocal or not (name in _SUMS or is_linear):
        return frozenset()
    terms = [x for x in origins if name in _SUMS and not x.has_data]
    return _joined(with_data).penalized.union(*(x.params | x.repeated for x in terms))


def _joined(origins: Sequence[_Origin]) -> _Origin:
    """Returns the origin of a value that is computed from any of several."""
    union = lambda sets: frozenset().union(*sets)
    return _Origin(
        union(x.params for x in origins),
        union(x.repeated for x in origins),
        any(x.has_data for x in origins),
        union(x.penalized for x in origins),
    )
