"""A language model of the llama kind in Flax NNX, of one text.

Origin: Touvron et al., "Llama" (arXiv:2302.13971), with grouped-query attention; by
default in the sizes of SmolLM2-135M (Allal et al., arXiv:2502.02737). The names and
axes of the weights are those of a checkpoint of Hugging Face's transformers.

It takes one text, without a batch axis, as the library's losses do. The blocks have
their parameters stacked along axis 0, and a scan goes through them. The backward pass
computes the activations of a block again, by `jax.checkpoint`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model; by default those of SmolLM2-135M.

    Attributes:
      rank: of the adapters beside all linear maps of the blocks; 0 is without them.
      is_frozen: whether all other parameters are frozen, whose products are rounded.
    """

    num_tokens: int = 49_152
    width: int = 576
    hidden: int = 1_536
    num_heads: int = 9
    num_kv_heads: int = 3
    num_blocks: int = 30
    rope_base: float = 1e5
    epsilon: float = 1e-5
    rank: int = 0
    is_frozen: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


@jax.custom_vjp
def rounded_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel of operands rounded to bfloat16, summed in float32; so the derivative.

    Accelerators and newer processors have instructions for this. JAX's own derivative
    multiplies the float32 of a cotangent by a bfloat16, for which they have none. The
    kernel is frozen: there is no derivative by it.
    """
    return _dot(x, kernel)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    rounded = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.dot(*rounded, preferred_element_type=jnp.float32).astype(a.dtype)


rounded_dot.defvjp(
    lambda x, kernel: (_dot(x, kernel), kernel),
    lambda kernel, cotangent: (_dot(cotangent, kernel.T), None),
)


class KeysAndValues(NamedTuple):
    """What a block keeps of the positions before."""

    keys: jax.Array  # shape=(..., N, num_kv_heads, head_width)
    values: jax.Array  # the same


def rotated(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary embeddings (Su et al., arXiv:2104.09864) of shape (T, heads, head_width).

    Number i is turned together with number i + head_width / 2.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-np.arange(half) / half)
    angles = jnp.multiply.outer(positions, frequencies.astype(np.float32))[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


Linear = Callable[[int, int], nnx.Module]


class Attention(nnx.Module):
    """Of every position to those that it sees; several queries share a key."""

    def __init__(self, config: Config, linear: Linear):
        of_kv = config.num_kv_heads * config.head_width
        self.head_width, self.rope_base = config.head_width, config.rope_base
        self.q_proj = linear(config.width, config.width)
        self.k_proj = linear(config.width, of_kv)
        self.v_proj = linear(config.width, of_kv)
        self.o_proj = linear(config.width, config.width)

    def __call__(
        self, x: jax.Array, positions: jax.Array, kept: KeysAndValues | None
    ) -> tuple[jax.Array, KeysAndValues]:
        """Shape (T, width), at positions after those that are kept, and all that is."""
        heads = lambda x: x.reshape(len(x), -1, self.head_width)
        turned = lambda x: rotated(heads(x), positions, self.rope_base)
        own = KeysAndValues(turned(self.k_proj(x)), heads(self.v_proj(x)))
        if kept is not None:
            own = jax.tree.map(lambda old, x: old.at[positions].set(x), kept, own)
        is_seen = positions[:, None] >= jnp.arange(len(own.keys))[None]
        queries = turned(self.q_proj(x))
        found = jax.nn.dot_product_attention(queries, *own, mask=is_seen[None])
        return self.o_proj(found.reshape(len(x), -1)), own


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: Config, linear: Linear):
        self.gate_proj = linear(config.width, config.hidden)
        self.up_proj = linear(config.width, config.hidden)
        self.down_proj = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and two layers, each added to its input and normalized before it."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Module:
            options = {"use_bias": False, "rngs": rngs}
            if config.is_frozen:
                options |= {"dot_general": lambda x, w, *_, **__: rounded_dot(x, w)}
            if config.rank:
                options |= {"lora_rank": config.rank}
                return nnx.LoRALinear(inputs, outputs, **options)
            return nnx.Linear(inputs, outputs, **options)

        norm = lambda: nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, linear)
        self.post_attention_layernorm = norm()
        self.mlp = FeedForward(config, linear)

    def __call__(
        self, x: jax.Array, positions: jax.Array, kept: KeysAndValues | None
    ) -> tuple[jax.Array, KeysAndValues]:
        """Shape (T, width), and what the attention keeps."""
        attended, kept = self.self_attn(self.input_layernorm(x), positions, kept)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Llama(nnx.Module):
    """Logits of the next token, at every position of a text."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(config.num_tokens, config.width, rngs=rngs)
        stacked = nnx.split_rngs(splits=config.num_blocks)
        make = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=0, out_axes=0)
        self.layers = stacked(make)(rngs)
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.dot = rounded_dot if config.is_frozen else jnp.dot

    def through(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        kept: KeysAndValues | None = None,
    ) -> tuple[jax.Array, KeysAndValues]:
        """Hidden states after all blocks, shape (T, width), and what these keep.

        Of a whole text, or of some positions after those that are kept.
        """
        positions = jnp.arange(len(x)) if positions is None else positions
        graph, params = nnx.split(self.layers)
        run = lambda x, own: nnx.merge(graph, own[0])(x, positions, own[1])
        return jax.lax.scan(jax.checkpoint(run), x, (params, kept))

    def go_on(
        self, token: jax.Array, kept: KeysAndValues, place: jax.Array
    ) -> tuple[KeysAndValues, jax.Array]:
        """Puts a token at this place; then the logits of the next one."""
        x, kept = self.through(self.embed_tokens(token[None]), place[None], kept)
        return kept, self.write(x)[0]

    def write(self, hidden: jax.Array) -> jax.Array:
        """Logits, shape (T, num_tokens), from hidden states, shape (T, width)."""
        return self.dot(self.norm(hidden), self.embed_tokens.embedding[...].T)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Shape (T, num_tokens), from tokens of shape (T,)."""
        return self.write(self.through(self.embed_tokens(tokens))[0])


def from_tensors(tensors: Mapping[str, Any], config: Config, rngs: nnx.Rngs) -> Llama:
    """The model with these weights, which have the names and axes of transformers'.

    Adapters, if there are some, are drawn, so that they change nothing at the start.
    """
    graph, state = nnx.split(Llama(config, rngs=rngs))

    def tensor(path: tuple[Any, ...], block: int = 0) -> jax.Array:
        *module, leaf = map(str, path)
        if module[0] == "layers":
            module.insert(1, str(block))
        found = jnp.asarray(tensors[".".join(["model", *module, "weight"])])
        return found.T if leaf == "kernel" else found

    def read(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        if isinstance(variable, nnx.LoRAParam):
            return variable
        array = tensor(path)
        if path[0] == "layers":
            array = jnp.stack([tensor(path, i) for i in range(config.num_blocks)])
        return variable.replace(array.astype(jnp.float32))

    return nnx.merge(graph, nnx.map_state(read, state))


def _with_layers(model: Llama, make: Callable[..., Any], *more: Any) -> Llama:
    """A copy whose blocks have other arrays, made of its own and of more."""
    model = nnx.clone(model)
    graph, state = nnx.split(model.layers)
    model.layers = nnx.merge(graph, jax.tree.map(make, state, *more))
    return model


def some_blocks(model: Llama, which: slice) -> Llama:
    """A copy with these blocks alone."""
    return _with_layers(model, lambda x: x[which])


def joined(first: Llama, last: Llama) -> Llama:
    """The blocks of both, and what is around them of the last."""
    after = lambda b, a: jnp.concatenate([a, b])
    return _with_layers(last, after, nnx.state(first.layers))


def merged(model: Llama) -> Llama:
    """The same function without adapters: their products are in the kernels."""
    model = nnx.clone(model)
    for part in (model.layers.self_attn, model.layers.mlp):
        for name, linear in vars(part).items():
            if isinstance(linear, nnx.LoRALinear):
                sizes = linear.in_features, linear.out_features
                options = {"use_bias": False, "dot_general": linear.dot_general}
                plain = nnx.Linear(*sizes, **options, rngs=nnx.Rngs(0))
                product = linear.lora.lora_a[...] @ linear.lora.lora_b[...]
                plain.kernel = nnx.Param(linear.kernel[...] + product)
                setattr(part, name, plain)
    return model
