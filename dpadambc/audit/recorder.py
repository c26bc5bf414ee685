"""Runs a program unchanged, and records the operands of its crossings."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dpadambc.audit.flow import ENTERED, Crossing, Path
from dpadambc.core.arrays import make_varying
from dpadambc.engine import jaxprs

_LONGEST_SCAN = 64  # steps that are unrolled, if a scan adds noise
_STEP = "step"  # precedes the number of a scan's step in a path


class NotRecordable(Exception):
    """An error: the operands of a crossing cannot be recorded."""


class Record(NamedTuple):
    """The operands of a crossing; in `jax.shard_map`, of each device along axis 0."""

    data: jax.Array  # computed from examples
    noise: jax.Array
    happened: jax.Array  # bool, shape=() or the mesh's: was the branch taken?
    total: jax.Array  # their sum, in the program's dtype


Records = dict[Path, Record]


def crossing_of(path: Path) -> Path:
    """The path of the crossing of a record, without the steps of scans."""
    pairs = zip((None, *path), path, strict=False)
    return tuple(part for before, part in pairs if _STEP not in (before, part))


class Recorder:
    """An evaluator of programs that records their crossings."""

    def __init__(self, crossings: Iterable[Crossing]):
        self._crossings: dict[Path, Crossing] = {}
        self._last = [crossing.path for crossing in crossings]
        for crossing in crossings:
            while crossing is not None:
                self._crossings[crossing.path] = crossing
                crossing = crossing.before

    def evaluate(
        self, program: jex.ClosedJaxpr, args: Sequence[Any], path: Path = ()
    ) -> tuple[list[Any], Records]:
        """Evaluates a program; returns its outputs and its crossings' records."""
        jaxpr, records = program.jaxpr, {}
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        read = lambda x: x.val if jaxprs.is_literal(x) else known[x]
        for number, eqn in enumerate(jaxpr.eqns):
            values, here = [read(x) for x in eqn.invars], (*path, str(number))
            if here in self._crossings:
                outs = jaxprs.bind(jaxpr, eqn, values)
                crossing = self._crossings[here]
                records[here] = _record(crossing, values, outs[0], records)
            elif any(last[: len(here)] == here for last in self._last):
                outs, inner = self._enter(eqn, values, here)
                records.update(inner)
            else:
                outs = jaxprs.bind(jaxpr, eqn, values)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars], records

    def _enter(
        self, eqn: jex.JaxprEqn, values: list[Any], path: Path
    ) -> tuple[list[Any], Records]:
        name = eqn.primitive.name
        if name in ("cond", "scan", "shard_map"):
            return getattr(self, f"_{name}")(eqn, values, path)
        if name in ENTERED:
            return self.evaluate(jaxprs.body(eqn), values, path)
        raise NotRecordable(f"noise is added inside {name}")

    def _cond(self, eqn: jex.JaxprEqn, values: list[Any], path: Path):
        index, *rest = values
        index = jnp.asarray(index, jnp.int32)
        chosen, records = [], {}
        for number, branch in enumerate(eqn.params["branches"]):
            where = (*path, str(number))
            outs, inner = self.evaluate(jaxprs.closed(branch), rest, where)
            taken = index == number
            where_taken = functools.partial(jnp.where, taken)
            chosen = list(map(where_taken, outs, chosen or outs))
            for where, record in inner.items():
                records[where] = record._replace(happened=record.happened & taken)
        return chosen, records

    def _scan(self, eqn: jex.JaxprEqn, values: list[Any], path: Path):
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        consts, carry = values[:num_consts], values[num_consts:][:num_carry]
        xs, length = values[num_consts + num_carry :], eqn.params["length"]
        if length > _LONGEST_SCAN:
            raise NotRecordable(f"noise is added inside a scan of {length} steps")
        numbers, each, records = range(length), [None] * length, {}
        for i in reversed(numbers) if eqn.params["reverse"] else numbers:
            args = [*consts, *carry, *(x[i] for x in xs)]
            outs, inner = self.evaluate(jaxprs.body(eqn), args, path)
            carry, each[i] = outs[:num_carry], outs[num_carry:]
            records.update({(*p, _STEP, str(i)): record for p, record in inner.items()})
        stacked = [jnp.stack(rows) for rows in zip(*each, strict=True)]
        return [*carry, *stacked], records

    def _shard_map(self, eqn: jex.JaxprEqn, values: list[Any], path: Path):
        inner, axes = jaxprs.body(eqn), tuple(sorted(eqn.params["newly_manual_axes"]))
        paths: list[Path] = []

        def of_device(*args):
            outs, records = self.evaluate(inner, args, path)
            paths[:] = records
            own = lambda x: make_varying(x, axes)[None]
            return tuple(outs), jax.tree.map(own, list(records.values()))

        mapped = jax.shard_map(
            of_device,
            mesh=eqn.params["mesh"],
            in_specs=tuple(eqn.params["in_specs"]),
            out_specs=(tuple(eqn.params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=eqn.params["check_vma"],
        )
        outs, records = mapped(*values)
        return list(outs), dict(zip(paths, records, strict=True))


def _record(
    crossing: Crossing, values: list[Any], total: Any, records: Records
) -> Record:
    """Makes a record with signs, so that the sum of data and noise is the total."""
    index = crossing.noise_operand
    signs = (1, -1 if crossing.is_difference else 1)
    spread = lambda sign, x: sign * jnp.broadcast_to(x, jnp.shape(total))
    with jax.enable_x64(True):  # the library's noise is in float64 here
        data, noise = (spread(signs[i], values[i]) for i in (1 - index, index))
        if crossing.before is not None:
            earlier, sign = records.pop(crossing.before.path), signs[1 - index]
            data = spread(sign, earlier.data)
            noise = spread(sign, earlier.noise) + noise
    return Record(data.astype(float), noise, jnp.asarray(True), total)
