"""A step of training, traced: what leaks through it, and what noise is added in it."""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import flow as _flow
from dpadambc.audit import recorder as _recorder
from dpadambc.engine import jaxprs

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


def _begins_with(x: Any, rows: np.ndarray) -> bool:
    """Whether an array is of examples, the first of which are these."""
    if _flow.is_key(x) or np.ndim(x) != rows.ndim or np.ndim(x) == 0:
        return False
    x = np.asarray(x)
    return (
        x.dtype == rows.dtype
        and x.shape[1:] == rows.shape[1:]
        and 4 <= len(rows) <= len(x)
        and bool(np.any(rows != rows.flat[0]))
        and np.array_equal(x[1 : len(rows)], rows[1:])  # the first may be another
    )


class Steps:
    """A step of training, as a program.

    Args:
      step: of `(state, data)`, returns what is kept.
      state: whose keys are the only randomness.
      data: the examples, or what is made of them without noise.
      vary: of data and the number of a step, returns other data for each step, since
        equal noise on equal sums shows nothing but that they are equal.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        data: Any,
        vary: Callable[[Any, jax.Array], Any] = lambda data, number: data,
    ):
        self.step, self.state, self.data, self.vary = step, state, data, vary
        self._compiled: dict[tuple[_flow.Crossing, ...], Callable[..., Any]] = {}
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
        self._public, self._private = public, private
        self._paths = [
            jax.tree_util.keystr(path) or "the result"
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
        ]
        self._sizes = [x.size for x in jax.tree.leaves(shapes)]
        self._treedef = jax.tree.structure(shapes)
        same = jax.tree.structure(state) == jax.tree.structure(shapes[1])
        self._is_state_kept = same
        is_real = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
        self._first_leaves = [x for x in jax.tree.leaves(data) if is_real(x)]

    def follow(self, ignored: Iterable[_flow.Path] = ()) -> "Followed":
        """Labels of what is kept, without the crossings that are ignored.

        Noise that is kept in the state is noise when the next step reads it.
        """
        public, ignored = list(self._public), frozenset(ignored)
        while True:
            flow = _flow.Flow(ignored, self._of_constant)
            labels = flow.follow(self.program, [*public, *self._private])
            found = {
                path: label if size else _flow.Label.PUBLIC
                for path, label, size in zip(
                    self._paths, labels, self._sizes, strict=True
                )
            }
            after = labels[len(labels) - len(public) :]
            is_noise = [
                x == _flow.Label.PUBLIC and y == _flow.Label.NOISE
                for x, y in zip(public, after, strict=False)
            ]
            if not self._is_state_kept or not any(is_noise):
                return Followed(flow, found)
            public = [
                _flow.Label.NOISE if is_new else x
                for x, is_new in zip(public, is_noise, strict=True)
            ]

    def _of_constant(self, x: Any) -> _flow.Label:
        """Examples that the step closes over are not public."""
        is_data = self._begins_with_examples(x)
        return _flow.Label.DATA if is_data else _flow.label_of_public(x)

    @property
    def closes_over_examples(self) -> bool:
        """Whether a constant of the program, or of one inside, begins with them."""
        return any(map(self._begins_with_examples, jaxprs.constants_in(self.program)))

    def with_other_first_row(self, change: Callable[[Any], Any]) -> "Steps":
        """The same step, with the first row of such constants changed."""
        other = copy.copy(self)
        other._compiled = {}
        other.program = jaxprs.with_constants(
            self.program,
            lambda x: (
                jnp.asarray(x).at[0].set(change(jnp.asarray(x[0])))
                if self._begins_with_examples(x)
                else x
            ),
        )
        return other

    def _begins_with_examples(self, x: Any) -> bool:
        first = (np.asarray(leaf) for leaf in self._first_leaves)
        return any(_begins_with(x, leaf) for leaf in first)

    def compiled(self, crossings: Iterable[_flow.Crossing]) -> Callable[..., Any]:
        """`recorded`, compiled once for the same crossings."""
        name = tuple(crossings)
        if name not in self._compiled:
            self._compiled[name] = jax.jit(self.recorded(name))
        return self._compiled[name]

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
        """The paths of what has this label; an array without numbers is public."""
        return [path for path, found in self.labels.items() if found == label]


_MOST_OF_A_START = 2_000  # numbers of an array of the first state


def _numbers(state: Any) -> list[jax.Array]:
    """The first numbers of each real array of a state."""
    is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.size
    leaves = [x for x in jax.tree.leaves(state) if is_real(x)]
    return [jnp.ravel(x)[:_MOST_OF_A_START] for x in leaves]


def draws(
    init: Init,
    step: Callable[[Any, Any], tuple[Any, _recorder.Records]],
    data: Callable[[jax.Array], Any],
    keys: jax.Array,
    iterations: int,
) -> tuple[list[jax.Array], _recorder.Records]:
    """What met at the crossings in runs with keys of their own, (run, step, ...).

    Args:
      init: the start of a run.
      step: which records.
      data: of the number of a step, the same in all runs.
      keys: of the runs.
      iterations: how many steps to take.

    Returns:
      Numbers of the first state of each run, and the records, without the data.
    """

    def one(key):
        def advance(state, number):
            (_, state), records = step(state, data(number))
            kept = {k: r._replace(data=(), total=()) for k, r in records.items()}
            return state, kept

        state = jax.tree.map(jnp.asarray, init(key))
        return _numbers(state), jax.lax.scan(advance, state, jnp.arange(iterations))[1]

    return jax.jit(functools.partial(jax.lax.map, one))(keys)
