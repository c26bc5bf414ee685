"""Checkpoints of a run, exact to resume; they need `dpadambc[checkpoints]`, for Orbax.

A checkpoint has two parts: `state`, nested dictionaries with the names of the fields,
which Orbax reads without this library; and `about`, JSON that identifies the run. Orbax
writes both to a temporary folder and renames it at the end: a run that is killed while
it saves does not change the last checkpoint. *A checkpoint is secret*, because it has
the keys; `training.save_release` writes the part that may be published.
"""

import functools
import logging
import operator
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import validate
from dpadambc.core.identity import Identity, of_values, without_iterations
from dpadambc.core.step import TrainState

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "training.checkpoints needs Orbax: pip install 'dpadambc[checkpoints]'."
    ) from error


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _named(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names on the path to a leaf, escaped for Orbax's paths."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return tuple(
        part.replace("%", "%25").replace(".", "%2E").replace("/", "%2F")
        for part in parts
    )


def _leaves(state: TrainState) -> dict[tuple[str, ...], jax.Array]:
    """Maps names to leaves; names that read alike are numbered."""
    found: dict[tuple[str, ...], jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names, number = _named(path), 1
        while names in found:
            number += 1
            names = (*names[:-1], f"{_named(path)[-1]}#{number}")
        found[names] = leaf
    return found


def _nested(leaves: dict[tuple[str, ...], jax.Array]) -> dict[str, Any]:
    """Nests names in dictionaries, which plain Orbax reads; keys become `key_data`.

    Orbax does not save empty arrays: they are left out.
    """
    tree: dict[str, Any] = {}
    for (*parents, name), leaf in leaves.items():
        array = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if array.size:
            within = lambda node, parent: node.setdefault(parent, {})
            functools.reduce(within, parents, tree)[name] = array
    return tree


def _place(x: jax.Array) -> Any:
    """Returns the target of a read: the array's sharding, or else the host."""
    if x.committed:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return np.empty(x.shape, x.dtype)  # otherwise Orbax commits it to a device


def _as(old: jax.Array, found: Any) -> jax.Array:
    """Converts an array to a key where the old leaf is a key."""
    array = jnp.asarray(found)
    if _is_key(old):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(old))
    return array


def _with_structure_of(like: TrainState, tree: dict[str, Any]) -> TrainState:
    """Returns the state with the arrays of a nested dictionary."""
    leaves = _leaves(like)
    for path, old in leaves.items():
        if old.size:
            leaves[path] = _as(old, functools.reduce(operator.getitem, path, tree))
    return jax.tree.unflatten(jax.tree.structure(like), leaves.values())


def _shapes(tree: dict[str, Any]) -> dict[str, list[Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): [list(x.shape), str(x.dtype)] for path, x in leaves
    }


_MEANING = {
    "program": "of another loss, optimizer, schedule of noise or release of JAX",
    "start": "which begins elsewhere",
    "frozen": "of other numbers in frozen",
    "data": "of other data",
}


def _refuse_other_run(path: pathlib.Path, there: Identity, here: Identity) -> None:
    """Raises if a checkpoint is of another run than this one."""
    spent, given = (x.get("spent_before") for x in (there, here))
    if spent != given:
        raise ValueError(
            f"Expected the spent= that the run of {path} began with,"
            f" {spent or 'nothing'}, got {given or 'nothing'}. To add an earlier run"
            " that was forgotten then, compose it with the result:"
            " dpadambc.accounting.compose."
        )
    there, here = map(without_iterations, (there, here))
    differences = [
        f"{name}: another, {_MEANING[name]}"
        if name in _MEANING
        else f"{name}: {there.get(name)} there, {here.get(name)} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise ValueError(
            f"Expected {path} to be of this run, got one of another run"
            f" ({'; '.join(differences)}). Resume with the original settings, or begin"
            " in another folder: then both runs count, by spent=."
        )


