"""The compiled programs of a run, cached by all inputs of their compiler."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.core import mesh
from dpadambc.core.data import Fetched
from dpadambc.core.keys import folded_in
from dpadambc.core.sampling import Batch, padded
from dpadambc.core.step import Step, TrainState, draw_batch


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """A program before it is compiled, equal to others that compile to the same.

    Attributes:
      given: all inputs of its compiler.
      compiler: a function that compiles it.
    """

    given: tuple[Any, ...]
    compiler: Callable[[], jax.stages.Compiled] = dataclasses.field(compare=False)


_compiled_once = functools.lru_cache(maxsize=16)(lambda program: program.compiler())


def executable(fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compiles a function for arguments like these, or returns an equal compiled one.

    It traces the function anew in each call, so no run has values that an earlier one
    read from an attribute or a global. Two programs are equal if their StableHLO is,
    which contains all constants, shardings and donated arguments, and if the settings
    of JAX, the trees of arguments and outputs, and the devices are equal. The text does
    not show which Python function a program calls back: such a program is compiled in
    each call.

    Args:
      fun: a function of arrays.
      *args: its arguments.
      **options: options of `jax.jit`.
    """
    anew = lambda *args: fun(*args)  # JAX caches the trace of an old function
    lowered = jax.jit(anew, **options).lower(*args)
    text, settings = lowered.as_text(), jax.config.values
    is_complete = not any(word in text for word in ("callback", "host_transfer"))
    if not is_complete or settings.get("jax_use_simplified_jaxpr_constants"):
        return lowered.compile()
    devices = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    given = text, str(settings), lowered.in_tree, lowered.out_tree, *devices
    given = *given, jax.sharding.get_mesh()
    return _compiled_once(_Lowered(given, lowered.compile))


class Programs:
    """The programs of a step on `num_examples` examples, compiled on first use.

    Parameters, keys and data are their arguments.
    """

    def __init__(self, step: Step, num_examples: int):
        self.step, self.num_examples, self._known = step, num_examples, {}

    def _compiled(self, name: Any, fun: Callable[..., Any], *args: Any, **options):
        if name not in self._known:
            with mesh.on_mesh(self.step.layout):
                self._known[name] = executable(fun, *args, **options)
        return self._known[name]

    def draw(self, state: TrainState) -> Batch:
        """Draws the batch of the next step, padded to shards of equal sizes."""
        batch = draw_batch(self.step.mechanism, state, self.num_examples)
        unit, microbatch = mesh.num_shards(self.step.layout), self.step.microbatch_size
        if unit > 1 and microbatch is not None and microbatch < len(batch.indices):
            unit = microbatch
        return padded(batch, unit)

    def start(self, params: Any, words: Any, digest: Any, impl: Any) -> TrainState:
        """Returns the first state, from the words of a key and the digest of a run."""
        layout = self.step.layout

        def start(params, words, digest):
            key = jax.random.wrap_key_data(words, impl=impl)
            # The first step donates the buffers of the state; the user's must stay.
            state = jax.tree.map(jnp.copy, self.step.init(params, key=key))
            key = folded_in(state.sampling_key, digest)
            state = dataclasses.replace(state, sampling_key=key)
            return mesh.constrained(state, layout, mesh.state_specs(state, layout))

        program = self._compiled("start", start, params, words, digest)
        return program(params, words, digest)

    def batch(self, state: TrainState) -> Batch:
        """Draws the batch of the next step by a compiled program, on every device."""
        drawn = lambda state: mesh.replicated(self.draw(state), self.step.layout)
        return self._compiled("batch", drawn, state)(state)

    def steps(self, state: TrainState, frozen: Any, data: Any, iterations: int) -> Any:
        """Compiles `iterations` steps to a function of `(state, frozen, data)`."""

        def steps(state, frozen, data):
            def one(state, _):
                if isinstance(data, Fetched):
                    return self.step(state, *data, frozen)
                batch = self.draw(state)
                padding = batch.is_padding_example
                return self.step(state, batch.gather(data), padding, frozen)

            if iterations == 1:  # a loop around it would cost some percent
                return one(state, None)
            state, seen = jax.lax.scan(one, state, length=iterations)
            return state, jax.tree.map(lambda x: x.sum(0), seen)

        # A source may return other types for other examples.
        name = iterations, *map(jax.typeof, jax.tree.leaves(data))
        return self._compiled(name, steps, state, frozen, data, donate_argnums=(0,))
