"""A traced step of training: its program, and the labels of its outputs."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import neighbors
from dpadambc.audit.flow import Crossing, Flow, Label, Path, is_key, label_of_public
from dpadambc.audit.recorder import Recorder
from dpadambc.engine import jaxprs

Init = Callable[[jax.Array], Any]  # returns a state for a key
# A function of a state and of examples: the outputs, and the next state.
Step = Callable[[Any, Any], tuple[Any, Any]]

_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


class NotTraceable(Exception):
    """An error: JAX cannot trace the step, or the step draws from the host."""

    @classmethod
    def because_of(cls, part: str, error: Exception) -> "NotTraceable":
        """Makes the error with the first line of an error of JAX."""
        first_line = str(error).partition("\n")[0]
        return cls(f"JAX cannot trace {part}: {first_line}")


def start(init: Init) -> Any:
    """Returns the state before the first step, from a key that everybody knows.

    Raises:
      NotTraceable: if JAX cannot trace `init`; it runs for many keys later on.
    """
    try:
        return jax.tree.map(jnp.asarray, jax.jit(init)(jax.random.key(0)))
    except _UNTRACEABLE as error:
        raise NotTraceable.because_of("the start", error) from error


def _with_constants(program: Any, change: Callable[[Any], Any]) -> Any:
    """Changes the constants of a program and of all programs inside it."""
    if isinstance(program, jex.ClosedJaxpr | jex.Jaxpr):
        each = lambda params: {k: _with_constants(x, change) for k, x in params.items()}
        eqns = [eqn.replace(params=each(eqn.params)) for eqn in program.eqns]
        # The two are one class in later releases of JAX.
        changed = jaxprs.closed(program).jaxpr.replace(eqns=eqns)
        consts = getattr(program, "consts", None)
        if consts is None:
            return changed
        return jex.ClosedJaxpr(changed, [*map(change, consts)])
    if type(program) in (tuple, list):
        return type(program)(_with_constants(x, change) for x in program)
    return program


def _constants_in(program: Any) -> list[Any]:
    """Returns the constants of a program and of all inside it, by `_with_constants`."""
    return [x for inner in jaxprs.programs_in(program) for x in inner.consts]


def _constants(program: Any) -> list[np.ndarray]:
    """Returns all constants but arrays of keys, which NumPy does not compare."""
    found = []
    for x in _constants_in(program):
        is_typed = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        if not is_typed or x.ndim == 0:
            is_one_key = is_key(x) and x.ndim == 0
            found.append(np.asarray(jax.random.key_data(x) if is_one_key else x))
    return found


class Steps:
    """A step of training, as a program.

    Args:
      step: a function of `(state, data)` that returns everything that is kept.
      state: the state; its keys are the only randomness.
      data: the examples, or a gradient of them without noise.
      vary: a function of data and the number of a step that returns other data for each
        step: equal sums of equal noise would show nothing.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        data: Any,
        vary: Callable[[Any, jax.Array], Any] = lambda data, number: data,
    ):
        self.step, self.state, self.data, self.vary = step, state, data, vary
        self._compiled: dict[tuple[Crossing, ...], Callable[..., Any]] = {}

        def trace():
            return jax.make_jaxpr(lambda *x: step(*x), return_shape=True)(state, data)

        try:
            (self.program, shapes), (again, _) = trace(), trace()
        except _UNTRACEABLE as error:
            raise NotTraceable.because_of("the step", error) from error
        one, two = map(_constants, (self.program, again))
        are_equal = lambda a, b: np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        if len(one) != len(two) or not all(map(are_equal, one, two)):
            raise NotTraceable("the step draws from the host while it is traced.")
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        self._paths = [jax.tree_util.keystr(path) or "the result" for path, _ in leaves]
        self._sizes = [x.size for _, x in leaves]
        self._treedef = jax.tree.structure(shapes)
        self._is_state_kept = jax.tree.structure(state) == jax.tree.structure(shapes[1])

    def follow(self, ignored: Iterable[Path] = ()) -> "Followed":
        """Labels everything that is kept, without the crossings that are ignored.

        Noise in the state is still noise when the next step reads it.
        """
        public = [label_of_public(x) for x in jax.tree.leaves(self.state)]
        private = [Label.DATA for _ in jax.tree.leaves(self.data)]
        while True:
            flow = Flow(frozenset(ignored), self._label_of_constant)
            labels = flow.follow(self.program, [*public, *private])
            named = zip(self._paths, labels, self._sizes, strict=True)
            found = {path: x if size else Label.PUBLIC for path, x, size in named}
            pairs = zip(public, labels[len(labels) - len(public) :], strict=False)
            is_new = lambda pair: pair == (Label.PUBLIC, Label.NOISE)
            changed = [Label.NOISE if is_new(pair) else pair[0] for pair in pairs]
            if not self._is_state_kept or changed == public:
                crossings = list(flow.crossings.values())
                return Followed(found, crossings, flow.ignored, flow.tells_host)
            public = changed

    def _label_of_constant(self, x: Any) -> Label:
        """Labels a constant: examples that the step closes over are not public."""
        return Label.DATA if self._begins_with_examples(x) else label_of_public(x)

    def _begins_with_examples(self, x: Any) -> bool:
        """Returns whether an array has at least four rows, the first ones of the batch.

        The first row is not compared: a neighbor of the batch has another one.
        """
        if is_key(x) or np.ndim(x) == 0:
            return False
        x = np.asarray(x)
        batches = map(np.asarray, filter(neighbors.is_real, jax.tree.leaves(self.data)))
        return any(
            x.dtype == rows.dtype
            and x.shape[1:] == rows.shape[1:]
            and x.ndim == rows.ndim
            and 4 <= len(rows) <= len(x)
            and bool(np.any(rows != rows.flat[0]))
            and np.array_equal(x[1 : len(rows)], rows[1:])
            for rows in batches
        )

    @property
    def closes_over_examples(self) -> bool:
        """Returns whether a constant, also of an inner program, begins with them."""
        return any(map(self._begins_with_examples, _constants_in(self.program)))

    def with_other_first_row(self) -> "Steps":
        """The same step, with the first row of such constants changed."""
        begins = self._begins_with_examples
        other_row = lambda x: jnp.asarray(x).at[0].set(-10 * jnp.asarray(x[0]) - 1)
        change = lambda x: other_row(x) if begins(x) else x
        other = copy.copy(self)
        other._compiled = {}
        other.program = _with_constants(self.program, change)
        return other

    def recorded(self, crossings: Iterable[Crossing]) -> Callable[..., Any]:
        """A function of `(state, data)`: all that is kept, and the records.

        It is compiled once for the same crossings.
        """
        name = tuple(crossings)
        recorder = Recorder(name)

        def step(state, data):
            leaves = jax.tree.leaves((state, data))
            outs, records = recorder.evaluate(self.program, leaves)
            return jax.tree.unflatten(self._treedef, outs), records

        return self._compiled.setdefault(name, jax.jit(step))


class Followed(NamedTuple):
    """The labels of everything that a step keeps, and the crossings before it."""

    labels: dict[str, Label]
    crossings: list[Crossing]
    ignored: frozenset[Path]
    tells_host: bool

    def paths(self, label: Label) -> list[str]:
        """Returns the paths with this label; an array without numbers is public."""
        return [path for path, found in self.labels.items() if found == label]
