"""The identity of a run: its public numbers, and checksums of the rest.

Three things rest on it. Batches are drawn by a key that the identity is folded into, so
that two runs with one key do not draw the same. A checkpoint resumes only the run that
wrote it. And processes that train one model must agree on it.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dpadambc.core import data as _data
from dpadambc.core import leaves, modules
from dpadambc.core.arrays import widen
from dpadambc.core.keys import checksum, words_of
from dpadambc.core.noise import AddDPNoiseState
from dpadambc.core.per_example import check_floating, scalar_loss
from dpadambc.core.spending import public_numbers
from dpadambc.core.step import Step, positional, takes_key
from dpadambc.engine.jaxprs import equations_in, programs_in

Identity = dict[str, Any]

# Addresses, and the devices that an array is placed on. (The number of devices over
# which a program sums, in `shard_map`, is part of the program.)
_INCIDENTAL = (
    r"0x[0-9a-f]+"
    r"|\s(ctx|context)_mesh=Mesh\((?:[^()]|\([^()]*\))*\)"
    r"|(?<=NamedSharding\()mesh=Mesh\((?:[^()]|\([^()]*\))*\)"
)


def _essence(text: str) -> str:
    """Removes line breaks, addresses and devices from a text.

    A space between two names stays: it may be the only separator.
    """
    one_line = re.sub(r"\s+", " ", re.sub(_INCIDENTAL, "", text))
    return re.sub(r" ?([\[\](){}]) ?", r"\1", one_line)


def of_values(tree: Any) -> str:
    """Computes a checksum of numbers, shapes and dtypes of a tree, on any devices."""
    digest = hashlib.sha256(_essence(str(jax.tree.structure(tree))).encode())
    for x in map(jnp.asarray, jax.tree.leaves(tree)):
        digest.update(f"{x.shape} {x.dtype}".encode())
        digest.update(np.asarray(checksum(x)).tobytes())
    return digest.hexdigest()[:16]


def of_program(program: jex.ClosedJaxpr) -> str:
    """Computes a checksum of the operations of a program and every constant in it.

    It does not depend on the devices: on others the same program differs by rounding.
    """
    constants = [x for each in programs_in(program) for x in each.consts]
    for equation in equations_in(program):
        constants += [x.val for x in equation.invars if isinstance(x, jex.Literal)]
    text = _essence(str(program)) + of_values(constants)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def traced_programs(
    step: Step, params: Any, frozen: Any, data: Any
) -> list[jex.ClosedJaxpr]:
    """Traces the programs of a run besides its clip and its noise, without devices.

    They are the two of the optimizer, the loss of one example, and a schedule of noise.

    Raises:
      TypeError: if a parameter cannot be trained, or a function does not take its
        arguments.
      ValueError: if there are no parameters, the optimizer adds noise or returns
        updates of other shapes, the loss is no scalar, or a node may be in more
        examples than the mechanism accounts for.
    """
    optimizer, mechanism = step.optimizer, step.mechanism
    modules.refuse_shared(params)
    trained, _ = modules.split(params, step.wrt)
    if not jax.tree.leaves(trained):
        raise ValueError("Expected params to train, got a tree without arrays.")
    check_floating(trained)
    leaves.check(frozen=frozen)
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    arguments = params, trained, frozen, _data.one_example(data)
    params, trained, frozen, example = jax.tree.map(shape, arguments)
    wide = jax.eval_shape(lambda tree: jax.tree.map(widen, tree), trained)
    # New functions: JAX would return the cached trace of an old one, with stale values.
    trace = lambda fun: jax.make_jaxpr(lambda *x: fun(*x), return_shape=True)
    init, state = trace(optimizer.init)(wide)
    is_noise = lambda node: isinstance(node, AddDPNoiseState)
    if any(map(is_noise, jax.tree.leaves(state, is_leaf=is_noise))):
        raise ValueError(
            "Expected optimizer to take the private gradient, got one that adds noise:"
            " fit clips and adds the noise itself. Instead of dp_adam_bc(...) give"
            " adam_bc(1e-3, mechanism), instead of dp_sgd(...) optax.sgd(1e-3)."
        )
    try:  # gradients are wide too
        update, (updates, _) = trace(optimizer.update)(wide, state, trained)
    except Exception as error:
        raise TypeError(
            "Expected optimizer to take the private gradient, its state and params, got"
            f" {error!r}. No loss of a batch is private: docs/guides/optimizers.md has"
            " the way of those that ask for it, and of optax.lookahead."
        ) from error
    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
    if shapes(updates) != shapes(trained):
        raise ValueError(
            "Expected optimizer to return updates with the shapes of params,"
            f" {shapes(trained)}, got {shapes(updates)}. One of the gradients of single"
            " examples, such as optax.contrib.dpsgd, is not for fit."
        )
    shared = () if frozen is None else (frozen,)
    key = (jax.random.key(0),) if takes_key(step.loss_fn) else ()
    loss_fn = positional(step.loss_fn, has_frozen=frozen is not None)
    of_one = scalar_loss(loss_fn, has_aux=False, rest={}, wrt=step.wrt)
    loss, _ = trace(of_one)(params, *shared, *example, *key)
    mechanism._check_loss(loss, example)
    levels = mechanism.noise_multiplier
    schedule = [trace(levels)(jnp.zeros([], int))[0]] if callable(levels) else []
    return [init, update, loss, *schedule]


def of_run(
    numbers: Identity, programs: Sequence[Any], earlier: Any, *values: Any
) -> Identity:
    """Returns the identity of a run before its first step; *secret*.

    Args:
      numbers: the public numbers of its mechanism.
      programs: the programs of the optimizer, the loss of one example, and a schedule.
      earlier: the spending of earlier runs, which is in the epsilon of this one.
      *values: parameters, frozen, and data: arrays, or a source, identified by its
        length and first example.
    """
    params, frozen, data = values
    names = {x.primitive.name for each in programs for x in equations_in(each)}
    # Without names: a script that is run again has new ones.
    runs = [] if earlier is None else earlier.runs
    first = lambda source: leaves.with_dictionaries(source[0])
    spent = [(public_numbers(run.mechanism), run.levels) for run in runs]
    return numbers | {
        "program": " ".join(map(of_program, programs)),
        "callbacks": sorted(names & {"pure_callback", "io_callback"}),
        "start": of_values(params),
        "frozen": of_values(frozen),
        "data": of_values((len(data), first(data)) if _data.is_source(data) else data),
        "spent_before": json.dumps(spent) if spent else None,
    }


def without_iterations(identity: Identity) -> Identity:
    """Removes `iterations` from an identity, also inside another mechanism."""
    return {
        name: without_iterations(x) if isinstance(x, dict) else x
        for name, x in identity.items()
        if name != "iterations"
    }


def digest(identity: Identity) -> np.ndarray:
    """Hashes an identity to 64 bits, shape (2,), uint32.

    The number of steps is not part of the hash: a run may be extended.
    """
    return words_of(json.dumps(without_iterations(identity), sort_keys=True))


# Several processes.


def compare_processes(identity: Identity, settings: Sequence[Any]) -> None:
    """Raises unless the processes of one run are about to do the same."""
    here = digest(identity | {"settings": repr(settings)})
    if (multihost_utils.process_allgather(here) != here).any():
        raise ValueError(
            "Expected the same mechanism, loss, optimizer, params, data and settings in"
            " all processes of one run, got others in another process. A source has"
            " every example in all of them; of rows in each process make one array, by"
            " jax.make_array_from_process_local_data."
        )
