"""The encoder against PyTorch, ways to fine-tune it, its data."""

import dataclasses
import gzip
import json
import pathlib
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import clipping

pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

from flax import nnx  # noqa: E402

from benchmarks import experiment  # noqa: E402
from benchmarks.language import (  # noqa: E402
    data,
    encoder,
    features,
    finetune,
    ways,
)
from tests import common  # noqa: E402

FILE = pathlib.Path(encoder.__file__).with_name("encoder_reference.json")
REFERENCE = json.loads(FILE.read_text())["cases"]
CHANNELS = range(0, 384, 48)  # of the states in the file
TINY = encoder.Config(
    num_tokens=30, max_length=16, width=8, hidden=12, num_heads=2, num_blocks=2
)


@pytest.fixture(scope="module")
def minilm():
    try:
        return encoder.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", REFERENCE, ids=["short", "long", "pair", "rare"])
def test_tokens_and_hidden_states_are_those_of_pytorch(minilm, case):
    examples = data.Examples((tuple(case["texts"]),), np.zeros(1, np.int32))
    found = data.tokenize(examples, 48, data.tokenizer())
    tokens, types, length = found.tokens[0], found.types[0], len(case["tokens"])
    assert tokens[:length].tolist() == case["tokens"]
    assert types[:length].tolist() == case["types"]
    assert not tokens[length:].any()

    @jax.jit
    def states(model, tokens, types):
        hidden = model(tokens, types)
        embedded = model.before(len(model.blocks), tokens, types)
        pooled = encoder.mean_pool(hidden, tokens)
        return embedded[length - 1], hidden[:length], pooled

    expected = [case[name] for name in ("embedded", "hidden", "pooled")]
    for x, y in zip(states(minilm, tokens, types), expected, strict=True):
        channels = np.asarray(x)[..., CHANNELS]
        np.testing.assert_allclose(channels, y, rtol=0, atol=1e-5)


def test_the_published_weights_are_all_read(minilm):
    assert optax.tree.size(nnx.state(minilm)) == encoder.NUM_PARAMETERS


def test_other_weights_are_refused(tmp_path):
    (tmp_path / "weights").write_bytes(b"other")
    with pytest.raises(ValueError, match="SHA-256"):
        encoder.load(tmp_path / "weights")


def _classifier(config: encoder.Config = TINY) -> encoder.Classifier:
    """With biases and scales that are no zeros and ones."""
    body = encoder.Encoder(config, rngs=nnx.Rngs(0))
    model = encoder.Classifier(body, 3, rngs=nnx.Rngs(1))
    graph, state = nnx.split(model)
    noise = optax.tree.random_like(jax.random.key(2), state)
    return nnx.merge(graph, optax.tree.add_scale(state, 0.3, noise))


@pytest.fixture(scope="module")
def model():
    return _classifier()


def _with_adapters(model: encoder.Classifier):
    """Whose adapters do something."""
    model = ways.with_lora(model, rank=2, key=jax.random.key(3))
    graph, adapters, others = nnx.split(model, nnx.LoRAParam, ...)
    noise = optax.tree.random_like(jax.random.key(4), adapters)
    return nnx.merge(graph, noise, others)


