"""Runs a program as it is, and records the operands of its crossings."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dpadambc.audit import flow as _flow
from dpadambc.core.arrays import make_varying
from dpadambc.engine import jaxprs

LONGEST_SCAN = 64  # that is unrolled, where noise is added inside it


class NotRecordable(Exception):
    """A crossing is where its operands cannot be taken out."""


class Record(NamedTuple):
    """What met at a crossing; inside `jax.shard_map`, on each device, along axis 0."""

    data: jax.Array  # what examples made
    noise: jax.Array
    happened: jax.Array  # bool, shape=() or that of the mesh: was the branch taken?
    total: jax.Array  # their sum, in the dtype that the program gives it


Records = dict[_flow.Path, Record]
_STEP = "step"  # in the path of a record, before the number of the step of a scan


def crossing_of(path: _flow.Path) -> _flow.Path:
    """The path of the crossing that a record is of, for any step of a scan."""
    return tuple(
        part
        for before, part in zip((None, *path), path, strict=False)
        if _STEP not in (before, part)
    )


@dataclasses.dataclass
class Recorder:
    """Evaluates programs, and records at the crossings among them."""

    crossings: dict[_flow.Path, _flow.Crossing]

    def __post_init__(self):
        self._all: dict[_flow.Path, _flow.Crossing] = {}
        for crossing in self.crossings.values():
            while crossing is not None:
                self._all[crossing.path] = crossing
                crossing = crossing.before

    def evaluate(
        self, program: jex.ClosedJaxpr, args: Sequence[Any], path: _flow.Path = ()
    ) -> tuple[list[Any], Records]:
        """The outputs of a program, and what met at its crossings."""
        jaxpr, records = program.jaxpr, {}
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        read = lambda x: x.val if jaxprs.is_literal(x) else known[x]
        for number, eqn in enumerate(jaxpr.eqns):
            values, here = [read(x) for x in eqn.invars], (*path, str(number))
            if here in self._all:
                outs = jaxprs.bind(jaxpr, eqn, values)
                records[here] = self._record(self._all[here], values, outs[0], records)
            elif self._has_crossings(here):
                outs, inner = self._enter(eqn, values, here)
                records.update(inner)
            else:
                outs = jaxprs.bind(jaxpr, eqn, values)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars], records

    def _record(
        self, crossing: _flow.Crossing, values: list[Any], total: Any, records: Records
    ) -> Record:
        """Signed, so that the sum of data and noise is the total."""
        index = crossing.noise_operand
        signs = (1, -1 if crossing.is_difference else 1)
        data, noise = (
            signs[i] * jnp.broadcast_to(values[i], jnp.shape(total))
            for i in (1 - index, index)
        )
        if crossing.before is not None:
            earlier, sign = records.pop(crossing.before.path), signs[1 - index]
            spread = lambda x: sign * jnp.broadcast_to(x, jnp.shape(total))
            data, noise = spread(earlier.data), spread(earlier.noise) + noise
        return Record(data, noise, jnp.asarray(True), total)

    def _has_crossings(self, path: _flow.Path) -> bool:
        return any(other[: len(path)] == path for other in self.crossings)

    def _enter(
        self, eqn: jex.JaxprEqn, values: list[Any], path: _flow.Path
    ) -> tuple[list[Any], Records]:
        name = eqn.primitive.name
        if name == "shard_map":
            return self._shard_map(eqn, values, path)
        if name in _flow.ENTERED:
            return self.evaluate(jaxprs.body(eqn), values, path)
        if name == "cond":
            return self._cond(eqn, values, path)
        if name == "scan":
            return self._scan(eqn, values, path)
        raise NotRecordable(f"noise is added inside {name}")

    def _cond(self, eqn: jex.JaxprEqn, values: list[Any], path: _flow.Path):
        index, *rest = values
        results, records = [], {}
        for number, branch in enumerate(eqn.params["branches"]):
            outs, inner = self.evaluate(
                jaxprs.closed(branch), rest, (*path, str(number))
            )
            results.append(outs)
            taken = jnp.asarray(index, jnp.int32) == number
            for where, record in inner.items():
                happened = record.happened & taken
                records[where] = record._replace(happened=happened)
        choose = lambda *outs: _select(index, outs)
        return [choose(*outs) for outs in zip(*results, strict=True)], records

    def _scan(self, eqn: jex.JaxprEqn, values: list[Any], path: _flow.Path):
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        consts, carry = values[:num_consts], values[num_consts:][:num_carry]
        xs = values[num_consts + num_carry :]
        length = eqn.params["length"]
        if length > LONGEST_SCAN:
            raise NotRecordable(f"noise is added inside a scan of {length} steps")
        numbers, each, records = range(length), [None] * length, {}
        for i in reversed(numbers) if eqn.params["reverse"] else numbers:
            outs, inner = self.evaluate(
                jaxprs.closed(eqn.params["jaxpr"]),
                [*consts, *carry, *(x[i] for x in xs)],
                path,
            )
            carry, each[i] = outs[:num_carry], outs[num_carry:]
            records.update(
                {(*where, _STEP, str(i)): record for where, record in inner.items()}
            )
        stacked = [jnp.stack(rows) for rows in zip(*each, strict=True)]
        return [*carry, *stacked], records

    def _shard_map(self, eqn: jex.JaxprEqn, values: list[Any], path: _flow.Path):
        inner, mesh = jaxprs.body(eqn), eqn.params["mesh"]
        where: list[_flow.Path] = []

        axes = tuple(sorted(eqn.params["newly_manual_axes"]))

        def of_device(*args):
            outs, records = self.evaluate(inner, args, path)
            where[:] = records
            own = lambda x: make_varying(x, axes)[None]
            return tuple(outs), jax.tree.map(own, list(records.values()))

        mapped = jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=tuple(eqn.params["in_specs"]),
            out_specs=(tuple(eqn.params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=eqn.params["check_vma"],
        )
        outs, records = mapped(*values)
        return list(outs), dict(zip(where, records, strict=True))


def _select(index: Any, outs: Sequence[Any]) -> Any:
    """The output of the branch that is taken."""
    chosen, index = outs[0], jnp.asarray(index, jnp.int32)
    for number, out in enumerate(outs[1:], start=1):
        chosen = jnp.where(index == number, out, chosen)
    return chosen


def recording(
    program: jex.ClosedJaxpr, crossings: Collection[_flow.Crossing]
) -> Callable[..., tuple[list[Any], Records]]:
    """A function of the operands of a program, that records at its crossings."""
    recorder = Recorder({crossing.path: crossing for crossing in crossings})
    return lambda *args: recorder.evaluate(program, args)
