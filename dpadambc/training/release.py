"""The part of a run that may be published, and the file that states its epsilon."""

import json
import pathlib
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from dpadambc.accounting import Spending, spending_from_json, spending_to_json
from dpadambc.core.fit import Result
from dpadambc.core.spending import public_numbers
from dpadambc.core.step import TrainState
from dpadambc.training import statement
from dpadambc.training.search import SearchResult

_ABOUT = "about"
_SPENT = "spent"


class Release(NamedTuple):
    """The value of `load_release`: a model, and its cost.

    `fit` can begin with it, and counts its `spent`.

    Attributes:
      params: the parameters of the model.
      about: the dictionary of `save_release`: public numbers, epsilon and delta.
    """

    params: optax.Params
    about: dict[str, Any]

    @property
    def spent(self) -> Spending:
        """The runs that made the model, earlier ones included.

        Raises:
          ValueError: if this process does not know one of their mechanisms, or an older
            file does not name them.
        """
        if _SPENT not in self.about:
            raise ValueError(
                "Expected a release that names its runs, got one of an older version or"
                " of a search. Give fit its params, and a list of (mechanism, steps) as"
                " spent=; the epsilon of a search adds to that of fit."
            )
        return spending_from_json(self.about[_SPENT])

    @property
    def epsilon(self) -> float:
        """The epsilon of the model, at the delta of `about`."""
        return self.about["epsilon"]

    def __str__(self) -> str:
        """Returns the statement of the run, for a model card."""
        return self.about.get("statement", str(self.about))


class Releasable(NamedTuple):
    """The part of a state that is as private as the model.

    Attributes:
      step: the number of steps taken. shape=(), int32.
      params: the parameters.
      opt_state: the optimizer's state, with None in the place of every key.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState


def releasable(run: Any) -> Releasable:
    """Returns the part of a run that may be published at its epsilon.

    It has no keys: the key of the noise reveals all later noise, and the key of the
    sampling reveals who took part in which step. Epsilon does not cover the output of a
    callback either.

    Args:
      run: the `Result` of `fit`, or a `TrainState`.

    Returns:
      The step, the parameters, and the optimizer's state without keys.

    Raises:
      TypeError: if it is neither.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> step = training.Step(lambda w, x: w @ x, mechanism, optax.sgd(0.1))
      >>> training.releasable(step.init(jnp.zeros(2), key=jax.random.key(0)))._fields
      ('step', 'params', 'opt_state')
    """
    state = getattr(run, "state", run)
    if not isinstance(state, TrainState):
        raise TypeError(
            "Expected run to be a Result of fit or a TrainState, got"
            f" {type(run).__name__}. All of a SearchResult may be published at its"
            " epsilon; of a loop of your own, the parameters alone."
        )
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    is_words = lambda path: path and getattr(path[-1], "name", None) == "key_data"
    without_keys = jax.tree_util.tree_map_with_path(
        lambda path, x: None if is_words(path) or is_key(x) else x, state.opt_state
    )
    return Releasable(state.step, state.params, without_keys)


def _named(params: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {"params" + jax.tree_util.keystr(path): x for path, x in paths}


def _storable(x: Any) -> np.ndarray:
    """Converts to a dtype of NumPy's files: fewer bits than float32 become float32."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            "Expected parameters that this process can address, got some that are"
            " sharded over several processes. Gather them first, with"
            " jax.experimental.multihost_utils.process_allgather."
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # of a module's dropout
        return np.asarray(jax.random.key_data(x))
    is_low = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return np.asarray(x.astype(jnp.float32) if is_low else x)


def _read(stored: np.ndarray, dtype: str, like: Any) -> jax.Array:
    """Restores an array of its original dtype, or a key of the kind of `like`."""
    if jnp.issubdtype(jnp.result_type(like), jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(stored), impl=jax.random.key_impl(like)
        )
    return jnp.asarray(stored, dtype)


