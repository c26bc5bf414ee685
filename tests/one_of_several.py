"""One process of a run: `python -m tests.one_of_several ADDRESS COUNT ID FOLDER KEY`.

It trains as `sharding_test` does, with parameters sharded over the devices of all
processes and data that each fetches for its own, and ends at step 5 where FOLDER has no
checkpoint of it. KEY is "known" or "secret", which each process draws for itself, or
"own", a known one of each process.
"""

import pathlib
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpadambc import training
from dpadambc.core import keys, noise, step
from dpadambc.core import programs as core_programs
from dpadambc.training import checkpoints


def checksum_of_replicas(mesh):
    """Of an array whose replicas differ in each process."""
    own = np.float32([1, 2, jax.process_index()])
    replicas = [jax.device_put(own, device) for device in mesh.local_devices]
    array = jax.make_array_from_single_device_arrays(
        own.shape, NamedSharding(mesh, P()), replicas
    )
    return np.asarray(keys.checksum(array).addressable_data(0))


def main(address, processes, process, folder, kind_of_key):
    jax.distributed.initialize(address, int(processes), int(process))
    from tests.training import sharding_test  # which makes arrays

    # Sums differ by rounding from those of one device, with which they are compared.
    noise._key_of_step = lambda key, *_: key
    step.folded_in = core_programs.folded_in = lambda key, words: key

    kinds = {
        "known": lambda: jax.random.key(3),
        "secret": training.secret_key,
        "own": lambda: jax.random.key(int(process)),
    }
    folder = pathlib.Path(folder)
    goes_on = (folder / "checkpoints" / "5").exists()
    fetched = set()

    class Source(sharding_test.Source):
        def __getitem__(self, index):
            fetched.add(index)
            return super().__getitem__(index)

    def stop(progress):
        if progress.iterations == 5 and not goes_on:
            sys.exit()

    result = sharding_test.fit(
        jax.device_count(),
        split_params=True,
        key=kinds[kind_of_key](),
        data=Source(),
        checkpoints=checkpoints.Checkpoints(folder / "checkpoints", every=5),
        callbacks=stop,
    )
    w1 = result.state.params["w1"]
    assert not w1.is_fully_addressable
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(w1.sharding.mesh, P()))
    params = {name: np.asarray(gather(x)) for name, x in result.state.params.items()}
    # What a process draws outside of `fit`, with what it takes for the same key.
    drawn = jax.random.uniform(training.secret_key())
    found = dict(
        fetched=sorted(fetched),
        drawn=np.asarray(drawn),
        checksum=checksum_of_replicas(w1.sharding.mesh),
        **params,
    )
    np.savez(folder / f"{process}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
