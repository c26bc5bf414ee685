"""The models that are timed, in PyTorch, with the layers that Opacus has rules for."""

# pyright: basic, reportMissingImports=false
# PyTorch and Opacus are no dependencies of this project.

from typing import NamedTuple

import torch
import torch.utils.checkpoint
from opacus.layers import DPLSTM
from torch import nn


class Problem(NamedTuple):
    """A model whose outputs are the logits of labels, and a batch."""

    name: str
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    labels: torch.Tensor

    @property
    def batch_size(self) -> int:
        return len(self.labels)

    @property
    def is_checkpointed(self) -> bool:
        """Whether the model computes its blocks again in the backward pass."""
        return isinstance(self.model, Decoder)

    def to(self, device: str) -> "Problem":
        """The problem on another device."""
        inputs = tuple(x.to(device) for x in self.inputs)
        model, labels = self.model.to(device), self.labels.to(device)
        return self._replace(model=model, inputs=inputs, labels=labels)

    def first(self, batch_size: int) -> "Problem":
        """The problem with fewer examples."""
        inputs = tuple(x[:batch_size].contiguous() for x in self.inputs)
        return self._replace(inputs=inputs, labels=self.labels[:batch_size])


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    """The positions of all tokens: Opacus needs the batch axis in every input."""
    every = torch.arange(tokens.shape[1], device=tokens.device)
    return every.repeat(len(tokens), 1)