class Checkpoints:
    """A folder of checkpoints, for `training.fit`.

    Guarantees:
      * A checkpoint is complete or absent, whenever the run is killed, and when the
        disk is full. The previous one is removed only when the new one is complete.
      * A state comes back bit for bit, with its keys and its step, or not at all: a
        checksum finds damage.
      * Only a run with the same mechanism, program, data, start and earlier runs gets
        it, and goes on with the stored keys. The number of iterations may grow.

    Args:
      folder: the folder; it is created if it does not exist.
      every: the number of steps between saves; the last step is always saved.
      keep: the number of checkpoints to keep.

    Raises:
      ValueError: if a number is less than one.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> def run(folder):
      ...     return training.fit(
      ...         lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism,
      ...         optax.sgd(0.1), key=jax.random.key(0),
      ...         target_delta=1e-5, checkpoints=training.Checkpoints(folder))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     first, again = run(folder), run(folder)  # the second finds it done
      >>> bool((first.state.params == again.state.params).all())
      True
    """

    def __init__(
        self, folder: str | pathlib.Path, *, every: int = 100, keep: int = 2
    ) -> None:
        validate.count(least=1, every=every)
        validate.count(least=1, keep=keep)
        self._folder, self._every = pathlib.Path(folder).absolute(), every
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
        )

    def __repr__(self) -> str:
        return f"Checkpoints({str(self._folder)!r})"

    def is_due(self, before: int, after: int) -> bool:
        """Returns whether to save after going from step `before` to step `after`."""
        return before // self._every < after // self._every

    def save(
        self, state: TrainState, identity: dict[str, Any], notes: dict[str, Any]
    ) -> None:
        """Saves all of a state, or nothing.

        Args:
          state: the state for a later run.
          identity: the identity of the run; see `restore`.
          notes: values that `fit` reads back by `restore`, as JSON can hold them.

        Raises:
          OSError: if it cannot be written; the previous checkpoint is unchanged.
        """
        arrays = _nested(_leaves(state))
        about = {"identity": identity, "checksum": of_values(arrays)}
        about |= {"arrays": _shapes(arrays), "notes": notes}
        try:
            self._manager.save(
                int(state.step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about)
                ),
                force=True,
            )
        except Exception as error:
            raise OSError(
                f"Could not save step {int(state.step)} to {self._folder}: {error}. The"
                " checkpoint before is as it was."
            ) from error

    def restore(
        self, like: TrainState, identity: Identity
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Restores the last state saved, bit for bit, and its notes; None without one.

        Args:
          like: a state with the same structure and shapes.
          identity: the identity of the run.

        Raises:
          ValueError: if the checkpoint is of another mechanism, program or model, or
            damaged; it is not changed. Also for a program that calls back to the host,
            whose text does not show all of the computation, and in a process that
            trains its own model in a program of several processes.
        """
        if identity.get("callbacks"):
            raise ValueError(
                "Expected loss_fn and optimizer without callbacks to the host in a run"
                f" with checkpoints, got {identity['callbacks']}. Compute their results"
                " beforehand, as data."
            )
        arrays = _nested(_leaves(like))
        local = all(x.is_fully_addressable for x in jax.tree.leaves(arrays))
        if local and jax.process_count() > 1:
            # Orbax's own error would have the numbers of a key in its message.
            raise ValueError(
                "Expected checkpoints in a run of all processes, with arrays on all of"
                " their devices, got a run of this process alone. Train it in a program"
                " of one process, without jax.distributed.initialize."
            )
        step = self._manager.latest_step()
        if step is None:
            return None
        path = self._folder / str(step)
        about = self._read(step, "about", ocp.args.JsonRestore())
        known = {"identity", "checksum", "arrays", "notes"}
        if not isinstance(about, dict) or not known <= set(about):
            raise ValueError(f"Expected {path} to be a checkpoint of dpadambc.")
        _refuse_other_run(path, about["identity"], identity)
        if _shapes(arrays) != about["arrays"]:
            raise ValueError(
                f"Expected {path} to be of this model, optimizer and kind of key, got"
                " arrays of other shapes. Give each its own folder."
            )
        places = jax.tree.map(_place, arrays)
        found = self._read(step, "state", ocp.args.StandardRestore(places))
        if of_values(found) != about["checksum"]:
            raise ValueError(self._damaged(path, "its checksum is another"))
        logging.getLogger("dpadambc").warning(
            "Goes on from step %d, from %r, with the keys that are there.", step, self
        )
        return _with_structure_of(like, found), about["notes"]

    def _read(self, step: int, part: str, arguments: Any) -> Any:
        try:
            composite = ocp.args.Composite(**{part: arguments})
            return self._manager.restore(step, args=composite)[part]
        except Exception as error:
            path = self._folder / str(step)
            raise ValueError(self._damaged(path, str(error))) from error

    def _damaged(self, path: pathlib.Path, why: str) -> str:
        message = f"The checkpoint {path} cannot be read: {why}. "
        if len(self._manager.all_steps()) > 1:
            return message + (
                "If it is damaged, remove it, and the run goes on from the one before."
            )
        return message + (
            "There is none before it. Begin anew in another folder; the steps that this"
            " run took count as well, by spent=."
        )