def save_release(
    path: str | pathlib.Path,
    result: Result | SearchResult,
    *,
    params: optax.Params | None = None,
) -> dict[str, Any]:
    """Writes the parameters of a run to a file that states their epsilon.

    Epsilon covers this run and the runs in its `spent`. The epsilons of several
    published runs add up, and so do those of all runs from which one was chosen, even
    by a public score: the choice depends on each of them. `search` makes such a choice
    within its epsilon. The best snapshot of *one* run costs nothing more if a public
    score chose it.

    Args:
      path: the path of a file in NumPy's format `npz`, which any language reads.
      result: the result of `fit`, or of `search`, whose best model is written.
      params: other parameters of the same run, such as a snapshot or an average; the
        last by default. Epsilon and the steps are those of the whole run in either
        case.

    Returns:
      The file has, besides the parameters: the mechanism, which names the
      sampling, with its public numbers and the neighboring relation; the steps taken
      and those accounted for, epsilon and delta; the runs that epsilon covers, earlier
      ones included, or the trials of a search; the statement, in words; and the version
      of this library.

    Raises:
      TypeError: if it is no result of `fit` or `search`.
      ValueError: if the parameters are split over several processes, or a search drew
        no trial.

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
      ...     release = training.load_release(path, like=result.state.params)
      >>> about["sampling_prob"], about["iterations"], round(about["epsilon"], 2)
      (0.5, 4, 6.68)
    """
    if not isinstance(result, Result | SearchResult):
        raise TypeError(
            "Expected the result of fit or search, which knows its epsilon, got"
            f" {type(result).__name__}. Of a loop of your own write the parameters and"
            " the epsilon of the mechanism."
        )
    path = pathlib.Path(path)
    arrays = _named(result.params if params is None else params)
    if isinstance(result, SearchResult):
        steps, spent = {"trials": repr(result.trials)}, result.runs
        words = statement.of_search(result)
    else:
        spent, words = result.spent, statement.of_result(result)
        counted = spent.runs[-1].steps
        steps = {"iterations": result.iterations, "accounted_iterations": counted}
    about = public_numbers(result.mechanism) | {
        **steps,
        "epsilon": result.epsilon,
        "delta": result.target_delta,
        "statement": words,
        "dtypes": {name: str(x.dtype) for name, x in arrays.items()},
        "dpadambc": dpadambc.__version__,
    }
    if spent is not None:
        about[_SPENT] = spending_to_json(spent)
    stored: dict[str, Any] = {name: _storable(x) for name, x in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, **{_ABOUT: json.dumps(about)}, **stored)
    return about


def _opened(path: str | pathlib.Path) -> Any:
    """Opens a file of `save_release`; raises for others."""
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


def load_release(path: str | pathlib.Path, *, like: optax.Params) -> Release:
    """Reads the parameters that `save_release` wrote, and their guarantee.

    Args:
      path: the path of the file.
      like: parameters of the same structure, arrays or shapes.

    Returns:
      A `Release`: the parameters, and the dictionary that `save_release` returned. A
      `fit` that begins with it counts its cost.

    Raises:
      OSError: if there is no such file.
      ValueError: if the file has other parameters, or is not of `save_release`.

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
      ...     release = training.load_release(path, like=jnp.zeros(2))
      >>> same = release.params == result.state.params
      >>> bool(same.all()), round(release.about["epsilon"], 2)
      (True, 6.68)
    """
    with _opened(path) as file:
        about = json.loads(str(file[_ABOUT]))
        names = list(_named(like))
        found = [name for name in file.files if name != _ABOUT]
        if sorted(names) != sorted(found):
            raise ValueError(
                f"Expected parameters {names} in {path}, got {found}. Give as `like`"
                " the structure that was trained, such as the module of Flax NNX."
            )
        leaves = []
        for name, old in zip(names, jax.tree.leaves(like), strict=True):
            leaf = _read(file[name], about["dtypes"][name], old)
            if leaf.shape != jnp.shape(old):
                raise ValueError(
                    f"Expected {name} of shape {jnp.shape(old)} in {path}, got"
                    f" {leaf.shape}."
                )
            leaves.append(leaf)
    return Release(jax.tree.unflatten(jax.tree.structure(like), leaves), about)