class Attention(nn.Module):
    """The mixed values of all heads, projected."""

    def __init__(self, width: int, heads: int, bias: bool = True):
        super().__init__()
        self.heads = heads
        layers = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.q, self.k, self.v, self.o = layers

    def forward(self, x, is_valid=None):
        split = lambda x: x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            split(self.q(x)),
            split(self.k(x)),
            split(self.v(x)),
            attn_mask=None if is_valid is None else is_valid[:, None, None, :],
            is_causal=is_valid is None,
        )
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Causal attention and a dense part, each normalized before."""

    def __init__(self, width: int, heads: int, bias: bool = True):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        hidden = self.up(self.norm_2(x))
        return x + self.down(nn.functional.gelu(hidden, approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, width, layers, heads, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(_positions(tokens))
        return self.head(self.norm(self.blocks(x)))


class Decoder(nn.Module):
    """Blocks that may be checkpointed, and a head that is tied to the tokens."""

    def __init__(self, width, layers, heads, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        blocks = (Block(width, heads, bias=False) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        # Hooks that save activations see them once if the first pass is without grad.
        self.is_reentrant = False
        self.is_checkpointed = True

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(_positions(tokens))
        for block in self.blocks:
            if not self.is_checkpointed:
                x = block(x)
                continue
            x = torch.utils.checkpoint.checkpoint(
                block, x, use_reentrant=self.is_reentrant, preserve_rng_state=False
            )
        return self.head(self.norm(x))


class EncoderBlock(nn.Module):
    """Attention and a dense part, each normalized after."""

    def __init__(self, width: int, heads: int, intermediate: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up = nn.Linear(width, intermediate)
        self.down = nn.Linear(intermediate, width)

    def forward(self, x, is_valid):
        x = self.norm_1(x + self.attention(x, is_valid))
        return self.norm_2(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """Of the size of MiniLM, with a classifier of the mean."""

    def __init__(
        self, width, layers, heads, intermediate, vocabulary, positions, classes
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        blocks = (EncoderBlock(width, heads, intermediate) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens, types, is_valid):
        x = self.tokens(tokens) + self.positions(_positions(tokens))
        x = self.norm(x + self.types(types))
        for block in self.blocks:
            x = block(x, is_valid)
        weights = is_valid / is_valid.sum(dim=1, keepdim=True)
        mean = (x * weights[..., None]).sum(dim=1)
        return self.head(torch.tanh(self.pooler(mean)))


class GCN(nn.Module):
    def __init__(self, features, latent, classes):
        super().__init__()
        self.encoder = nn.Linear(features, latent)
        self.convolution = nn.Linear(latent, latent)
        self.decoder = nn.Linear(latent, latent)
        self.head = nn.Linear(latent, classes)

    def forward(self, x, is_valid):
        weights = is_valid / is_valid.sum(dim=1, keepdim=True)
        mean = (torch.tanh(self.encoder(x)) * weights[..., None]).sum(dim=1)
        x = torch.tanh(self.convolution(mean)) + mean
        return self.head(torch.tanh(self.decoder(x)))


class LSTM(nn.Module):
    def __init__(self, inputs, hidden, layers, classes):
        super().__init__()
        self.lstm = DPLSTM(inputs, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def transformer(
    batch_size, width=512, layers=4, heads=8, length=64, vocabulary=5000
) -> Problem:
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    # Opacus needs contiguous indices of embeddings.
    inputs = (tokens[:, :-1].contiguous(),)
    name = f"transformer, width {width}, {layers} layers, length {length}"
    model = Transformer(width, layers, heads, length, vocabulary)
    return Problem(name, model, inputs, tokens[:, 1:])


def decoder(
    batch_size, width=384, layers=6, heads=6, length=128, vocabulary=8000
) -> Problem:
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    inputs = (tokens[:, :-1].contiguous(),)
    name = f"decoder, width {width}, {layers} layers, length {length}"
    model = Decoder(width, layers, heads, length, vocabulary)
    return Problem(name, model, inputs, tokens[:, 1:])


def encoder(
    batch_size,
    length,
    width=384,
    layers=6,
    heads=12,
    intermediate=1536,
    vocabulary=30_522,
    positions=512,
    classes=2,
) -> Problem:
    num_valid = torch.randint(1, length + 1, (batch_size, 1))
    return Problem(
        f"encoder, width {width}, {layers} layers, length {length}",
        Encoder(width, layers, heads, intermediate, vocabulary, positions, classes),
        (
            torch.randint(vocabulary, (batch_size, length)),
            torch.randint(2, (batch_size, length)),
            torch.arange(length) < num_valid,
        ),
        torch.randint(classes, (batch_size,)),
    )


def mlp(batch_size, sizes=(784, 1024, 1024, 10)) -> Problem:
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return Problem(
        f"MLP {'-'.join(map(str, sizes))}",
        nn.Sequential(*layers[:-1]),
        (torch.randn(batch_size, sizes[0]),),
        torch.randint(sizes[-1], (batch_size,)),
    )


def cnn5(batch_size, channels=(32, 64, 128, 256, 10), side=32) -> Problem:
    layers = []
    for i, (inputs, outputs) in enumerate(zip((3, *channels), channels, strict=False)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding="same" if i else "valid"))
        layers += [nn.Tanh()] if i < 4 else []
        layers += [nn.MaxPool2d(2)] if i < 3 else []
    return Problem(
        f"CNN5, {side}x{side}x3",
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (torch.randn(batch_size, 3, side, side),),
        torch.randint(channels[-1], (batch_size,)),
    )


def gcn(num_roots=2000, rows=8, features=128, latent=255, classes=40) -> Problem:
    num_valid = torch.randint(1, rows + 1, (num_roots, 1))
    return Problem(
        f"DP-GCN, {rows} rows",
        GCN(features, latent, classes),
        (torch.randn(num_roots, rows, features), torch.arange(rows) < num_valid),
        torch.randint(classes, (num_roots,)),
    )


def lstm(
    batch_size=64, hidden=256, layers=2, length=64, inputs=256, classes=10
) -> Problem:
    return Problem(
        f"LSTM, {layers} layers of {hidden}, length {length}",
        LSTM(inputs, hidden, layers, classes),
        (torch.randn(batch_size, length, inputs),),
        torch.randint(classes, (batch_size, length)),
    )
