"""Ways to fine-tune: all parameters, adapters of low rank, the last block, the head.

Each splits a model into what is trained and what is frozen, two states that
`dpadambc.training.fit` takes as `params` and `frozen`. The head is trained in all of
them. Adapters are those of Hu et al. (arXiv:2106.09685): x @ w + x @ a @ b with w
frozen, and b zero at the start.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.language.encoder import Classifier, Tail

# The linear maps of a block; the adapters' paper has them on the first two.
QUERY_AND_VALUE = ("query", "value")
ALL_LINEAR = (*QUERY_AND_VALUE, "key", "out", "widen", "narrow")

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


WAYS = ("full", "LoRA", "last block", "linear probe")


def split(model: Classifier | Tail, way: str) -> Parts:
    """What is trained, and what is not.

    Raises:
      ValueError: if there is no such way, or LoRA has no adapters to train.
    """
    if way not in WAYS:
        raise ValueError(f"Expected one of {', '.join(WAYS)}, got {way!r}.")
    has_adapters = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    if has_adapters != (way == "LoRA"):
        raise ValueError(
            f"Expected adapters for LoRA alone, got way={way!r} and"
            f" {'some' if has_adapters else 'none'}. See `with_lora`."
        )
    last, head = ("blocks", len(model.blocks) - 1), nnx.PathContains("head")
    of_last = lambda path, _: last in itertools.pairwise(path)
    is_trained = {
        "full": nnx.Param,
        "LoRA": nnx.Any(nnx.LoRAParam, head),
        "last block": nnx.Any(of_last, head),
        "linear probe": head,
    }
    return Parts(*nnx.split(model, is_trained[way], ...))


def with_lora(
    model: M, *, rank: int, key: jax.Array, names: Sequence[str] = QUERY_AND_VALUE
) -> M:
    """A copy with adapters beside the linear maps of these names, in every block."""
    if not names or not set(names) <= set(ALL_LINEAR):
        raise ValueError(
            f"Expected names among {', '.join(ALL_LINEAR)}, got {tuple(names)}."
        )
    model, rngs = nnx.clone(model), nnx.Rngs(key)
    places = [place for block in model.blocks for place in (block.attention, block)]
    for place, name in itertools.product(places, names):
        if linear := getattr(place, name, None):
            sizes = linear.in_features, rank, linear.out_features
            setattr(place, name, nnx.LoRA(*sizes, base_module=linear, rngs=rngs))
    return model


def with_new_last_block(model: M, key: jax.Array, stddev: float = 1.0) -> M:
    """A copy whose last block has forgotten what it was trained for.

    Kernels are normal, of the standard deviation of the first two papers' protocol by
    default (BERT itself began with 0.02); biases are zero, scales one.
    """
    model = nnx.clone(model)
    graph, state = nnx.split(model.blocks[-1])
    keys = iter(jax.random.split(key, len(jax.tree.leaves(state))))

    def draw(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        own = next(keys)
        if path[-1] == "kernel":
            return variable.replace(stddev * jax.random.normal(own, variable.shape))
        fill = jnp.ones if path[-1] == "scale" else jnp.zeros
        return variable.replace(fill(variable.shape))

    model.blocks[-1] = nnx.merge(graph, nnx.map_state(draw, state))
    return model
