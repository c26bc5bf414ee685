"""The file of a pretrained language model, the model, its texts, and its training."""

import dataclasses
import itertools
import json
import pathlib
import runpy
import struct
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc

pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
pytest.importorskip("tokenizers")

import safetensors.numpy  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks import experiment, records  # noqa: E402
from benchmarks.language import data, features, scores  # noqa: E402
from benchmarks.language.smollm import (  # noqa: E402
    canaries,
    cost,
    decoding,
    e2e,
    gguf,
    model,
    texts,
    weights,
)

BLOCKS, WIDTH, HIDDEN, HEADS, KV_HEADS = 2, 64, 96, 4, 2
HEAD = WIDTH // HEADS


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value) -> bytes:
    match value:
        case str():
            return struct.pack("<I", 8) + _string(value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case [str(), *_]:
            strings = b"".join(map(_string, value))
            return struct.pack("<IIQ", 9, 8, len(value)) + strings
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _blocks(kind: int, array: np.ndarray) -> bytes:
    """Made-up blocks of these numbers: the nearest ones, by a loop."""
    if kind < 2:
        return array.astype((np.float32, np.float16)[kind]).tobytes()
    found = b""
    for block in array.reshape(-1, 32):
        if kind == 8:
            scale = np.float16(max(np.abs(block).max(), 1e-3) / 127)
            found += scale.tobytes() + np.round(block / scale).astype(np.int8).tobytes()
            continue
        least = np.float16(block.min())
        scale = np.float16(max(block.max() - block.min(), 1e-3) / 15)
        q = np.clip(np.round((block - least) / scale), 0, 15).astype(np.uint8)
        found += scale.tobytes() + least.tobytes()
        found += bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
    return found


def _file(metadata: dict, tensors: dict) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        head += _string(name) + _value(value)
    body = b""
    for name, (kind, array) in tensors.items():
        head += _string(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += _blocks(kind, array)
        body += b"\0" * (-len(body) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def _vocabulary() -> tuple[list[str], list[str]]:
    """Control tokens, the 256 bytes as the tokenizer writes them, and some merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + i for i in range(256 - len(printable))]
    letters = [chr(i) for i in (*printable, *others)]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["Ġ p", "u b", "Ġp ub", "Ġ i", "Ġi s"]
    merged = [pair.replace(" ", "") for pair in merges]
    words = ["".join(pair) for pair in itertools.product("abcd", "efgh", ["ijk"])]
    return control + letters + merged + words, merges


def _content(num_blocks: int = BLOCKS) -> bytes:
    tokens, merges = _vocabulary()
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / shape[-1] ** 0.5
    scale = lambda: rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
    tensors = {
        "token_embd.weight": (8, draw(len(tokens), WIDTH)),
        "output_norm.weight": (0, scale()),
    }
    for i in range(num_blocks):
        of_block = {
            "attn_norm": (0, scale()),
            "attn_q": (3, draw(WIDTH, WIDTH)),
            "attn_k": (3, draw(KV_HEADS * HEAD, WIDTH)),
            "attn_v": (3, draw(KV_HEADS * HEAD, WIDTH)),
            "attn_output": (3, draw(WIDTH, WIDTH)),
            "ffn_norm": (0, scale()),
            "ffn_gate": (3, draw(HIDDEN, WIDTH)),
            "ffn_up": (1, draw(HIDDEN, WIDTH)),
            "ffn_down": (3, draw(WIDTH, HIDDEN)),
        }
        tensors |= {f"blk.{i}.{name}.weight": x for name, x in of_block.items()}
    metadata = {
        "llama.block_count": num_blocks,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 1e4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
    }
    return _file(metadata, tensors)


@pytest.fixture(scope="module")
def file():
    return gguf.parse(_content())


def _load(folder, num_blocks: int = BLOCKS) -> weights.Pretrained:
    (folder / "weights.gguf").write_bytes(_content(num_blocks))
    return weights.load(folder / "weights.gguf")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return _load(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def known(pretrained):
    return pretrained.tokenizer


@pytest.fixture(scope="module")
def llama(pretrained):
    return pretrained.model()


def test_blocks_of_every_kind_are_what_the_format_says():
    scale, least = np.float16(0.5), np.float16(-3)
    q = np.arange(32, dtype=np.uint8) % 16
    packed = bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
    of_four = scale.tobytes() + least.tobytes() + packed
    np.testing.assert_array_equal(
        gguf._q4_1(np.frombuffer(of_four, np.uint8))[0],
        [0.5 * float(x) - 3 for x in q],
    )
    signed = np.arange(-16, 16, dtype=np.int8)
    of_eight = scale.tobytes() + signed.tobytes()
    np.testing.assert_array_equal(
        gguf._q8_0(np.frombuffer(of_eight, np.uint8))[0],
        [0.5 * float(x) for x in signed],
    )


def test_arrays_have_the_axis_first_that_the_file_has_last():
    rows = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)
    content = _file(
        {"general.alignment": 32, "a": 1.5, "b": [1, 2]},
        {name: (kind, rows) for name, kind in {"w": 0, "x": 1, "y": 8, "z": 3}.items()},
    )
    found = gguf.parse(content)
    assert found.metadata == {"general.alignment": 32, "a": 1.5, "b": [1, 2]}
    np.testing.assert_array_equal(found.tensors["w"], rows)
    np.testing.assert_array_equal(found.tensors["x"], rows)
    np.testing.assert_allclose(found.tensors["y"], rows, atol=192 / 127)
    np.testing.assert_allclose(found.tensors["z"], rows, atol=1.1)


def test_another_file_and_another_kind_are_refused():
    with pytest.raises(ValueError, match="GGUF"):
        gguf.parse(b"GGML" + bytes(20))
    content = bytearray(_file({}, {"w": (0, np.zeros(32))}))
    at = content.index(b"w", 8) + 1 + 4 + 8
    content[at] = 14
    with pytest.raises(ValueError, match="14"):
        gguf.parse(bytes(content))


def test_weights_of_another_hash_are_refused(tmp_path):
    (tmp_path / weights.FILE.split("/")[1]).write_bytes(b"other")
    with pytest.raises(ValueError, match="SHA-256"):
        weights.fetch(tmp_path)


def _rotated_in_pairs(x, place, base):
    """As the file has them: numbers 2 i and 2 i + 1 are turned together."""
    found = np.empty_like(x)
    for i in range(len(x) // 2):
        angle = place * base ** (-2 * i / len(x))
        a, b = x[2 * i], x[2 * i + 1]
        found[2 * i] = a * np.cos(angle) - b * np.sin(angle)
        found[2 * i + 1] = b * np.cos(angle) + a * np.sin(angle)
    return found


def _normed(x, scale):
    return x / np.sqrt(np.mean(x**2) + 1e-5) * scale


def _by_numpy(file, tokens):
    """Logits at each position, one number of a head after the other, in float64."""
    arrays = {name: x.astype(np.float64) for name, x in file.tensors.items()}
    table = arrays["token_embd.weight"]
    xs = [table[token] for token in tokens]
    for i in range(BLOCKS):
        start = f"blk.{i}."
        own = {x[len(start) : -7]: y for x, y in arrays.items() if x.startswith(start)}
        keys, values, after = [], [], []
        for place, x in enumerate(xs):
            normed = _normed(x, own["attn_norm"])
            turned = lambda rows, place=place: [
                _rotated_in_pairs(row, place, 1e4) for row in rows.reshape(-1, HEAD)
            ]
            keys.append(turned(own["attn_k"] @ normed))
            values.append((own["attn_v"] @ normed).reshape(-1, HEAD))
            heads = []
            for h, query in enumerate(turned(own["attn_q"] @ normed)):
                of = h // (HEADS // KV_HEADS)
                scores = np.array([query @ key[of] for key in keys]) / np.sqrt(HEAD)
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                heads.append(
                    sum(s * v[of] for s, v in zip(shares, values, strict=True))
                )
            x = x + own["attn_output"] @ np.concatenate(heads)
            normed = _normed(x, own["ffn_norm"])
            gate = own["ffn_gate"] @ normed
            inner = gate / (1 + np.exp(-gate)) * (own["ffn_up"] @ normed)
            after.append(x + own["ffn_down"] @ inner)
        xs = after
    return np.stack([table @ _normed(x, arrays["output_norm.weight"]) for x in xs])


def test_it_is_the_model_that_numpy_computes(file, llama):
    tokens = np.random.default_rng(1).integers(3, 200, 9)
    found = jax.jit(lambda tokens: llama(tokens))(jnp.asarray(tokens))
    np.testing.assert_allclose(found, _by_numpy(file, tokens), rtol=2e-4, atol=2e-4)


def test_adapters_change_nothing_until_they_are_trained(pretrained, llama):
    adapted = pretrained.model(rank=4)
    tokens = jnp.arange(5, 15)
    np.testing.assert_allclose(adapted(tokens), llama(tokens), rtol=1e-5, atol=1e-5)
    graph, adapters, rest = nnx.split(adapted, nnx.LoRAParam, ...)
    drawn = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), adapters
    )
    moved = nnx.merge(graph, drawn, rest)
    assert np.abs(moved(tokens) - llama(tokens)).max() > 0.1
    np.testing.assert_allclose(
        model.merged(moved)(tokens), moved(tokens), rtol=1e-4, atol=1e-4
    )


def test_products_of_frozen_kernels_are_rounded_and_so_are_their_derivatives():
    x, kernel, g = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(5, 40), (40, 30), (5, 30)])
    )
    found, vjp = jax.vjp(model.rounded_dot, x, kernel)
    expected, expected_vjp = jax.vjp(jnp.dot, x, kernel)
    (by_x, by_kernel), (expected_by_x, _) = vjp(g), expected_vjp(g)
    assert not by_kernel.any()  # it is frozen
    for a, b in ((found, expected), (by_x, expected_by_x)):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 1e-5 < error < 2**-8
    assert model.rounded_dot(x.astype(jnp.bfloat16), kernel).dtype == jnp.bfloat16


def test_a_model_with_rounded_products_is_near_the_one_without(pretrained, llama):
    rounded = pretrained.model(rank=2, is_frozen=True)
    tokens = jnp.arange(5, 15)
    for found in (rounded(tokens), model.merged(rounded)(tokens)):
        assert 1e-4 < np.abs(found - llama(tokens)).max() < 0.1


def _checkpoint(folder, pretrained, **changes):
    """The same model as transformers would save it, in two files."""
    of = dataclasses.asdict(pretrained.config)
    sizes = {name: of[field] for field, (_, name) in weights._CONFIG.items()}
    config = sizes | {"tie_word_embeddings": True, "rope_scaling": None} | changes
    (folder / "config.json").write_text(json.dumps(config))
    arrays = sorted(pretrained.tensors.items())
    for i in range(2):
        part = {name: np.ascontiguousarray(x) for name, x in arrays[i::2]}
        safetensors.numpy.save_file(part, folder / f"model-{i}.safetensors")
    pretrained.tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_checkpoint_of_hugging_face_is_the_same_model(pretrained, llama, tmp_path):
    found = weights.load_checkpoint(_checkpoint(tmp_path, pretrained))
    tokens = jnp.arange(5, 15)
    np.testing.assert_array_equal(found.model()(tokens), llama(tokens))
    text = "A pub is £30 – <|im_end|> café"
    known = pretrained.tokenizer
    assert found.tokenizer.encode(text).ids == known.encode(text).ids


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": False}, {"rope_scaling": {"factor": 2.0}}]
)
def test_checkpoints_of_other_models_are_refused(changes, pretrained, tmp_path):
    with pytest.raises(ValueError, match="tied embeddings and no rope_scaling"):
        weights.load_checkpoint(_checkpoint(tmp_path, pretrained, **changes))


@pytest.mark.slow
def test_the_example_fine_tunes_a_checkpoint(tmp_path, monkeypatch, capsys):
    folder = _checkpoint(tmp_path, _load(tmp_path, num_blocks=7))
    monkeypatch.setattr(weights, "CACHE", tmp_path / "cache")
    words = "finetune_lm", "--iterations", "4", "--checkpoint", str(folder)
    monkeypatch.setattr(sys, "argv", list(words))
    path = pathlib.Path(__file__).parents[2] / "examples/finetune_lm.py"
    names = runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    assert names["result"].iterations == 4
    assert f"epsilon {names['mechanism'].epsilon(1e-4):.2f} at delta 1e-04" in told
    assert "test loss before" in told and "test loss after" in told


def test_the_tokenizer_merges_bytes_and_keeps_digits_and_control_tokens_apart(known):
    text = "A pub is £30 – <|im_end|> café"
    ids = known.encode(text).ids
    assert known.decode(ids) == text
    assert not set(ids) & {0, 1, 2}
    tokens = known.encode("a pub is 42").tokens
    assert tokens == ["a", "Ġpub", "Ġis", "Ġ", "4", "2"]


PAIRS = [
    ("name[The Vaults], eatType[pub]", "The Vaults is a pub."),
    ("name[Alimentum]", "Alimentum is not a pub near the river."),
    ("name[Aromi], area[riverside]", "Aromi is a pub."),
]


def test_the_loss_is_that_of_the_text_alone(llama, known):
    rows = texts.tokenize(PAIRS, known)
    parts = texts.split(llama, "full")
    for tokens, first in zip(*rows, strict=True):
        size = int(np.sum(tokens != texts.PADDING))
        log_probs = jax.nn.log_softmax(llama(jnp.asarray(tokens)))
        losses = [-log_probs[i - 1, tokens[i]] for i in range(first, size)]
        assert tokens[size - 1] == texts.END
        found = parts.loss_fn(parts.trained, parts.frozen, tokens, first)
        np.testing.assert_allclose(found, np.mean(losses), rtol=1e-4)


def test_an_empty_row_has_no_gradient(llama):
    parts = texts.split(llama, "full")
    row = np.zeros(texts.LENGTH, np.int32), np.int32(0)
    gradient = jax.grad(parts.loss_fn)(parts.trained, parts.frozen, *row)
    assert all(not np.any(x) for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("way", ["lora", "lora, rounded", "full"])
def test_the_clipped_sum_is_that_of_vmap(pretrained, known, way):
    way, *rounded = way.split(", ")
    own = pretrained.model(2 if way == "lora" else 0, bool(rounded))
    parts = texts.split(own, way)

    def clipped(method):
        grad_fn = dpadambc.clipped_grad(
            parts.loss_fn,
            l2_clip_norm=0.1,
            normalize_by=3,
            batch_argnums=(2, 3),
            method=method,
        )
        args = parts.trained, parts.frozen, *texts.tokenize(PAIRS, known)
        return jax.jit(lambda: dpadambc.materialize(grad_fn(*args)))()

    kept, formed = clipped("factored"), clipped("vmap")
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(formed)) > 1e-4
    for x, y in zip(*map(jax.tree.leaves, (kept, formed)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 if rounded else 1e-6)


def test_kept_keys_and_values_write_what_full_passes_write(llama, known):
    (written,) = texts.write(llama, [PAIRS[0][0]], known, width=1, length=8)
    tokens = known.encode(texts.in_words(PAIRS[0][0]) + "\n").ids
    start = len(tokens)
    while len(tokens) < start + 8 and tokens[-1] != texts.END:
        logits = np.array(llama(jnp.array(tokens))[-1])
        logits[texts.PADDING] = -np.inf
        tokens.append(int(np.argmax(logits)))
    assert written == known.decode(tokens[start:]).strip()


def test_the_last_blocks_go_on_where_the_first_ones_end(llama, known, tmp_path):
    rows = texts.tokenize(PAIRS, known)
    first = model.some_blocks(llama, slice(None, 1))
    last = model.some_blocks(llama, slice(1, None))
    states = texts.hidden_states(rows.tokens, first, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".npy"
    whole = texts.split(llama, "full")
    part = texts.split(last, "full", is_whole=False)
    assert "embed_tokens" in part.frozen and "embed_tokens" not in part.trained
    for tokens, start, x in zip(*rows, states, strict=True):
        np.testing.assert_allclose(
            part.loss_fn(part.trained, part.frozen, tokens, start, jnp.asarray(x)),
            whole.loss_fn(whole.trained, whole.frozen, tokens, start),
            rtol=2e-3,
        )
    both = model.joined(first, last)
    np.testing.assert_array_equal(both(rows.tokens[0]), llama(rows.tokens[0]))


def test_hidden_states_are_those_of_each_text_alone(
    llama, known, tmp_path, monkeypatch
):
    rows = texts.tokenize(PAIRS, known)
    rows.tokens[1] = texts.PADDING  # an empty row
    together = texts.hidden_states(rows.tokens, llama, tmp_path)
    monkeypatch.setattr(features, "GROUP_SIZE", 1)
    alone = texts.hidden_states(rows.tokens, llama, tmp_path / "alone")
    is_text = rows.tokens != texts.PADDING  # what is behind them means nothing
    np.testing.assert_allclose(together[is_text], alone[is_text], rtol=0, atol=0.01)


@pytest.fixture
def folder(tmp_path):
    """Weights and an archive of a few tables, as the command reads them."""
    (tmp_path / "weights.gguf").write_bytes(_content())
    (tmp_path / "e2e").mkdir()
    lines = ["mr,ref", *(f'"{table}","{text}"' for table, text in PAIRS * 8)]
    with zipfile.ZipFile(tmp_path / "e2e/e2e-dataset.zip", "w") as archive:
        for name in data.E2E_FILES.values():
            archive.writestr(f"e2e-dataset/{name}", "\n".join(lines))
    return tmp_path


def _run(folder, monkeypatch, *more: str, command=e2e) -> list[dict]:
    options = {
        "--data-dir": folder,
        "--weights": folder / "weights.gguf",
        "--output": folder / "out.jsonl",
        "--cache-dir": folder / "cache",
        "--batch-size": 6,
        "--epochs": 1,
    }
    words = [str(x) for option in options.items() for x in option]
    monkeypatch.setattr(sys, "argv", ["smollm", *words, *more])
    monkeypatch.setattr(e2e, "NUM_VALIDATION", 4)
    command.STUDY.main(None)
    return records.read(folder / "out.jsonl")


@pytest.mark.slow
def test_one_command_trains_resumes_and_writes(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        _run(folder, monkeypatch, "--minutes", "0")
    assert "out of time" in capsys.readouterr().out.lower()
    (row,) = _run(folder, monkeypatch)
    assert 7.9 < row["epsilon"] <= 8 and row["iterations"] == 4
    assert row["setting"]["method"] == experiment.AUTOMATIC
    assert "| lora | AUTO-S, DP-Adam | 8 |" in capsys.readouterr().out
    more = "--way", "full", "--epsilon", "none", "--last", "1"
    _, second = _run(folder, monkeypatch, *more)
    assert second["epsilon"] is None and second["setting"]["last"] == 1


@pytest.mark.slow
def test_canaries_tell_what_they_are(folder, monkeypatch, capsys):
    monkeypatch.setattr(canaries, "NUM_OTHERS", 7)
    monkeypatch.setattr(canaries, "LENGTH", 96)
    values = {"NUM_CANARIES": {1: 5, 3: 1}, "NUM_PAIRS": 20}
    for name, value in values.items():
        monkeypatch.setattr(canaries, name, value)
    more = "--last", "1", "--epsilon", "8"
    (row,) = _run(folder, monkeypatch, *more, command=canaries)
    assert row["num_examples"] == 20 + 5 + 3 and len(row["canaries"]) == 6
    assert all(0 <= x["exposure"] <= 3 for x in row["canaries"])
    assert 0 <= row["epsilon_at_least"] < 8
    assert "| lora, AUTO-S, DP-Adam, ε 8, 1 epochs of 6" in capsys.readouterr().out


def test_absent_canaries_leave_empty_rows(known):
    made = [
        canaries.Canary(name, "42", repeats, is_member)
        for name, repeats, is_member in (
            ("a", 1, True),
            ("b", 1, False),
            ("c", 2, True),
        )
    ]
    rows = texts.tokenize(PAIRS, known)
    own = texts.tokenize([canary.pair() for canary in made], known)
    both = canaries.insert(rows, made, known)
    np.testing.assert_array_equal(both.tokens[:3], rows.tokens)
    np.testing.assert_array_equal(both.tokens[[3, 5, 6]], own.tokens[[0, 2, 2]])
    assert not both.tokens[4].any() and both.first[4] == 0
    assert both.tokens.dtype == both.first.dtype == np.int32


def test_exposure_is_the_bits_that_a_rank_tells():
    others = np.arange(1.0, 8.0)  # seven
    of = lambda own: canaries.exposure(np.array([[own, *others]]))[0]
    np.testing.assert_allclose([of(own) for own in (0.5, 1.5, 8.0)], [3, 2, 0])
    assert of(1.0) == 2  # a tie is no success
    assert canaries.exposure(np.full((1, 8), 7.0))[0] == 0


def test_codes_and_names_are_what_the_seed_says(known, monkeypatch):
    monkeypatch.setattr(canaries, "NUM_CANARIES", {1: 5, 3: 1})
    made = canaries.make(known, 0)
    assert made == canaries.make(known, 0) != canaries.make(known, 1)
    assert len({x for each in made for x in each.name.split()}) == 12
    table, text = made[0].pair("123456")
    assert text == f"The secret of {made[0].name} is 1 2 3 4 5 6."
    assert table == f"name[{made[0].name}], secret[yes]"


def test_every_training_on_record_is_found_by_its_command():
    """With the options that the page gives, and no other ones."""
    commands = {
        e2e.STUDY: (
            "--epochs 1 --batch-size 512 --learning-rate 0.003 0.02",
            "--epsilon none --epochs 0.5 --batch-size 128 --learning-rate 0.01",
        ),
        canaries.STUDY: (
            "--epochs 3 --epsilon none --learning-rate 0.01",
            "--epochs 3 --epsilon 8 --learning-rate 0.02",
        ),
    }
    for study, several in commands.items():
        rows = records.read(study.results)
        for words in several:
            options = ["--last", "6", *words.split()]
            arguments = study.parser(None).parse_args(options)
            for cell in e2e.cells(lambda cell: None, arguments):
                assert any(cell.identity.items() <= row.items() for row in rows)


def test_the_cost_is_of_rows_of_full_length():
    sizes = model.Config(200, 16, 24, 2, 1, 1, rank=2, is_frozen=True)
    problem = cost.problem_of(sizes, 12, 3, jnp.bfloat16)
    tokens, first = problem.batch
    assert tokens.shape == (3, 12) and (first == 6).all()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(problem.params))
    found = cost.timed(problem, rounds=1)
    assert found["ratio_of_step"]["median"] > 0 and found["peak_bytes"]["private step"]


def test_seeds_of_one_setting_are_one_line():
    def row(rate, loss, seed):
        setting = {"way": "lora", "method": "DP-Adam", "target_epsilon": 3.0}
        setting |= {"epochs": 1.0, "batch_size": 512, "learning_rate": rate, "last": 6}
        found = {how: {"bleu": 50.0, "rouge_l": 60.0} for how in e2e.WIDTHS}
        return {"setting": setting, "seed": seed, "loss_per_token": loss} | found

    rows = [row(1e-3, 2.0, 0), row(1e-2, 1.5, 0), row(1e-2, 1.7, 1)]
    name = "lora, last 6 blocks | DP-Adam | 3 | 1 | 512"
    assert e2e.table(rows).splitlines()[2:] == [
        f"| {name} | 0.001 | 1 | 2.000 | 50.0 | 50.0 | 60.0 | 60.0 |",
        f"| {name} | 0.01 | 2 | 1.600 | 50.0 | 50.0 | 60.0 | 60.0 |",
    ]


def _all_texts(num_tokens: int, length: int) -> list[list[int]]:
    """All that end, and all that are cut off at the length."""
    inner = [x for x in range(1, num_tokens) if x != texts.END]
    ended = [
        [*each, texts.END]
        for n in range(length)
        for each in itertools.product(inner, repeat=n)
    ]
    return ended + [list(each) for each in itertools.product(inner, repeat=length)]


def _scored(tiny, table, several):
    """The mean log probability of each text, and whether greedy decoding writes it."""
    tokens = np.zeros((len(several), 8), np.int32)
    for row, text in zip(tokens, several, strict=True):
        row[: len(table) + len(text)] = [*table, *text]
    logits = nnx.jit(lambda tiny, tokens: jax.vmap(tiny)(tokens))(tiny, tokens)
    log_probs = jax.nn.log_softmax(logits.at[..., texts.PADDING].set(-jnp.inf))
    for row, text in zip(
        np.array(log_probs)[:, len(table) - 1 :], several, strict=True
    ):
        own = row[np.arange(len(text)), text]
        yield own.mean(), (own == row[: len(text)].max(axis=1)).all()


def test_a_beam_of_one_is_greedy_and_a_wide_one_finds_the_best_of_all(monkeypatch):
    monkeypatch.setattr(decoding, "GROUP_SIZE", 2)
    tiny = model.Llama(model.Config(6, 8, 12, 2, 1, 2), rngs=nnx.Rngs(0))
    tables, several = [[2, 5, 4, 3], [1, 3], [4, 4, 1, 5, 3]], _all_texts(6, 3)
    rows = np.array([[*table, *[0] * (5 - len(table))] for table in tables], np.int32)
    written = {
        width: decoding.beam_search(tiny, rows, width=width, length=3)
        for width in (1, len(several))
    }
    for i, table in enumerate(tables):
        means, are_greedy = map(
            np.array, zip(*_scored(tiny, table, several), strict=True)
        )
        for width, best in ((1, are_greedy.argmax()), (len(several), means.argmax())):
            padding = [texts.PADDING] * (3 - len(several[best]))
            assert written[width][i].tolist() == [*several[best], *padding]
        assert are_greedy.sum() == 1


def test_a_table_is_read_in_words():
    table = "name[The Vaults], eatType[pub], customer rating[5 out of 5]"
    words = "name The Vaults, eat type pub, customer rating 5 out of 5"
    assert texts.in_words(table) == words


def test_scores_of_texts_that_are_known():
    references = [["The Mill is a pub.", "A pub: the mill."], ["It is cheap today."]]
    same = ["the mill is a pub.", "it is cheap today."]
    assert scores.bleu(same, references) == pytest.approx(100)
    assert scores.rouge_l(same, references) == pytest.approx(100)
    assert scores.bleu(["an inn", "no"], references) < 1
    assert scores.rouge_l(["an inn", "no"], references) == 0
    # Precision 3/3 with the second, recall 3/4 with it too: of five, three are there.
    expected = 100 * (1 + 1.44) * 0.75 / (0.75 + 1.44)
    assert scores.rouge_l(["a pub mill"], references[:1]) == pytest.approx(expected)
    # Four words out of five, none of their order lost: precisions 1, brevity exp(-1/5).
    words = [["one two three four five six"]]
    shorter = scores.bleu(["one two three four five"], words)
    assert shorter == pytest.approx(100 * np.exp(-1 / 5))
