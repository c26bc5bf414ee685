"""One process of several that train alone: `ADDRESS COUNT ID FOLDER`.

Each writes what it trained with a key of its own, what the same run in all processes
trained, and what it was told of one key for different runs.
"""

import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc import training
from dpadambc.mechanisms import trials
from tests import common

SIZE = 400
MECHANISM = common.poisson_gaussian(sampling_prob=0.1, iterations=2, normalize_by=5)


def loss_fn(w, x):
    return w @ x


def fit(rows, key, **options):
    data = (np.random.default_rng(rows).normal(size=(50, SIZE)).astype(np.float32),)
    result = training.fit(
        loss_fn,
        jnp.zeros(SIZE),
        data,
        MECHANISM,
        optax.sgd(1.0),
        key=key,
        target_delta=1e-5,
        **options,
    )
    return result


def search(rows, key):
    data = (np.random.default_rng(rows).normal(size=(50, SIZE)).astype(np.float32),)
    training.search(
        loss_fn,
        jnp.zeros(SIZE),
        data,
        MECHANISM,
        optax.sgd,
        [1.0],
        trials=trials.Fixed(1),
        score=training.PublicScore(loss_fn, (jnp.ones((3, SIZE)),)),
        key=key,
        target_delta=1e-5,
        spent=(),
    )


def refusal(run, rows):
    try:
        run(rows, training.secret_key())
    except ValueError as error:
        return str(error)
    return ""


def main(address, processes, process, folder):
    process = int(process)
    jax.distributed.initialize(address, int(processes), process)
    own = jax.random.fold_in(training.secret_key(), process)
    last = fit(0, own)
    with warnings.catch_warnings(record=True) as told:
        training.save_release(pathlib.Path(folder) / f"model{process}", last)
    found = {
        "own": np.asarray(last.state.params),
        "same": np.asarray(fit(1, jax.random.key(5)).state.params),
        "fit": refusal(fit, process),
        "search": refusal(search, process),
        "release": " ".join(str(warning.message) for warning in told),
    }
    try:
        folder = pathlib.Path(folder)
        fit(0, own, checkpoints=training.Checkpoints(folder / f"{process}"))
    except ValueError as error:
        found["checkpoints"] = str(error)
    np.savez(folder / f"{process}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
