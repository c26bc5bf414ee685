"""The places where a program adds noise to data, and the outputs that have none.

Every value of a program (a jaxpr) gets a label. The examples are `DATA`, and so is
every value computed from them, until a random number is added; from there on the value
is `PRIVATE`, and so is every value computed from it alone. Such an addition is a
*crossing*. Other modules measure whether its noise is enough (`steps`, `noise_tests`).
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpadambc.engine import jaxprs

Path = tuple[str, ...]  # an equation's number, and those of the outer ones


class Label(enum.IntEnum):
    """Where a value comes from; a value with several origins takes the most private."""

    PUBLIC = 0
    NOISE = 1  # random bits under a key not made from private values alone
    PRIVATE = 2  # examples with noise
    SCALED = 3  # noise times a private value, and later values
    OPAQUE = 4  # not followed: from the host, or merged with noise
    DATA = 5  # examples without noise


_RANDOM = {"random_bits", "random_fold_in", "random_seed", "random_wrap"}
_RANDOM |= {"rng_bit_generator", "rng_uniform", "threefry2x32"}
# The number of operands of a generator that are its key. A draw with a secret key is
# random for any other operands: the key of a step may be made from the sum too.
_NUM_KEYS = {"random_fold_in": 1, "threefry2x32": 2}
_HOST = {"pure_callback", "io_callback"}
_TELLS_HOST = {"debug_callback", "debug_print", "io_callback", "pure_callback"}
_SUMS = {"add", "add_any", "sub"}
# The library's own addition of noise and a sum, on the grid of a level.
_ON_GRID = "add_on_grid"
# These operations may add noise too, in a way that is not followed.
_MERGES = {"concatenate", "scatter-add", "stack"} | _SUMS
ENTERED = jaxprs.INLINED | jaxprs.CUSTOM | jaxprs.REMATERIALIZED
ENTERED |= {"custom_vmap_call", "shard_map"}


class Crossing(NamedTuple):
    """An addition of noise to a value computed from examples.

    If the program adds more noise to the result, or subtracts it, at once, that is part
    of the same crossing: the noise is the sum.
    """

    path: Path
    noise_operand: int  # which of the two operands is the noise
    is_difference: bool  # whether the second operand is subtracted
    before: "Crossing | None" = None  # the addition that this one continues

    @property
    def chain(self) -> frozenset[Path]:
        """Returns the paths of all additions that make the noise."""
        return (self.before.chain if self.before else frozenset()) | {self.path}


def is_key(x: Any) -> bool:
    """Returns whether an array holds keys: typed, or the words of one."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    is_words = dtype == jnp.uint32 and jnp.shape(x)[-1:] in ((2,), (4,), (8,))
    return is_words or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def label_of_public(x: Any) -> Label:
    """Returns the label of an input besides the examples: a key, or a public number."""
    return Label.NOISE if is_key(x) else Label.PUBLIC


