"""Reads the arrays and the metadata of a GGUF file.

The layout is that of the specification of GGUF, version 3, and the blocks those of GGML
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A quantized array has 32
numbers a block, along its last axis:

    Q8_0    scale d as float16, 32 signed bytes q:                 x = d q
    Q4_1    scale d and least m as float16, 16 bytes of two q:     x = d q + m

In Q4_1 byte i has number i in its low four bits and number i + 16 in its high ones.
"""

import io
import math
import struct
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSION = b"GGUF", 3
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32


class File(NamedTuple):
    """The content of a file."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]  # float32, the axis that GGUF has first comes last


def _float16(content: np.ndarray) -> np.ndarray:
    return content.view(np.float16).astype(np.float32)


def _q8_0(content: np.ndarray) -> np.ndarray:
    blocks = content.reshape(-1, 2 + _BLOCK)
    return _float16(blocks[:, :2].copy()) * blocks[:, 2:].view(np.int8)


def _q4_1(content: np.ndarray) -> np.ndarray:
    blocks = content.reshape(-1, 4 + _BLOCK // 2)
    scale, least = _float16(blocks[:, :4].copy()).T[:, :, None]
    packed = blocks[:, 4:]
    return scale * np.concatenate([packed & 15, packed >> 4], axis=1) + least


# The bytes of a block, its numbers, and how it is dequantized.
_KINDS = {
    0: (4, 1, lambda content: content.view(np.float32)),
    1: (2, 1, _float16),
    3: (4 + _BLOCK // 2, _BLOCK, _q4_1),
    8: (2 + _BLOCK, _BLOCK, _q8_0),
}


class _Reader(io.BytesIO):
    """Values one after the other."""

    def scalars(self, kind: str, number: int = 1) -> tuple[Any, ...]:
        form = f"<{number}{kind}"
        return struct.unpack(form, self.read(struct.calcsize(form)))

    def scalar(self, kind: str) -> Any:
        return self.scalars(kind)[0]

    def string(self) -> str:
        return self.read(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, length = self.scalar("I"), self.scalar("Q")
            if of in _SCALARS:
                return list(self.scalars(_SCALARS[of], length))
            return [self.value(of) for _ in range(length)]
        return self.scalar(_SCALARS[kind])


def parse(content: bytes) -> File:
    """The arrays of a file, dequantized, and its metadata.

    Raises:
      ValueError: if it is no GGUF file of version 3, or has blocks of another kind.
    """
    reader = _Reader(content)
    if (found := (reader.read(4), reader.scalar("I"))) != (MAGIC, VERSION):
        raise ValueError(f"Expected {MAGIC!r} of version {VERSION}, got {found}.")
    num_tensors, num_values = reader.scalars("Q", 2)
    metadata, infos, tensors = {}, [], {}
    for _ in range(num_values):
        name = reader.string()
        metadata[name] = reader.value(reader.scalar("I"))
    for _ in range(num_tensors):
        name = reader.string()
        shape = reader.scalars("Q", reader.scalar("I"))[::-1]
        infos.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-reader.tell() // alignment) * alignment
    for name, shape, kind, offset in infos:
        if kind not in _KINDS:
            raise ValueError(f"Expected a kind of {tuple(_KINDS)}, got {kind}.")
        num_bytes, numbers, dequantize = _KINDS[kind]
        size = math.prod(shape) // numbers * num_bytes
        part = np.frombuffer(content, np.uint8, size, start + offset)
        tensors[name] = dequantize(part).reshape(shape)
    return File(metadata, tensors)
