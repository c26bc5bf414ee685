"""One process of several that train as one: `ADDRESS COUNT ID FOLDER`.

Each writes what it was told of a run that differs from that of the other in one part.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpadambc import training
from tests import common

SIZE = 4


class Rows:
    """A source of made-up rows."""

    def __init__(self, seed, number=50):
        self.rows = np.random.default_rng(seed).normal(size=(number, SIZE))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return (self.rows[index].astype(np.float32),)


def fit(
    *,
    data=None,
    noise_multiplier=1.0,
    scale=1.0,
    params=None,
    target_delta=1e-3,
    times=1,
):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    batches = NamedSharding(mesh, P("data"))
    mechanism = common.poisson_gaussian(
        noise_multiplier=noise_multiplier, sampling_prob=0.2, iterations=2
    )
    result = jnp.zeros(SIZE) if params is None else params
    for _ in range(times):  # each on top of the one before
        result = training.fit(
            lambda w, x: scale * (w @ x),
            result,
            training.Sharded(Rows(0) if data is None else data, batches),
            mechanism,
            optax.sgd(1.0),
            key=training.secret_key(),
            target_delta=target_delta,
        )
    return np.asarray(result.state.params)


def main(address, processes, process, folder):
    process = int(process)
    jax.distributed.initialize(address, int(processes), process)
    arrays = (Rows(process).rows.astype(np.float32),)
    runs = {
        "same": {},
        "again": {"times": 2},
        "source": {"data": Rows(process)},
        "shorter": {"data": Rows(0, 50 - process)},
        "arrays": {"data": arrays},
        "mechanism": {"noise_multiplier": 1.0 + process},
        "target_delta": {"target_delta": 1e-3 * (1 + process)},
        "loss": {"scale": 1.0 + process},
        "params": {"params": np.full(SIZE, process, np.float32)},
    }
    found = {}
    for name, options in runs.items():
        try:
            found[name] = fit(**options)
        except ValueError as error:
            found[name] = str(error)
    np.savez(pathlib.Path(folder) / f"{process}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
