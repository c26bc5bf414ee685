"""The encoder against PyTorch, ways to fine-tune it, its data, batches by length."""

import dataclasses
import gzip
import json
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
    buckets,
    data,
    encoder,
    encoder_reference,
    features,
    finetune,
    ways,
)
from tests import common  # noqa: E402

ADD_OR_REMOVE_ONE = dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE
REFERENCE = json.loads(encoder_reference.OUTPUT.read_text())["cases"]
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
    found = data.tokenize(examples, encoder_reference.LENGTH, data.tokenizer())
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
        channels = np.asarray(x)[..., encoder_reference.CHANNELS]
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


def _with_adapters(model: encoder.Classifier, names=ways.ALL_LINEAR):
    """Whose adapters do something."""
    model = ways.with_lora(model, rank=2, key=jax.random.key(3), names=names)
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
    parts = {way: ways.split(model, way) for way in ways.WAYS if way != "LoRA"}
    lora = ways.with_lora(model, rank=2, key=jax.random.key(0))
    parts["LoRA"] = ways.split(lora, "LoRA")
    sizes = {way: optax.tree.size(part.trained) for way, part in parts.items()}
    head = 8 * 3 + 3
    block = 4 * (8 * 8 + 8) + (8 * 12 + 12) + (12 * 8 + 8) + 2 * 2 * 8
    assert sizes == {
        "linear probe": head,
        "last block": head + block,
        "LoRA": head + 2 * 2 * 2 * (8 * 2),
        "full": head + 2 * block + (30 + 16 + 2) * 8 + 2 * 8,
    }
    text = _texts([5])
    for part in parts.values():
        np.testing.assert_array_equal(
            part.model()(text.tokens[0], text.types[0]),
            model(text.tokens[0], text.types[0]),  # new adapters change nothing
        )
    assert not jax.tree.leaves(parts["full"].frozen)


def test_adapters_leave_the_model_they_are_made_of(model):
    before = jax.tree.map(jnp.copy, nnx.state(model))
    _with_adapters(model)
    ways.with_new_last_block(model, jax.random.key(0))
    chex.assert_trees_all_equal(before, nnx.state(model))


def test_a_new_last_block_is_random_and_the_rest_is_kept():
    config = encoder.Config(num_tokens=30, max_length=16, num_blocks=2)
    model = _classifier(config)
    new = ways.with_new_last_block(model, jax.random.key(0), stddev=0.5)
    frozen = lambda model: ways.split(model, "last block").frozen
    chex.assert_trees_all_equal(frozen(new), frozen(model))
    block = new.encoder.blocks[1]
    kernels = [block.widen.kernel[...], block.attention.out.kernel[...]]
    for kernel in kernels:
        # The standard error of a standard deviation of n normals is 1 / sqrt(2 n).
        error = kernel.std() / 0.5 - 1
        assert abs(error) < 5 / np.sqrt(2 * kernel.size)
    assert np.abs(np.corrcoef(*(k.ravel()[:9_000] for k in kernels))[0, 1]) < 5 / 95
    for norm in (block.norm, block.attention_norm):
        assert (norm.scale[...] == 1).all() and (norm.bias[...] == 0).all()
    assert (block.narrow.bias[...] == 0).all()


def test_wrong_ways_are_refused(model):
    with pytest.raises(ValueError, match="Expected one of full"):
        ways.split(model, "half")
    with pytest.raises(ValueError, match="adapters for LoRA alone"):
        ways.split(model, "LoRA")
    with pytest.raises(ValueError, match="adapters for LoRA alone"):
        ways.split(_with_adapters(model), "full")
    with pytest.raises(ValueError, match="Expected names among"):
        ways.with_lora(model, rank=2, key=jax.random.key(0), names=["querry"])


def _parts(model, way):
    return ways.split(_with_adapters(model) if way == "LoRA" else model, way)


CLIP = {"l2_clip_norm": 0.5, "normalize_by": 4.0}


def _one_by_one(parts, texts, is_padding_example):
    """The clipped sum by a loop, each text alone and without padding."""
    gradient = jax.jit(jax.grad(parts.loss_fn))
    total = optax.tree.zeros_like(parts.trained)
    for i in np.flatnonzero(~is_padding_example):
        length = int((texts.tokens[i] != encoder.PADDING).sum())
        text = texts.tokens[i, :length], texts.types[i, :length], texts.labels[i]
        own = gradient(parts.trained, parts.frozen, *text)
        scale = jnp.minimum(1, CLIP["l2_clip_norm"] / optax.tree.norm(own))
        total = optax.tree.add_scale(total, scale / CLIP["normalize_by"], own)
    return total


def _bucketed(parts, lengths=(4, 16), microbatch_size=4):
    return buckets.clipped_grad(
        parts.loss_fn, lengths=lengths, size=microbatch_size, **CLIP
    )


def _as_arrays(grad_fn):
    """What it returns, to look at."""
    return lambda *args, **mask: dpadambc.materialize(grad_fn(*args, **mask))


PADDING = np.arange(len(LENGTHS)) % 5 == 3


