"""One process of several that train alone: `ADDRESS COUNT ID FOLDER`.

Each writes what it trained with a key of its own, and what the same run in all
processes trained. One trains more often than the other.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc import accounting, training
from tests import common

SIZE = 400
MECHANISM = common.poisson_gaussian(sampling_prob=0.1, iterations=2, normalize_by=5)


def loss_fn(w, x):
    return w @ x


def rows_of(seed):
    return np.random.default_rng(seed).normal(size=(50, SIZE)).astype(np.float32)


def fit(seed, key, **options):
    return training.fit(
        loss_fn,
        jnp.zeros(SIZE),
        (rows_of(seed),),
        MECHANISM,
        optax.sgd(1.0),
        key=key,
        target_delta=1e-5,
        **options,
    )


def search(seed, key):
    return training.search(
        loss_fn,
        jnp.zeros(SIZE),
        (rows_of(seed),),
        MECHANISM,
        optax.sgd,
        [1.0],
        trials=accounting.FixedTrials(1),
        score=training.PublicScore(loss_fn, (jnp.ones((3, SIZE)),)),
        key=key,
        target_delta=1e-5,
    )


def main(address, processes, process, folder):
    process = int(process)
    jax.distributed.initialize(address, int(processes), process)
    own = training.secret_key()
    last = fit(0, own)
    training.save_release(pathlib.Path(folder) / f"model{process}", last)
    runs = [search(process, own), *(fit(process, own) for _ in range(2 * process))]
    found = {
        "own": np.asarray(last.state.params),
        "same": np.asarray(fit(1, jax.random.key(5)).state.params),
        "runs": len(runs),
    }
    folder = pathlib.Path(folder)
    try:
        fit(0, own, checkpoints=training.Checkpoints(folder / f"{process}"))
    except ValueError as error:
        found["checkpoints"] = str(error)
    np.savez(folder / f"{process}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
