"""One private step: draw a batch, clip, add noise, update."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.clipped import clipped_value_and_grad
from dpadambc.mechanism import Mechanism
from dpadambc.sampling import Batch
from dpadambc.training.layout import Layout
from dpadambc.training.state import TrainState, in_full_precision


@dataclasses.dataclass(frozen=True)
class Step:
    """One private step on examples that were sampled: compiled as part of a loop."""

    loss_fn: Callable[..., jax.Array]
    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    has_frozen: bool
    uses_key: bool
    microbatch_size: int | None
    average_decay: float | None
    layout: Layout = Layout()

    def __call__(
        self, state: TrainState, frozen: Any, examples: Any, padding: Any
    ) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        """The state after the step, and the sum of losses and number of examples."""
        key = jax.random.fold_in(state.loss_key, state.step)
        shared = (frozen,) if self.has_frozen else ()
        examples, padding = self.layout.split((examples, padding))
        arguments = (*shared, *examples, *((key,) if self.uses_key else ()))
        first = 1 + len(shared)
        fun = clipped_value_and_grad(
            self.loss_fn,
            self.mechanism.l2_clip_norm,
            self.mechanism.normalize_by,
            self.microbatch_size,
            batch_argnums=tuple(range(first, first + len(examples))),
            key_argnum=len(arguments) if self.uses_key else None,
        )
        losses, gradient = fun(
            self.layout.whole(state.params), *arguments, is_padding_example=padding
        )
        updates, opt_state = self.optimizer.update(
            self.layout.summed(gradient), state.opt_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        state = state._replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            average=self._average(params, state.average),
        )
        told = jnp.sum(losses, where=~padding), jnp.sum(~padding)
        return self.layout.kept(state), told

    def _average(self, params: optax.Params, average: optax.Params | None):
        if self.average_decay is None or average is None:
            return None
        full = jax.tree.map(in_full_precision, params)
        return optax.incremental_update(full, average, 1 - self.average_decay)


def draw(mechanism: Any, state: TrainState, num_examples: int) -> Batch:
    """The batch of this step: a function of the key and the step alone."""
    key = jax.random.fold_in(state.sampling_key, state.step)
    if hasattr(mechanism, "num_examples"):
        return mechanism.sample(key)
    return mechanism.sample(key, num_examples=num_examples)
