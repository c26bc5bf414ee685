"""Whether the noise that a correction takes out is the noise that arrives there.

The second moment of `scale_by_adam_bc` is corrected for noise of a stated level. A
stage between the noise and the correction changes that level: an average of k gradients
divides it by the root of k. Such a stage shows in the program of the update, between
the gradient that goes in and the place where the correction gets it.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
import optax

from dpadambc._core import precision
from dpadambc.mechanisms.base import Mechanism
from dpadambc.transforms import _corrections

# They move numbers, and change none.
_MOVES = {
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "optimization_barrier",
    "reshape",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
}
_LOOPS = {"scan", "while"}


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, jex.Literal)]


def _bodies(eqn: jex.JaxprEqn) -> Iterator[tuple[jex.Jaxpr, Sequence[Any]]]:
    """The programs inside an equation, with the operands that go into them.

    None are given for a loop, whose numbers change on the way.
    """
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(inner, "jaxpr", inner)
            if isinstance(jaxpr, jex.Jaxpr):
                # The first operand of a branch says which it is.
                operands = eqn.invars[eqn.primitive.name == "cond" :]
                yield jaxpr, () if eqn.primitive.name in _LOOPS else operands


class _Gradient:
    """Follows the gradient through a program, as far as it is untouched."""

    def __init__(self):
        self.arrives_untouched: list[bool] = []  # at each correction

    def follow(self, jaxpr: jex.Jaxpr, untouched: set[Any]) -> list[bool]:
        """For each output, whether it is a part of the gradient as it came in."""
        for eqn in jaxpr.eqns:
            inputs = _variables(eqn.invars)
            is_same = bool(inputs) and all(x in untouched for x in inputs)
            if eqn.params.get("name") == _corrections.ARRIVES:
                self.arrives_untouched.append(is_same)
            bodies = [self._enter(*body, untouched) for body in _bodies(eqn)]
            if eqn.primitive.name in _MOVES and is_same:
                untouched.update(eqn.outvars)
            elif bodies and eqn.primitive.name not in _LOOPS:
                flags = map(all, zip(*bodies, strict=False))
                same = zip(eqn.outvars, flags, strict=False)
                untouched.update(v for v, is_untouched in same if is_untouched)
        return [bool(_variables([x])) and x in untouched for x in jaxpr.outvars]

    def _enter(
        self, jaxpr: jex.Jaxpr, operands: Sequence[Any], untouched: set[Any]
    ) -> list[bool]:
        pairs = zip(jaxpr.invars, operands, strict=False)
        return self.follow(
            jaxpr, {v for v, x in pairs if _variables([x]) and x in untouched}
        )


def _is_level(level: Any, mechanism: Mechanism) -> bool | None:
    """Whether a level is the mechanism's; None where that cannot be told."""
    known = [level, mechanism.noise_stddev]
    if all(isinstance(x, int | float | np.number) for x in known):
        return bool(np.isclose(*known, rtol=1e-5, atol=0))
    if not all(callable(x) for x in known):
        return None
    steps = (0, mechanism.iterations - 1)
    here, there = ([float(x(step)) for step in steps] for x in known)
    return bool(np.allclose(here, there, rtol=1e-5, atol=0))


def check(
    optimizer: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    mechanism: Mechanism,
) -> jex.ClosedJaxpr:
    """Raises where a correction has the level of noise that something has changed.

    Args:
      optimizer: of the private gradient.
      opt_state: its state, arrays or shapes.
      params: the parameters, arrays or shapes.
      mechanism: whose noise is in the gradient.

    Returns:
      The program of an update.

    Raises:
      ValueError: if a stage stands before a correction that has the mechanism's level.
    """
    gradient = jax.eval_shape(precision.zeros_like, params)
    with _corrections.levels_corrected() as levels:
        closed = jax.make_jaxpr(optimizer.update)(gradient, opt_state, params)
    path = _Gradient()
    of_gradient = closed.jaxpr.invars[: len(jax.tree.leaves(gradient))]
    path.follow(closed.jaxpr, set(of_gradient))
    is_level = [_is_level(level, mechanism) for level in levels]
    if all(path.arrives_untouched):
        if False in is_level:
            wrong = levels[is_level.index(False)]
            warnings.warn(
                f"The correction takes out noise of {wrong}, but the mechanism adds"
                f" {mechanism.noise_stddev}: give it mechanism.noise_stddev.",
                stacklevel=5,  # of the call of fit
            )
    elif True in is_level:
        raise ValueError(
            "Expected the correction to have the level of the noise that reaches it,"
            f" got the mechanism's, {mechanism.noise_stddev}, although a stage before"
            " it changes the level. Inside optax.MultiSteps(..., k), which averages k"
            " gradients, give mechanism.noise_stddev / k**0.5; behind optax.scale(c),"
            " c times it; or put the correction first."
        )
    elif None in is_level:
        warnings.warn(
            "A stage before the correction changes the level of the noise, and fit"
            " cannot see which level the correction was given. It must be that of the"
            " noise that reaches it, such as mechanism.noise_stddev / k**0.5 inside"
            " optax.MultiSteps(..., k).",
            stacklevel=5,  # of the call of fit
        )
    return closed
