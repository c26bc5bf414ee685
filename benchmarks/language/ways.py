"""Ways to fine-tune: all parameters, or the head and adapters of low rank.

Each splits a model into what is trained and what is frozen, two states that
`dpadambc.training.fit` takes as `params` and `frozen`. Adapters are those of Hu et al.
(arXiv:2106.09685): x @ w + x @ a @ b with w frozen, and b zero at the start.
"""

import itertools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.language.encoder import Classifier, Tail

LINEAR = ("query", "value", "key", "out", "widen", "narrow")  # the maps of a block

M = TypeVar("M", Classifier, Tail)


class Parts(NamedTuple):
    """A model as the library's losses take it."""

    graph: nnx.GraphDef
    trained: nnx.State
    frozen: nnx.State

    def model(self, trained: Any = None) -> Any:
        """The whole, with other trained parameters if they are given."""
        return nnx.merge(self.graph, trained or self.trained, self.frozen)

    def loss_fn(self, trained: Any, frozen: Any, *text: jax.Array) -> jax.Array:
        """Cross-entropy of one text: what the model takes of it, and its label."""
        *inputs, label = text
        logits = nnx.merge(self.graph, trained, frozen)(*inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def split(model: Classifier | Tail, way: str) -> Parts:
    """What is trained, and what is not: "full" is all, "LoRA" of a `with_lora`."""
    of_lora = nnx.Any(nnx.LoRAParam, nnx.PathContains("head"))
    trained = {"full": nnx.Param, "LoRA": of_lora}[way]
    return Parts(*nnx.split(model, trained, ...))


def with_lora(model: M, *, rank: int, key: jax.Array) -> M:
    """A copy with adapters beside all linear maps of every block."""
    model, rngs = nnx.clone(model), nnx.Rngs(key)
    places = [place for block in model.blocks for place in (block.attention, block)]
    for place, name in itertools.product(places, LINEAR):
        if linear := getattr(place, name, None):
            sizes = linear.in_features, rank, linear.out_features
            setattr(place, name, nnx.LoRA(*sizes, base_module=linear, rngs=rngs))
    return model


def with_new_last_block(model: M, key: jax.Array) -> M:
    """A copy whose last block has forgotten what it was trained for.

    Kernels are normal, of the standard deviation of the first two papers' protocol, 1
    (BERT itself began with 0.02); biases are zero, scales one.
    """
    model = nnx.clone(model)
    graph, state = nnx.split(model.blocks[-1])
    keys = iter(jax.random.split(key, len(jax.tree.leaves(state))))

    def draw(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        own = next(keys)
        if path[-1] == "kernel":
            return variable.replace(jax.random.normal(own, variable.shape))
        fill = jnp.ones if path[-1] == "scale" else jnp.zeros
        return variable.replace(fill(variable.shape))

    model.blocks[-1] = nnx.merge(graph, nnx.map_state(draw, state))
    return model
