"""A step of training, traced: what leaks through it, and what noise is added in it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import jaxprs
from dpadambc.audit import _flow, _recorder

Init = Callable[[jax.Array], Any]  # a state, of a key
# Of a state and of examples: what is given out, and the next state.
Step = Callable[[Any, Any], tuple[Any, Any]]


class NotTraceable(Exception):
    """JAX cannot trace the step, or it draws from the host while it is traced."""


def start(init: Init) -> Any:
    """The state before the first step, of a key that everybody knows.

    Raises:
      NotTraceable: if JAX cannot trace it; it is made for many keys later on.
    """
    try:
        return jax.tree.map(jnp.asarray, jax.jit(init)(jax.random.key(0)))
    except _UNTRACEABLE as error:
        raise _not_traceable("the start", error) from error


_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


def _not_traceable(what: str, error: Exception) -> NotTraceable:
    first_line = str(error).partition("\n")[0]
    return NotTraceable(f"JAX cannot trace {what}: {first_line}")


def _constants(program: Any) -> list[np.ndarray]:
    found = [
        np.asarray(jax.random.key_data(x) if _flow.is_key(x) and x.ndim == 0 else x)
        for x in program.consts
        if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) or x.ndim == 0
    ]
    for eqn in program.jaxpr.eqns:
        for inner in jaxprs.inner(eqn):
            found.extend(_constants(inner))
    return found


def _same(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(one, two, strict=True)
    )


class Steps:
    """A step of training, as a program.

    Args:
      step: of `(state, data)`, returns what is kept.
      state: whose keys are the only randomness.
      data: the examples, or what is made of them without noise.
    """

    def __init__(self, step: Step, state: Any, data: Any):
        self.step, self.state, self.data = step, state, data
        try:
            trace = lambda: jax.make_jaxpr(
                lambda *args: step(*args), return_shape=True
            )(state, data)
            (self.program, shapes), (again, _) = trace(), trace()
        except _UNTRACEABLE as error:
            raise _not_traceable("the step", error) from error
        if not _same(_constants(self.program), _constants(again)):
            raise NotTraceable("the step draws from the host while it is traced.")
        public = [_flow.label_of_public(x) for x in jax.tree.leaves(state)]
        private = [_flow.Label.DATA for _ in jax.tree.leaves(data)]
        self._labels = [*public, *private]
        self._paths = [
            jax.tree_util.keystr(path) or "the result"
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
        ]
        self._treedef = jax.tree.structure(shapes)

    def follow(self, ignored: Iterable[_flow.Path] = ()) -> "Followed":
        """Labels of what is kept, without the crossings that are ignored."""
        flow = _flow.Flow(frozenset(ignored))
        labels = flow.follow(self.program, self._labels)
        return Followed(flow, dict(zip(self._paths, labels, strict=True)))

    def recorded(self, crossings: Iterable[_flow.Crossing]) -> Callable[..., Any]:
        """A function of `(state, data)`: what is kept, and what met at crossings."""
        run = _recorder.recording(self.program, list(crossings))

        def step(state, data):
            outs, records = run(*jax.tree.leaves((state, data)))
            return jax.tree.unflatten(self._treedef, outs), records

        return step


class Followed:
    """The labels of what a step keeps, and the crossings on the way."""

    def __init__(self, flow: _flow.Flow, labels: dict[str, _flow.Label]):
        self.crossings = list(flow.crossings.values())
        self.ignored = flow.ignored
        self.tells_host = flow.tells_host
        self.labels = labels

    def of(self, label: _flow.Label) -> list[str]:
        """The paths of what has this label."""
        return [path for path, found in self.labels.items() if found == label]


def draws(
    init: Init,
    step: Callable[[Any, Any], tuple[Any, _recorder.Records]],
    data: Any,
    keys: jax.Array,
    iterations: int,
) -> _recorder.Records:
    """What met at the crossings in runs with keys of their own, (run, step, ...)."""

    def one(key):
        def advance(state, _):
            (_, state), records = step(state, data)
            kept = {k: r._replace(data=(), total=()) for k, r in records.items()}
            return state, kept

        state = jax.tree.map(jnp.asarray, init(key))
        return jax.lax.scan(advance, state, length=iterations)[1]

    return jax.jit(functools.partial(jax.lax.map, one))(keys)
