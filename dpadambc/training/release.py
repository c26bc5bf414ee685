"""What of a run may be published, and the file that says what it is worth."""

import importlib.metadata
import json
import pathlib
import secrets
import warnings
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc._core import keys
from dpadambc.mechanisms.accounting import Spending
from dpadambc.training import _account, _identity, _origins, _siblings
from dpadambc.training._account import NAMES, OF_USERS, SPENT
from dpadambc.training.result import Result
from dpadambc.training.state import TrainState, _keys_of_run, releasable

_ABOUT = "about"


def _named(tree: Any, prefix: str) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): x for path, x in paths}


def _storable(x: Any) -> np.ndarray:
    """As NumPy's files can hold it: what has fewer bits than float32 as float32."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            "Expected parameters that this process can address, got some that are"
            " sharded over several processes. Gather them first, with"
            " jax.experimental.multihost_utils.process_allgather."
        )
    is_low = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return np.asarray(x.astype(jnp.float32) if is_low else x)


# So many numbers are tried, as an attacker would.
_SEEDS = 10_000


def _guessed_seed(state: TrainState) -> int | None:
    """The number for which `jax.random.key` gives the keys of a run, if it is small."""
    found = state.sampling_key
    if str(jax.random.key_impl(found)) != "threefry2x32" or found.shape:
        return None
    sampling = lambda seed: jax.random.key_data(_keys_of_run(jax.random.key(seed))[1])
    tried = np.asarray(jax.jit(jax.vmap(sampling))(jnp.arange(_SEEDS)))
    same = (tried == np.asarray(jax.random.key_data(found))).all(1)
    return int(same.argmax()) if same.any() else None


def _warn_of_a_guessed_key(state: TrainState) -> None:
    seed = _guessed_seed(state)
    if seed is not None:
        warnings.warn(
            f"The key of this run is jax.random.key({seed}), which was found by trying"
            " small numbers, as anybody can: with it all noise and all batches can be"
            " drawn again, and the epsilon that is written does not hold. Publish a run"
            " with training.secret_key().",
            stacklevel=3,
        )


def _warn_of_other_runs(result: Result) -> None:
    """Where runs of this process had the same data, and epsilon is not of them."""
    own = result.state.sampling_key
    told = _account.told(own)
    others = len(_siblings.others(keys.name_of(own)) - told.keys) - told.unnamed
    if others > 0:
        warnings.warn(
            f"This process has made {others} other runs on these data. The epsilon in"
            " this file does not cover them. If you release them too, state the epsilon"
            " of all: dpadambc.mechanisms.accounting.compose([result, ...])."
            " If you chose this run by protected data, no epsilon covers the choice:"
            " training.search makes it within its epsilon. A run that nobody saw, and"
            " that no choice came of, costs nothing.",
            stacklevel=3,
        )


def save_release(path: str | pathlib.Path, result: Result) -> dict[str, Any]:
    """Writes the parameters of a run to a file that says how private they are.

    It warns where the key of the run is `jax.random.key` of a small number, and where
    runs of this process, or of others beside it, had the same data, and `spent` did not
    tell of them: the best of several is not what epsilon says of one.

    Args:
      path: of a file in NumPy's format `npz`, which any language reads.
      result: what `fit` returns.

    Returns:
      What the file has besides the parameters, and their average if there is one. These
      are the mechanism, which names the sampling, with its public numbers and the
      neighboring relation; the steps taken, epsilon and delta; the runs that epsilon
      covers, earlier ones included; whether an example was all rows of a user, None
      where nothing tells; random names, of the file and of those that `spent` told of;
      and the version of this library.

    Raises:
      TypeError: if it is no result of `fit`, but that of a search, say.
      ValueError: if the parameters are split over several processes.

    Example:
      >>> import pathlib, tempfile, jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> result = training.fit(
      ...     lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism,
      ...     optax.sgd(0.1), key=training.secret_key(), target_delta=1e-5)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "model.npz"
      ...     about = training.save_release(path, result)
      ...     params, about = training.load_release(path, like=result.state.params)
      >>> about["mechanism"], about["iterations"], round(about["epsilon"], 2)
      ('dpadambc.mechanisms.PoissonGaussian', 4, 6.68)
    """
    if not isinstance(result, Result):
        raise TypeError(
            f"Expected what fit returns, got {type(result).__name__}. A TrainState does"
            " not know its epsilon. Of a SearchResult all may be published, at its"
            " epsilon: write that beside its params, in a file of your own. Of a loop"
            " of your own publish the parameters alone, at"
            " mechanism.epsilon(target_delta, iterations=steps_taken(opt_state))."
        )
    path, state = pathlib.Path(path), releasable(result)
    _warn_of_a_guessed_key(result.state)
    _warn_of_other_runs(result)
    arrays = _named(state.params, "params") | _named(state.average, "average")
    own_name = secrets.token_hex(8)
    about = _identity.public_numbers(result.mechanism) | {
        "iterations": result.iterations,
        "epsilon": result.epsilon,
        "delta": result.target_delta,
        SPENT: result.spent.to_json(),
        NAMES: [own_name, *sorted(_account.told(result.state.sampling_key).files)],
        OF_USERS: _siblings.are_of_users(keys.name_of(result.state.sampling_key)),
        "dtypes": {name: str(x.dtype) for name, x in arrays.items()},
        "dpadambc": importlib.metadata.version("dpadambc"),
    }
    stored: dict[str, Any] = {name: _storable(x) for name, x in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, **{_ABOUT: json.dumps(about)}, **stored)
    _account.wrote(own_name, result.state.sampling_key)
    return about


def _spending(about: dict[str, Any]) -> Spending | None:
    """The runs of a file, where it has them and this process knows their mechanisms."""
    try:
        return _account.read(about[SPENT])
    except (KeyError, TypeError, ValueError):
        return None


def _opened(path: str | pathlib.Path) -> Any:
    """A file of `save_release`; raises for others."""
    try:
        file = np.load(path, allow_pickle=False)
    except (EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"Expected {path} to be a file of save_release.") from error
    if _ABOUT not in getattr(file, "files", ()):
        raise ValueError(
            f"Expected {path} to be a file of save_release, got one that does not say"
            " what its parameters are worth."
        )
    return file


def load_release(
    path: str | pathlib.Path, *, like: optax.Params, average: bool = False
) -> tuple[optax.Params, dict[str, Any]]:
    """Reads the parameters that `save_release` wrote, and their guarantee.

    Args:
      path: of the file.
      like: parameters of the same structure, arrays or shapes.
      average: whether to read their moving average, of a run with `average_decay`,
        rather than the last ones.

    Returns:
      The parameters, and the dictionary that `save_release` returned. A `fit` that
      begins with these parameters takes it as `spent`.

    Raises:
      OSError: if there is no such file.
      ValueError: if the file has other parameters or no average, or is of something
        else.

    Example:
      >>> import pathlib, tempfile, jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> result = training.fit(
      ...     lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism,
      ...     optax.sgd(0.1), key=training.secret_key(), target_delta=1e-5)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "model.npz"
      ...     _ = training.save_release(path, result)
      ...     params, about = training.load_release(path, like=jnp.zeros(2))
      >>> bool((params == result.state.params).all()), round(about["epsilon"], 2)
      (True, 6.68)
    """
    with _opened(path) as file:
        about = json.loads(str(file[_ABOUT]))
        what = "average" if average else "params"
        names = list(_named(like, what))
        found = [name for name in file.files if name.startswith(what)]
        if average and not found:
            raise ValueError(
                f"Expected an average in {path}, got the last parameters alone: the run"
                " was made without average_decay."
            )
        if sorted(names) != sorted(found):
            raise ValueError(
                f"Expected parameters {names} in {path}, got {found}. Give as `like`"
                " what has the structure of those that were trained:"
                " nnx.split(model)[1] of a module of Flax NNX."
            )
        leaves = [jnp.asarray(file[n], about["dtypes"][n]) for n in names]
    for name, leaf, expected in zip(names, leaves, jax.tree.leaves(like), strict=True):
        if leaf.shape != jnp.shape(expected):
            raise ValueError(
                f"Expected {name} of shape {jnp.shape(expected)} in {path}, got"
                f" {leaf.shape}."
            )
    _origins.remember_release(leaves, _spending(about))
    return jax.tree.unflatten(jax.tree.structure(like), leaves), about