@dataclasses.dataclass
class Flow:
    """The labels of a program, and its crossings.

    Args:
      ignored: additions whose noise does not count: their results stay `DATA`.
      of_constant: the label of a constant of the program.
    """

    ignored: frozenset[Path] = frozenset()
    of_constant: Callable[[Any], Label] = label_of_public

    def __post_init__(self):
        self.crossings: dict[Path, Crossing] = {}
        self.tells_host = False

    def follow(
        self, program: jex.ClosedJaxpr, labels: Sequence[Label], path: Path = ()
    ) -> list[Label]:
        """Returns the labels of the outputs, given those of the operands."""
        jaxpr = program.jaxpr
        constants = map(self.of_constant, program.consts)
        known: dict[Any, Label] = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, labels, strict=True))
        atoms = [*jaxpr.outvars, *(x for eqn in jaxpr.eqns for x in eqn.invars)]
        uses = collections.Counter(x for x in atoms if not jaxprs.is_literal(x))
        noised: dict[Any, Crossing] = {}  # results of crossings
        read = lambda x: Label.PUBLIC if jaxprs.is_literal(x) else known[x]
        for number, eqn in enumerate(jaxpr.eqns):
            operands, here = [read(x) for x in eqn.invars], (*path, str(number))
            name, (out, *_) = eqn.primitive.name, (*eqn.outvars, None)
            is_sum = name in _SUMS and jnp.issubdtype(out.aval.dtype, jnp.floating)
            if is_sum or eqn.params.get("name") == _ON_GRID:
                # A result with noise, used only here.
                before = [
                    None if jaxprs.is_literal(x) or uses[x] != 1 else noised.get(x)
                    for x in eqn.invars[:2]
                ]
                outs = [self._sum(name == "sub", operands[:2], here, before)]
                if here in self.crossings:
                    noised[out] = self.crossings[here]
            elif name in ENTERED:
                outs = self.follow(jaxprs.body(eqn), operands, here)
            elif name in ("cond", "scan", "while"):
                outs = getattr(self, f"_{name}")(eqn, operands, here)
            else:
                outs = [self._result(name, operands)] * len(eqn.outvars)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _result(self, name: str, operands: list[Label]) -> Label:
        """Returns the label of the results of a primitive without an inner program."""
        operands = operands[: _NUM_KEYS.get(name)]
        most = max(operands, default=Label.PUBLIC)
        self.tells_host |= name in _TELLS_HOST and most == Label.DATA
        if name in _RANDOM:
            most = max(most, Label.NOISE)
        if name in _HOST:
            most = max(most, Label.OPAQUE)
        if name in _MERGES and most == Label.DATA and Label.NOISE in operands:
            most = Label.OPAQUE
        if name in ("mul", "div") and set(operands) == {Label.NOISE, Label.PRIVATE}:
            most = Label.SCALED
        return most

    def _sum(
        self,
        is_difference: bool,
        operands: list[Label],
        path: Path,
        before: list[Crossing | None],
    ) -> Label:
        """Returns the label of a sum or a difference of two floating-point arrays."""
        most = max(operands)
        if most == Label.DATA and {Label.OPAQUE, Label.SCALED} & set(operands):
            return Label.OPAQUE  # it may be noise, of an unknown level
        if Label.NOISE not in operands or most < Label.PRIVATE or path in self.ignored:
            return most
        noise_operand = operands.index(Label.NOISE)
        earlier = before[1 - noise_operand]
        if most in (Label.PRIVATE, Label.SCALED) and earlier is None:
            return most
        self.crossings[path] = Crossing(path, noise_operand, is_difference, earlier)
        if earlier is not None:
            self.crossings.pop(earlier.path, None)
        return Label.PRIVATE

    def _cond(self, eqn: jex.JaxprEqn, operands: list[Label], path: Path):
        index, *rest = operands
        branches = [
            self.follow(jaxprs.closed(branch), rest, (*path, str(number)))
            for number, branch in enumerate(eqn.params["branches"])
        ]
        return [max(index, *outs) for outs in zip(*branches, strict=True)]

    def _scan(self, eqn: jex.JaxprEqn, operands: list[Label], path: Path):
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        carried = slice(num_consts, num_consts + num_carry)
        while True:
            outs = self.follow(jaxprs.body(eqn), operands, path)
            carry = list(map(max, operands[carried], outs[:num_carry]))
            if carry == operands[carried]:
                return [*carry, *outs[num_carry:]]
            operands[carried] = carry

    def _while(self, eqn: jex.JaxprEqn, operands: list[Label], path: Path):
        params, of_condition = eqn.params, eqn.params["cond_nconsts"]
        consts = operands[of_condition : of_condition + params["body_nconsts"]]
        carry = operands[len(operands) - len(eqn.outvars) :]
        programs = (params[f"{x}_jaxpr"] for x in ("cond", "body"))
        condition, step = map(jaxprs.closed, programs)
        while True:
            given = [*operands[:of_condition], *carry]
            (goes_on,) = self.follow(condition, given, (*path, "cond"))
            outs = self.follow(step, [*consts, *carry], (*path, "body"))
            after = [max(goes_on, *pair) for pair in zip(carry, outs, strict=True)]
            if after == carry:
                return carry
            carry = after