@pytest.mark.parametrize("way", ["LoRA", common.thorough("full")])
def test_buckets_change_nothing(model, way):
    parts, texts = _parts(model, way), _texts(LENGTHS)
    whole = dpadambc.clipped_grad(parts.loss_fn, batch_argnums=(2, 3, 4), **CLIP)
    padding = jnp.array(PADDING)
    at_once = jax.jit(whole)(
        parts.trained, parts.frozen, *texts, is_padding_example=padding
    )
    grouped = jax.jit(_bucketed(parts))(
        parts.trained, parts.frozen, texts, is_padding_example=padding
    )
    slow = _one_by_one(parts, texts, PADDING)
    for found in (at_once, grouped):
        arrays = dpadambc.materialize(found)
        chex.assert_trees_all_close(arrays, slow, rtol=1e-4, atol=1e-6)
    assert optax.tree.norm(slow) > 0.1  # and not all of it is clipped away


def test_groups_are_sorted_and_hold_each_text_once():
    texts, padding = _texts(LENGTHS), jnp.array(PADDING)
    groups, is_padding, lengths = buckets._grouped(
        tuple(map(jnp.asarray, texts)), padding, 4
    )
    assert groups[0].shape == (3, 4, 16)
    rows = groups[0].reshape(-1, 16)[~is_padding.ravel()]
    kept = texts.tokens[~PADDING]
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, kept.tolist()))
    assert (np.diff(lengths.ravel()) >= 0).all()
    assert is_padding.ravel().tolist() == 4 * [True] + 8 * [False]


@pytest.mark.parametrize("is_broken", [False, True])
def test_padding_in_the_middle_of_a_text_cuts_nothing_off(
    model, is_broken, monkeypatch
):
    """One text more would else change what is seen of its neighbors."""
    if is_broken:
        count = lambda tokens: jnp.sum(tokens != encoder.PADDING, axis=-1)
        monkeypatch.setattr(encoder, "lengths", count)
    parts = ways.split(model, "linear probe")
    tokens = np.array(_texts(8 * [10]).tokens)
    tokens[:, 2:8] = encoder.PADDING
    types = np.zeros_like(tokens)
    texts = data.Tokens(*map(jnp.asarray, (tokens, types, _texts(8 * [10]).labels)))
    grad_fn, present = jax.jit(_as_arrays(_bucketed(parts))), jnp.zeros(8, bool)
    args = parts.trained, parts.frozen
    found = grad_fn(*args, texts, is_padding_example=present)
    shorter = jnp.asarray(np.where(np.arange(16) < 9, tokens, encoder.PADDING))
    unseen = grad_fn(*args, texts._replace(tokens=shorter), is_padding_example=present)
    ends_matter = optax.tree.norm(optax.tree.sub(found, unseen)) > 1e-3
    assert ends_matter == (not is_broken)


def _cut_off(parts, lengths, size):
    """Broken: a group is padded to the length of its place, whatever it holds."""
    fun = dpadambc.clipped_grad(parts.loss_fn, batch_argnums=(2, 3, 4), **CLIP)

    def grad_fn(trained, frozen, texts, *, is_padding_example):
        groups, padding, _ = buckets._grouped(texts, is_padding_example, size)
        total = optax.tree.zeros_like(trained)
        for i, length in enumerate(lengths):
            tokens, types = (x[i, :, :length] for x in groups[:2])
            args = trained, frozen, tokens, types, groups[2][i]
            clipped = fun(*args, is_padding_example=padding[i])
            total = optax.tree.add(total, dpadambc.materialize(clipped))
        return total

    return grad_fn


@pytest.mark.parametrize("is_broken", [False, True])
def test_one_text_moves_the_sum_by_the_sensitivity_at_most(model, is_broken):
    parts = ways.split(model, "linear probe")
    lengths = (4, 8, 16)
    sound = _bucketed(parts, lengths)
    bound = dpadambc.sensitivity(
        CLIP["l2_clip_norm"],
        normalize_by=CLIP["normalize_by"],
        neighboring_relation=ADD_OR_REMOVE_ONE,
    )
    either = _cut_off(parts, lengths, 4) if is_broken else sound
    grad_fn = jax.jit(_as_arrays(either))
    # Where the last one is there, two others fall into the groups before theirs.
    absent = jnp.arange(12) < 3
    both = absent, absent.at[11].set(True)
    moved = []
    for seed in range(4):
        texts = data.Tokens(*map(jnp.asarray, _texts(12 * [16], seed)))
        sums = [
            grad_fn(parts.trained, parts.frozen, texts, is_padding_example=padding)
            for padding in both
        ]
        moved.append(float(optax.tree.norm(optax.tree.sub(*sums))) / bound)
    assert 0.9 < max(moved)
    assert (max(moved) > 1.1) == is_broken


def test_lengths_that_would_cut_texts_off_are_refused(model):
    parts = ways.split(model, "full")
    texts, padding = _texts(LENGTHS), jnp.array(PADDING)
    with pytest.raises(ValueError, match="last of the lengths to be that of the texts"):
        _bucketed(parts, (4, 8))(
            parts.trained, parts.frozen, texts, is_padding_example=padding
        )
    with pytest.raises(ValueError, match="lengths that rise"):
        _bucketed(parts, (16, 8))


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


def test_the_last_block_of_a_tail_is_that_of_the_whole(model):
    tail = encoder.Tail(model, 1)
    sizes = [
        optax.tree.size(ways.split(each, way).trained)
        for each, way in ((model, "last block"), (tail, "last block"), (tail, "full"))
    ]
    assert len(set(sizes)) == 1
    adapted = ways.with_lora(tail, rank=2, key=jax.random.key(0))
    assert optax.tree.size(ways.split(adapted, "LoRA").trained) < sizes[0]


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
