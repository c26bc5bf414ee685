"""Where a program adds noise to what it makes of the examples, and what has none.

Every value of a program (a jaxpr) gets a label. The examples are `DATA`, and so is all
that is computed from them, until something random is added; from there on it is
`PRIVATE`, and so is all that is computed from that alone. Such an addition is a
*crossing*. Whether its noise is enough is a question for numbers (`_crossings`).
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpadambc._core import jaxprs

Path = tuple[str, ...]  # of an equation: its number, and those that it is inside of


class Label(enum.IntEnum):
    """What a value is made of; of several, the greatest."""

    PUBLIC = 0
    NOISE = 1  # of random bits, and of nothing private
    PRIVATE = 2  # of examples with noise
    OPAQUE = 3  # of what the host returns
    DATA = 4  # of examples without noise


_RANDOM = {
    "random_bits",
    "random_seed",
    "random_wrap",
    "rng_bit_generator",
    "rng_uniform",
    "threefry2x32",
}
_HOST = {"pure_callback", "io_callback"}
_TELLS_HOST = {"debug_callback", "debug_print", "io_callback", "pure_callback"}
_SUMS = {"add", "add_any", "sub"}
_WITH_NOISE = (Label.PRIVATE, Label.DATA)
ENTERED = jaxprs.INLINED | jaxprs.CUSTOM | jaxprs.REMATERIALIZED | {"shard_map"}


@dataclasses.dataclass(frozen=True)
class Crossing:
    """An addition of noise to what examples made."""

    path: Path
    noise_operand: int  # which of the two operands is the noise


def while_counts(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """How many operands of a loop are constants of its condition, of its body."""
    condition, step = (
        jaxprs.closed(eqn.params[f"{x}_jaxpr"]).jaxpr for x in ("cond", "body")
    )
    num_carry = len(step.outvars)
    return len(condition.invars) - num_carry, len(step.invars) - num_carry


def is_key(x: Any) -> bool:
    """Whether an array holds keys: typed, or the words of one."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == jnp.uint32 and jnp.shape(x)[-1:] in ((2,), (4,))


def label_of_public(x: Any) -> Label:
    """Of what a program is given beside the examples: a key, or a public number."""
    return Label.NOISE if is_key(x) else Label.PUBLIC


def _is_real(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


@dataclasses.dataclass
class Flow:
    """Labels of a program, and its crossings.

    Args:
      ignored: crossings whose noise is not enough: what goes through is `DATA` still.
    """

    ignored: frozenset[Path] = frozenset()

    def __post_init__(self):
        self.crossings: dict[Path, Crossing] = {}
        self.tells_host = False

    def follow(
        self, program: jex.ClosedJaxpr, labels: Sequence[Label], path: Path = ()
    ) -> list[Label]:
        """The labels of the outputs, given those of the operands."""
        jaxpr = program.jaxpr
        known: dict[Any, Label] = dict(zip(jaxpr.invars, labels, strict=True))
        known.update(
            zip(jaxpr.constvars, map(label_of_public, program.consts), strict=True)
        )
        read = lambda x: Label.PUBLIC if jaxprs.is_literal(x) else known[x]
        for number, eqn in enumerate(jaxpr.eqns):
            operands = [read(x) for x in eqn.invars]
            outs = self._equation(eqn, operands, (*path, str(number)))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(
        self, eqn: jex.JaxprEqn, operands: list[Label], path: Path
    ) -> list[Label]:
        name = eqn.primitive.name
        most = max(operands, default=Label.PUBLIC)
        if name in _TELLS_HOST and most == Label.DATA:
            self.tells_host = True
        if name in _SUMS and _is_real(eqn.outvars[0].aval):
            return [self._sum(operands, path)]
        if name in ENTERED:
            return self.follow(jaxprs.body(eqn), operands, path)
        if name in ("cond", "scan", "while"):
            return getattr(self, f"_{name}")(eqn, operands, path)
        if name in _RANDOM:
            most = max(most, Label.NOISE)
        if name in _HOST:
            most = max(most, Label.OPAQUE)
        return [most for _ in eqn.outvars]

    def _sum(self, operands: list[Label], path: Path) -> Label:
        """What the sum of two floating-point arrays is."""
        most = max(operands)
        if Label.OPAQUE in operands and most == Label.DATA:
            return Label.OPAQUE  # it may be noise that the host has drawn
        if Label.NOISE not in operands or most not in _WITH_NOISE:
            return most
        if most == Label.PRIVATE:
            return most
        if path in self.ignored:
            return Label.DATA
        self.crossings[path] = Crossing(path, operands.index(Label.NOISE))
        return Label.PRIVATE

    def _cond(self, eqn: jex.JaxprEqn, operands: list[Label], path: Path):
        index, *rest = operands
        branches = [
            self.follow(jaxprs.closed(branch), rest, (*path, str(number)))
            for number, branch in enumerate(eqn.params["branches"])
        ]
        return [max(index, *outs) for outs in zip(*branches, strict=True)]

    def _scan(self, eqn: jex.JaxprEqn, operands: list[Label], path: Path):
        jaxpr = jaxprs.closed(eqn.params["jaxpr"])
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        carried = slice(num_consts, num_consts + num_carry)
        while True:
            outs = self.follow(jaxpr, operands, path)
            carry = list(map(max, operands[carried], outs[:num_carry]))
            if carry == operands[carried]:
                return [*carry, *outs[num_carry:]]
            operands[carried] = carry

    def _while(self, eqn: jex.JaxprEqn, operands: list[Label], path: Path):
        condition, step = (
            jaxprs.closed(eqn.params[f"{x}_jaxpr"]) for x in ("cond", "body")
        )
        of_condition, of_step = while_counts(eqn)
        consts, carry = operands[: of_condition + of_step], operands[of_condition:]
        carry = carry[of_step:]
        while True:
            (goes_on,) = self.follow(
                condition, [*consts[:of_condition], *carry], (*path, "cond")
            )
            outs = self.follow(step, [*consts[of_condition:], *carry], (*path, "body"))
            after = [max(goes_on, *pair) for pair in zip(carry, outs, strict=True)]
            if after == carry:
                return carry
            carry = after
