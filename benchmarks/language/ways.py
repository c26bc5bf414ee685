"""Ways to fine-tune: all parameters, adapters of low rank, the last block, the head.

Each splits a model into what is trained and what is frozen, two states that
`dpadambc.training.fit` takes as `params` and `frozen`:

    parts = ways.split(ways.with_lora(model, rank=8, key=key), "LoRA")
    fit(parts.loss_fn, parts.trained, texts, mechanism, optimizer,
        frozen=parts.frozen, ...)

The head is trained in all of them. Adapters are those of Hu et al. (arXiv:2106.09685):
x @ w + x @ a @ b with w frozen, and b zero at the start.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.language.encoder import UNLABELED, Classifier, Tail
from benchmarks.language.generator import Generator

# The linear maps of a block; the adapters' paper has them on the first two.
QUERY_AND_VALUE = ("query", "value")
ALL_LINEAR = (*QUERY_AND_VALUE, "key", "out", "widen", "narrow")


Model = Classifier | Tail | Generator
M = TypeVar("M", Classifier, Tail, Generator)


class Parts(NamedTuple):
    """A model as the library's losses take it."""

    graph: nnx.GraphDef
    trained: nnx.State
    frozen: nnx.State

    def model(self, trained: Any = None) -> Any:
        """The whole, with other trained parameters if they are given."""
        trained = self.trained if trained is None else trained
        return nnx.merge(self.graph, trained, self.frozen)

    def loss_fn(
        self,
        trained: Any,
        frozen: Any,
        *text: jax.Array,
    ) -> jax.Array:
        """Cross-entropy of one text: what the model takes of it, and its label.

        With a label for each position, the mean over those that have one.
        """
        *inputs, labels = text
        logits = nnx.merge(self.graph, trained, frozen)(*inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        is_labeled = labels != UNLABELED
        return jnp.sum(losses, where=is_labeled) / jnp.maximum(jnp.sum(is_labeled), 1)


_HEAD = nnx.PathContains("head")
_IS_TRAINED = {
    "full": lambda last: nnx.Param,
    "LoRA": lambda last: nnx.Any(nnx.LoRAParam, _HEAD),
    "last block": lambda last: nnx.Any(
        lambda path, _: ("blocks", last) in itertools.pairwise(path), _HEAD
    ),
    "linear probe": lambda last: _HEAD,
}
WAYS = tuple(_IS_TRAINED)


def split(model: Model, way: str) -> Parts:
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
    is_trained = _IS_TRAINED[way](len(model.blocks) - 1)
    return Parts(*nnx.split(model, is_trained, ...))


def tail(model: Classifier, num_blocks: int) -> Tail:
    """A copy of the last blocks and the head, on hidden states of the block before.

    What is frozen before them is not computed in every step: `features` keeps it.
    """
    return Tail(nnx.clone(model), num_blocks)


def _places(model: Model) -> list[nnx.Module]:
    """What has linear maps."""
    return [x for block in model.blocks for x in (block.attention, block)]


def with_lora(
    model: M,
    *,
    rank: int,
    key: jax.Array,
    names: Sequence[str] = QUERY_AND_VALUE,
) -> M:
    """A copy with adapters beside the linear maps of these names, in every block."""
    if not names or not set(names) <= set(ALL_LINEAR):
        raise ValueError(
            f"Expected names among {', '.join(ALL_LINEAR)}, got {tuple(names)}."
        )
    model, rngs = nnx.clone(model), nnx.Rngs(key)
    for place in _places(model):
        for name in names:
            linear = getattr(place, name, None)
            if linear is not None:
                sizes = linear.in_features, rank, linear.out_features
                setattr(place, name, nnx.LoRA(*sizes, base_module=linear, rngs=rngs))
    return model


def merged(model: M) -> M:
    """The same function without adapters: their products are in the kernels."""
    model = nnx.clone(model)
    for place in _places(model):
        for name in ALL_LINEAR:
            lora = getattr(place, name, None)
            if isinstance(lora, nnx.LoRA):
                linear: Any = lora.base_module
                linear.kernel[...] += lora.lora_a[...] @ lora.lora_b[...]
                setattr(place, name, linear)
    return model


def with_new_last_block(model: M, key: jax.Array, stddev: float = 1.0) -> M:
    """A copy whose last block has forgotten what it was trained for.

    Kernels are normal, of the standard deviation of the first two papers' protocol by
    default (BERT itself began with 0.02); biases are zero, scales one.
    """
    model = nnx.clone(model)
    last = model.blocks[-1]
    graph, state = nnx.split(last)
    keys = iter(jax.random.split(key, len(jax.tree.leaves(state))))

    def draw(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        own = next(keys)
        if path[-1] == "kernel":
            return variable.replace(stddev * jax.random.normal(own, variable.shape))
        fill = jnp.ones if path[-1] == "scale" else jnp.zeros
        return variable.replace(fill(variable.shape))

    model.blocks[-1] = nnx.merge(graph, nnx.map_state(draw, state))
    return model