def _texts(lengths, seed=0) -> data.Tokens:
    """Random ones of these lengths, in rows of 16, with a second text in each."""
    rng = np.random.default_rng(seed)
    places = np.arange(TINY.max_length)[None]
    ends = np.array(lengths)[:, None]
    tokens = rng.integers(1, TINY.num_tokens, (len(lengths), TINY.max_length))
    return data.Tokens(
        np.where(places < ends, tokens, encoder.PADDING).astype(np.int32),
        ((places >= ends // 2) & (places < ends)).astype(np.int32),
        rng.integers(3, size=len(lengths)).astype(np.int32),
    )


LENGTHS = [3, 16, 7, 7, 3, 16, 3, 3, 7, 3]


@pytest.mark.parametrize("length", [7, 9, 16])
def test_padding_changes_nothing(model, length):
    text = _texts([7])
    found = model(text.tokens[0, :length], text.types[0, :length])
    np.testing.assert_allclose(
        found, model(text.tokens[0, :7], text.types[0, :7]), rtol=1e-5, atol=1e-6
    )


def test_a_row_that_is_all_padding_has_a_finite_gradient(model):
    """The library takes it out of the sum, but debuggers of NaN see it."""
    parts, text = ways.split(model, "full"), _texts([0])
    gradient = jax.jit(jax.grad(parts.loss_fn))
    found = gradient(parts.trained, parts.frozen, *(x[0] for x in text))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(found))


FACTORED = {"gram", "outer product", "lookup"}


def _of_full_size(way):
    """One block of MiniLM's sizes."""
    model = _classifier(encoder.Config(num_blocks=1))
    return _parts(model, way)


@pytest.mark.parametrize("way", ["full", "LoRA"])
def test_every_large_parameter_keeps_its_gradient_factored(way):
    parts = _of_full_size(way)
    tokens = jax.ShapeDtypeStruct((32,), jnp.int32)
    found = dpadambc.explain(
        parts.loss_fn,
        parts.trained,
        parts.frozen,
        tokens,
        tokens,
        jax.ShapeDtypeStruct((), jnp.int32),
        batch_size=8,
        batch_argnums=(2, 3, 4),
    )
    assert not found.warnings
    is_large = lambda shape: np.prod(shape) > 32 * sum(shape)
    rules = [row.rule for row in found.parameters if is_large(row.shape)]
    assert set(rules) <= FACTORED
    assert len(rules) == {"full": 8, "LoRA": 0}[way]
    all_at_once = optax.tree.size(parts.trained) * 4 * 8
    held = sum(row.factored_bytes for row in found.parameters)
    assert held < {"full": 0.1, "LoRA": 1.01}[way] * all_at_once


def test_the_ways_train_what_they_say(model):
    lora, tail = (
        ways.with_lora(model, rank=2, key=jax.random.key(0)),
        encoder.Tail(model, 1),
    )
    parts = ways.split(model, "full"), ways.split(lora, "LoRA")
    sizes = [
        optax.tree.size(part.trained) for part in (*parts, ways.split(tail, "full"))
    ]
    head, maps = 8 * 3 + 3, [(8, 8)] * 4 + [(8, 12), (12, 8)]
    block = sum(a * b + b for a, b in maps) + 2 * 2 * 8
    adapters = sum(2 * (a + b) for a, b in maps)
    around = (30 + 16 + 2) * 8 + 2 * 8
    assert sizes == [head + 2 * block + around, head + 2 * adapters, head + block]
    text = _texts([5])
    for part in parts:
        np.testing.assert_array_equal(
            part.model()(text.tokens[0], text.types[0]),
            model(text.tokens[0], text.types[0]),  # new adapters change nothing
        )
    assert not jax.tree.leaves(parts[0].frozen)


def test_adapters_leave_the_model_they_are_made_of(model):
    before = jax.tree.map(jnp.copy, nnx.state(model))
    _with_adapters(model)
    ways.with_new_last_block(model, jax.random.key(0))
    chex.assert_trees_all_equal(before, nnx.state(model))


def test_a_new_last_block_is_random_and_the_rest_is_kept():
    config = encoder.Config(num_tokens=30, max_length=16, num_blocks=2)
    model = _classifier(config)
    new = ways.with_new_last_block(model, jax.random.key(0))
    block, new.encoder.blocks[1] = new.encoder.blocks[1], model.encoder.blocks[1]
    chex.assert_trees_all_equal(nnx.state(new), nnx.state(model))
    kernels = [block.widen.kernel[...], block.attention.out.kernel[...]]
    for kernel in kernels:
        # The standard error of a standard deviation of n normals is 1 / sqrt(2 n).
        error = kernel.std() - 1
        assert abs(error) < 5 / np.sqrt(2 * kernel.size)
    assert np.abs(np.corrcoef(*(k.ravel()[:9_000] for k in kernels))[0, 1]) < 5 / 95
    for norm in (block.norm, block.attention_norm):
        assert (norm.scale[...] == 1).all() and (norm.bias[...] == 0).all()
    assert (block.narrow.bias[...] == 0).all()


def _parts(model, way):
    return ways.split(_with_adapters(model) if way == "LoRA" else model, way)


@pytest.mark.parametrize("way", ["LoRA", common.thorough("full")])
def test_the_clipped_sum_is_that_of_a_loop_without_padding(model, way):
    parts, texts = _parts(model, way), _texts(LENGTHS)
    is_padding = np.arange(len(LENGTHS)) % 5 == 3
    clip = {"l2_clip_norm": 0.5, "normalize_by": 4.0}
    whole = dpadambc.clipped_grad(parts.loss_fn, batch_argnums=(2, 3, 4), **clip)
    args = parts.trained, parts.frozen, *texts
    found = jax.jit(whole)(*args, is_padding_example=jnp.array(is_padding))
    gradient = jax.jit(jax.grad(parts.loss_fn))
    total = optax.tree.zeros_like(parts.trained)
    for i in np.flatnonzero(~is_padding):
        text = texts.tokens[i, : LENGTHS[i]], texts.types[i, : LENGTHS[i]]
        own = gradient(parts.trained, parts.frozen, *text, texts.labels[i])
        scale = jnp.minimum(1, 0.5 / optax.tree.norm(own))
        total = optax.tree.add_scale(total, scale / 4.0, own)
    chex.assert_trees_all_close(
        dpadambc.materialize(found), total, rtol=1e-4, atol=1e-6
    )
    assert optax.tree.norm(total) > 0.1  # and not all of it is clipped away


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_tail_on_hidden_states_is_the_whole_model(model, num_blocks, tmp_path):
    texts = _texts(LENGTHS)
    hidden = features.before_last(texts, model.encoder, num_blocks, tmp_path)
    tail = encoder.Tail(model, num_blocks)
    whole = jax.jit(jax.vmap(model))(texts.tokens, texts.types)
    ours = jax.jit(jax.vmap(tail))(texts.tokens, jnp.asarray(hidden))
    np.testing.assert_allclose(ours, whole, rtol=0.02, atol=0.02)  # of float16
    pooled = features.pooled(texts, model.encoder, tmp_path)
    units = pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
    np.testing.assert_allclose(jax.vmap(model.head)(units), whole, rtol=1e-4, atol=1e-4)


def test_features_are_kept_by_the_tokens_and_the_weights(model, tmp_path, monkeypatch):
    texts = _texts([3, 9])
    see = lambda texts, body: features.before_last(texts, body, 1, tmp_path)
    first = see(texts, model.encoder)
    see(_texts([3, 9], seed=1), model.encoder)
    others = nnx.clone(model.encoder)
    others.words.embedding[...] += 1
    see(texts, others)
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(features, "_write", lambda *_: pytest.fail("computed again"))
    np.testing.assert_array_equal(see(texts, model.encoder), first)


SETTING = finetune.Setting(
    way="LoRA",
    method="DP-AdamBC",
    target_epsilon=8.0,
    epochs=1,
    batch_size=10,
    learning_rate=0.1,
    l2_clip_norm=0.5,
)


def test_fit_changes_what_is_trained_alone(model, tmp_path):
    parts, texts = _parts(model, "LoRA"), tuple(_texts(2 * LENGTHS))
    trained, row = finetune.fit(SETTING, 0, parts, texts, tmp_path)
    assert row["iterations"] == 2 and row["num_examples"] == 20
    assert 7.9 < row["epsilon"] <= 8 and row["noise_stddev"] > 0
    changed = jax.tree.map(lambda x, y: bool((x != y).all()), trained, parts.trained)
    assert all(jax.tree.leaves(changed))
    after = ways.split(parts.model(trained), "LoRA")
    chex.assert_trees_all_equal(after.frozen, parts.frozen)


def test_without_privacy_nothing_is_clipped_and_no_noise_added():
    with pytest.raises(ValueError, match="no target_epsilon for"):
        dataclasses.replace(SETTING, target_epsilon=None)
    setting = dataclasses.replace(
        SETTING, method=finetune.NOT_PRIVATE, target_epsilon=None
    )
    mechanism = setting.mechanism(20)
    assert mechanism.noise_stddev == 0 and mechanism.l2_clip_norm == finetune.NO_CLIP
    assert mechanism.iterations == SETTING.mechanism(20).iterations


def test_the_automatic_rule_has_the_same_noise():
    automatic = dataclasses.replace(SETTING, method=experiment.AUTOMATIC).mechanism(20)
    assert automatic.clip_rule == clipping.Automatic()
    assert automatic.noise_multiplier == SETTING.mechanism(20).noise_multiplier


# The data, as made up here.


def _write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def test_sentences_are_read_with_their_labels(tmp_path):
    _write(tmp_path / "sst2/dev.tsv.gz", 'sentence\tlabel\na " b\u2028 \t1\nc\t0\n')
    found = data.load(tmp_path, "dev")
    assert found.texts == (('a " b\u2028 ',), ("c",))
    assert found.labels.tolist() == [1, 0]
    with pytest.raises(FileNotFoundError, match="train.tsv"):
        data.load(tmp_path, "train")
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/train.tsv").write_text("sentence\tlabel\na\t-1\n")
    with pytest.raises(ValueError, match="labels"):
        data.load(tmp_path, "train")


def test_tables_come_with_all_their_texts(tmp_path):
    (tmp_path / "e2e").mkdir()
    with zipfile.ZipFile(tmp_path / "e2e/e2e-dataset.zip", "w") as archive:
        rows = '"mr","ref"\n"name[A], near[B]","A, near\nB."\n"name[C]","C"\n'
        rows += '"name[A], near[B]","Near B."\n'
        archive.writestr("e2e-dataset/devset.csv", rows)
    found = data.load_e2e(tmp_path, "dev")
    assert found[0] == ("name[A], near[B]", "A, near\nB.") and len(found) == 3
    expected = {"name[A], near[B]": ["A, near\nB.", "Near B."], "name[C]": ["C"]}
    assert data.references(found) == expected


def test_validation_is_split_off_once():
    fit, validation = data.split_validation(100, 10)
    assert len(validation) == 10
    assert sorted([*fit, *validation]) == list(range(100))
    np.testing.assert_array_equal(data.split_validation(100, 10)[1], validation)


@pytest.fixture
def words():
    """A tokenizer of ten words."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdef"]
    vocabulary = {name: i for i, name in enumerate(names)}
    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    return found


def test_texts_are_cut_off_for_their_own_length_alone(words):
    examples = data.Examples(
        (("a b",), ("a b c d e f",), ("a b c d", "e")), np.array([0, 1, 0], np.int32)
    )
    found = data.tokenize(examples, 6, words)
    assert found.tokens.tolist() == [
        [2, 4, 5, 3, 0, 0],
        [2, 4, 5, 6, 7, 3],
        [2, 4, 5, 3, 8, 3],
    ]
    assert found.types.tolist() == [6 * [0], 6 * [0], [0, 0, 0, 0, 1, 1]]


def test_a_text_has_no_special_tokens(words):
    examples = data.Examples((("[PAD] a [SEP]",),), np.zeros(1, np.int32))
    words.add_special_tokens(["[PAD]", "[SEP]"])
    found = data.tokenize(examples, 12, words).tokens[0]
    assert found[1] != encoder.PADDING and (found == 3).sum() == 1
