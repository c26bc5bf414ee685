"""How far a value travels in a short `fit`: `python -m benchmarks.structure`.

A visit is a run of consecutive calls, in one file of the package, of functions that
have the value among their arguments (`self` is one). A crossing is a change of folder
between two visits. Calls of other values in between do not end a visit.
"""

import collections
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from dpadambc import training

PACKAGE = pathlib.Path(dpadambc.__file__).parent
X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def arguments(frame):
    """The values of a call, those in `*args` too."""
    code = frame.f_code
    number = code.co_argcount + code.co_kwonlyargcount
    found = [frame.f_locals.get(name) for name in code.co_varnames[:number]]
    if code.co_flags & 0x04:  # *args
        found += frame.f_locals.get(code.co_varnames[number], ())
    return found


class Walk:
    """The calls of the package's own functions while it is entered.

    Args:
      values: by name; a container is followed together with its arrays.
    """

    def __init__(self, **values):
        self.values = {
            name: [value, *jax.tree.leaves(value)] for name, value in values.items()
        }
        self.calls = 0
        self.files = set()
        self.visited = collections.defaultdict(list)

    def __enter__(self):
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _profile(self, frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        place = path.relative_to(PACKAGE).as_posix()
        self.calls += 1
        self.files.add(place)
        given = arguments(frame)
        for name, followed in self.values.items():
            if any(x is value for x in given for value in followed):
                self.visited[name].append(place)

    def visits(self, name):
        """The files that a value visits, in order."""
        return [place for place, _ in itertools.groupby(self.visited[name])]

    def crossings(self, name):
        """How often it goes from one folder to another."""
        folders = [pathlib.Path(place).parent for place in self.visits(name)]
        return len(list(itertools.groupby(folders))) - 1


def of_two_steps():
    """The walk of a `fit` of two steps with Poisson sampling and Adam."""
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.25,
        iterations=2,
        normalize_by=50,
    )
    optimizer = dpadambc.adam_bc(0.1, mechanism)
    params, data = jnp.zeros(3), (X, X.sum(1))
    with Walk(mechanism=mechanism, params=params, data=data) as walk:
        training.fit(
            loss_fn,
            params,
            data,
            mechanism,
            optimizer,
            key=jax.random.key(0),
            target_delta=1e-5,
        )
    return walk


def main():
    """Prints the figures, and the way of each value."""
    walk = of_two_steps()
    print(f"{walk.calls} calls in {len(walk.files)} files")
    for name in walk.values:
        visits = walk.visits(name)
        print(
            f"{name}: {len(visits)} visits of {len(set(visits))} files,"
            f" {walk.crossings(name)} crossings"
        )
        print("  " + " > ".join(place.removesuffix(".py") for place in visits))


if __name__ == "__main__":
    main()
