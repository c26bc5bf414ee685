"""The generator, its decoding and scores, and secrets among what it is trained on."""

import dataclasses
import itertools
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc

pytest.importorskip("safetensors")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
tokenizers = pytest.importorskip("tokenizers")

from flax import nnx  # noqa: E402

from benchmarks import records  # noqa: E402
from benchmarks.language import (  # noqa: E402
    buckets,
    canaries,
    data,
    decoding,
    e2e,
    encoder,
    finetune,
    generator,
    pairs,
    scores,
    vocabulary,
    ways,
)
from tests import common  # noqa: E402

TINY = encoder.Config(
    num_tokens=12, max_length=20, width=8, hidden=12, num_heads=2, num_blocks=2
)
END = 3


def _generator(config: encoder.Config = TINY) -> generator.Generator:
    """With biases and scales that are no zeros and ones, and a head that says much."""
    body = encoder.Encoder(config, rngs=nnx.Rngs(0))
    model = generator.Generator(body, rngs=nnx.Rngs(1))
    graph, state = nnx.split(model)
    noise = optax.tree.random_like(jax.random.key(2), state)
    return nnx.merge(graph, optax.tree.add_scale(state, 0.5, noise))


@pytest.fixture(scope="module")
def model():
    return _generator()


_logits = nnx.jit(lambda model, tokens, types: model(tokens, types))


def _pair(num_table: int, num_text: int, length: int = 16, seed: int = 0):
    """A random table and text in one row, with types and labels."""
    tokens = np.random.default_rng(seed).integers(4, TINY.num_tokens, length)
    places = np.arange(length)
    tokens = np.where(places < num_table + num_text, tokens, encoder.PADDING)
    types = (places >= num_table) & (tokens != encoder.PADDING)
    tokens, types = tokens.astype(np.int32)[None], types.astype(np.int32)[None]
    return data.Tokens(tokens, types, generator.labels(tokens, types))


def test_a_table_sees_no_text_and_a_text_nothing_that_comes_later(model):
    text = _pair(6, 5)
    tokens, types = text.tokens[0], text.types[0]
    found = _logits(model, tokens, types)
    for changed, first in ((2, 0), (8, 8), (10, 10)):  # a table sees all of itself
        other = np.array(tokens)
        other[changed] = 4 + (other[changed] - 3) % 8
        differs = np.abs(_logits(model, other, types) - found).max(axis=1) > 1e-4
        expected = (np.arange(16) >= first) & (np.arange(16) < 11)
        np.testing.assert_array_equal(differs[:11], expected[:11])


def test_padding_changes_no_loss(model):
    parts, text = ways.split(model, "full"), _pair(6, 5)
    loss_fn = jax.jit(parts.loss_fn)
    found = [
        loss_fn(parts.trained, parts.frozen, *(x[0, :length] for x in text))
        for length in (11, 16)
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_labels_are_the_tokens_of_the_text_that_come_next():
    tokens = np.array([[2, 4, 5, 3, 6, 7, 3, 0]], np.int32)
    types = np.array([[0, 0, 0, 0, 1, 1, 1, 0]], np.int32)
    nothing = encoder.UNLABELED
    expected = [[nothing, nothing, nothing, 6, 7, 3, nothing, nothing]]
    assert generator.labels(tokens, types).tolist() == expected


def test_the_loss_is_the_mean_over_the_tokens_of_the_text(model):
    parts, text = ways.split(model, "full"), _pair(6, 5)
    found = parts.loss_fn(parts.trained, parts.frozen, *(x[0] for x in text))
    log_probs = jax.nn.log_softmax(_logits(model, text.tokens[0], text.types[0]))
    own = [log_probs[i, text.tokens[0, i + 1]] for i in range(5, 10)]
    np.testing.assert_allclose(found, -np.mean(own), rtol=1e-5)


CLIP = {"l2_clip_norm": 0.5, "normalize_by": 4.0}


def _parts(model, way) -> ways.Parts:
    """Whose adapters do something."""
    if way != "LoRA":
        return ways.split(model, way)
    model = ways.with_lora(model, rank=2, key=jax.random.key(3), names=ways.ALL_LINEAR)
    graph, adapters, others = nnx.split(model, nnx.LoRAParam, ...)
    noise = optax.tree.random_like(jax.random.key(4), adapters)
    return ways.split(nnx.merge(graph, noise, others), way)


def _several() -> data.Tokens:
    sizes = ((3, 2), (6, 9), (4, 4), (2, 3), (7, 6))
    rows = [_pair(*size, seed=i) for i, size in enumerate(sizes)]
    return data.Tokens(*map(np.concatenate, zip(*rows, strict=True)))


@pytest.mark.parametrize("way", ["full", common.thorough("LoRA")])
def test_the_clipped_sum_is_that_of_a_loop(model, way):
    parts, texts = _parts(model, way), _several()
    is_padding = np.arange(5) == 3
    grad_fn = buckets.clipped_grad(
        parts.loss_fn, groups=buckets.Groups((8, 16), 2), **CLIP
    )
    found = jax.jit(grad_fn)(
        parts.trained, parts.frozen, texts, is_padding_example=jnp.array(is_padding)
    )
    gradient, norms = jax.jit(jax.grad(parts.loss_fn)), []
    total = optax.tree.zeros_like(parts.trained)
    for i in np.flatnonzero(~is_padding):
        own = gradient(parts.trained, parts.frozen, *(x[i] for x in texts))
        norms.append(optax.tree.norm(own))
        scale = jnp.minimum(1, CLIP["l2_clip_norm"] / norms[-1])
        total = optax.tree.add_scale(total, scale / CLIP["normalize_by"], own)
    assert max(norms) > CLIP["l2_clip_norm"]
    arrays = jax.tree.leaves(dpadambc.materialize(found))
    for x, y in zip(arrays, jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_the_table_of_words_keeps_its_gradient_factored():
    """It is read and written with; all other kernels do as in a classifier."""
    parts = ways.split(_generator(encoder.Config(num_blocks=1)), "full")
    row = jax.ShapeDtypeStruct((32,), jnp.int32)
    found = dpadambc.explain(
        parts.loss_fn,
        parts.trained,
        parts.frozen,
        *(row, row, row),
        batch_size=8,
        batch_argnums=(2, 3, 4),
    )
    assert not found.warnings
    rules = {str(row.shape): row.rule for row in found.parameters}
    assert rules["(30522, 384)"] == "gram + lookup"
    assert {rules["(384, 384)"], rules["(384, 1536)"]} == {"gram"}


def _by_full_passes(model, table, text) -> jax.Array:
    """Logits of the token after each beginning of the text, the empty one too."""
    tokens = np.array([*table, *text], np.int32)
    types = np.array([0] * len(table) + [1] * len(text), np.int32)
    return model(tokens, types)[len(table) - 1 :]


def test_kept_keys_and_values_give_the_logits_of_full_passes(model):
    table, text = [2, 7, 5, 9, 3], [8, 4, 4, 11]
    expected = _by_full_passes(model, table, text)
    padded = jnp.array([*table, 0, 0])
    about = decoding.read(model, padded)
    np.testing.assert_allclose(about.logits, expected[0], rtol=1e-4, atol=1e-4)
    kept = jax.tree.map(lambda x: jnp.zeros((6, *x.shape[1:])), about.kept)
    step = jax.jit(lambda *args: decoding.go_on(model, about, *args))
    for place, token in enumerate(text):
        kept, logits = step(kept, jnp.int32(place), jnp.int32(token))
        np.testing.assert_allclose(logits, expected[place + 1], rtol=1e-4, atol=1e-4)


def _written(model, tables, **options) -> list[list[int]]:
    rows = [[*table, *[0] * (7 - len(table))] for table in tables]
    found = decoding.write_all(model, np.array(rows, np.int32), end=END, **options)
    return found.tolist()


def _all_texts(num_tokens: int, length: int) -> list[list[int]]:
    """All that end, and all that are cut off at the length."""
    inner = [x for x in range(1, num_tokens) if x != END]
    ended = [
        [*each, END]
        for n in range(length)
        for each in itertools.product(inner, repeat=n)
    ]
    return ended + [list(each) for each in itertools.product(inner, repeat=length)]


@nnx.jit
def _log_probs(model, tokens, types):
    logits = jax.vmap(model)(tokens, types)
    return jax.nn.log_softmax(logits.at[..., encoder.PADDING].set(-jnp.inf))


def _scored(model, table, texts):
    """The mean log probability of each text, and whether greedy decoding writes it."""
    tokens, types = np.zeros((2, len(texts), 10), np.int32)
    for row, of_row, text in zip(tokens, types, texts, strict=True):
        row[: len(table) + len(text)] = [*table, *text]
        of_row[len(table) : len(table) + len(text)] = 1
    log_probs = np.array(_log_probs(model, tokens, types))[:, len(table) - 1 :]
    for row, text in zip(log_probs, texts, strict=True):
        own = row[np.arange(len(text)), text]
        yield own.mean(), (own == row[: len(text)].max(axis=1)).all()


def test_a_beam_of_one_is_greedy_and_a_wide_one_finds_the_best_of_all(monkeypatch):
    monkeypatch.setattr(decoding, "GROUP_SIZE", 2)
    model = _generator(dataclasses.replace(TINY, num_tokens=6))
    tables, texts = [[2, 5, 4, 3], [1, 3], [4, 4, 1, 5, 3]], _all_texts(6, 3)
    rows = np.array([[*table, *[0] * (5 - len(table))] for table in tables], np.int32)
    written = {
        width: decoding.write_all(model, rows, width=width, length=3, end=END)
        for width in (1, len(texts))
    }
    for i, table in enumerate(tables):
        means, are_greedy = map(
            np.array, zip(*_scored(model, table, texts), strict=True)
        )
        for width, best in ((1, are_greedy.argmax()), (len(texts), means.argmax())):
            padding = [encoder.PADDING] * (3 - len(texts[best]))
            assert written[width][i].tolist() == [*texts[best], *padding]
        assert are_greedy.sum() == 1


def _copies(number: int, seed: int) -> data.Tokens:
    """Tables of two tokens, whose text is the same two."""
    inner = np.random.default_rng(seed).integers(4, TINY.num_tokens, (number, 2))
    start, end = np.full((number, 1), 2), np.full((number, 1), END)
    tokens = np.concatenate([start, inner, end, inner, end], axis=1).astype(np.int32)
    types = np.tile(np.arange(7) > 3, (number, 1)).astype(np.int32)
    return data.Tokens(tokens, types, generator.labels(tokens, types))


SETTING = finetune.Setting(
    way="full",
    method=finetune.NOT_PRIVATE,
    target_epsilon=None,
    epochs=40,
    batch_size=64,
    learning_rate=0.02,
    l2_clip_norm=0.1,
)


GROUPS = buckets.Groups((7,), 32)


@pytest.mark.thorough
def test_without_privacy_it_learns_to_copy(tmp_path):
    config = dataclasses.replace(TINY, width=16, hidden=32)
    body = encoder.Encoder(config, rngs=nnx.Rngs(0))
    parts = ways.split(generator.Generator(body, rngs=nnx.Rngs(1)), "full")
    texts = _copies(256, 0)
    trained, row = finetune.fit(SETTING, 0, parts, texts, tmp_path, GROUPS)
    assert row["iterations"] == 160
    tables = _copies(16, 1).tokens[:, :4]
    found = decoding.write_all(parts.model(trained), tables, width=2, length=4, end=END)
    copied = (found[:, :2] == tables[:, 1:3]).all(axis=1) & (found[:, 2] == END)
    assert copied.mean() > 0.9
    losses = finetune.losses(parts, trained, _copies(16, 1), GROUPS)
    before = finetune.losses(parts, parts.trained, _copies(16, 1), GROUPS)
    assert losses.mean() < 0.2 < 2 < before.mean()


# Words, vocabularies, scores.


@pytest.fixture(scope="module")
def known():
    try:
        return data.tokenizer()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def test_names_are_spelled_in_the_smaller_vocabulary(known):
    ids = vocabulary.common(known)
    small = vocabulary.reduced_tokenizer(known, ids)
    assert small.get_vocab_size() == len(ids) == 8_111
    assert (
        known.encode("cafe brazil").ids == ids[small.encode("cafe brazil").ids].tolist()
    )
    text = "alimentum is a family-friendly, £20-25 pub near zizzi's."
    tokens = np.array(small.encode(text).ids)
    assert small.token_to_id("[UNK]") not in tokens
    assert len(tokens) > len(known.encode(text).ids)
    assert tokens[0] == small.token_to_id("[CLS]") and ids[0] == encoder.PADDING
    padded = np.concatenate([tokens, [encoder.PADDING] * 2])
    assert pairs.spell(padded, small) == text


def test_the_smaller_encoder_has_the_rows_of_its_tokens(model):
    ids = np.array([0, 2, 3, 7, 9])
    small = vocabulary.reduced_encoder(model.encoder, ids)
    assert small.words.num_embeddings == 5 and model.encoder.words.num_embeddings == 12
    types = jnp.zeros(3, jnp.int32)
    np.testing.assert_array_equal(
        small(jnp.array([1, 4, 2]), types), model.encoder(jnp.array([2, 9, 3]), types)
    )


def test_a_table_is_read_in_words(known):
    table = "name[The Vaults], eatType[pub], customer rating[5 out of 5]"
    words = "name The Vaults, eat type pub, customer rating 5 out of 5"
    assert pairs.in_words(table) == words
    found = pairs.tokenize([(table, "A pub.")], 30, known)
    row, labels = found.tokens[0], np.asarray(found.labels)[0]
    assert known.decode(row[row != 0].tolist()) == f"{words.lower()} a pub."
    assert known.decode(labels[labels >= 0].tolist()) == "a pub."
    assert pairs.num_labels(found).tolist() == [4]
    table_alone = pairs.tokenize_tables([table], 20, known)[0]
    number = int((table_alone != 0).sum())
    np.testing.assert_array_equal(row[:number], table_alone[:number])


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


# The commands, on made up data.


@pytest.fixture
def small_world(tmp_path, monkeypatch):
    """A tiny model, tokenizer and data set in place of the real ones."""
    words = "[PAD] [UNK] [CLS] [SEP] name near is the pub cheap secret of yes . , "
    words += "0 1 2 3 4 5 6 7 8 9 red lion blue boar gold king "
    words += "silver green house tree"
    vocab = {word: i for i, word in enumerate(words.split())}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    config = dataclasses.replace(TINY, num_tokens=len(vocab), max_length=48)
    begin = e2e.Start(tokenizer, _generator(config))
    monkeypatch.setattr(e2e, "start", lambda: begin)
    for name, value in {
        "ON_CPU": buckets.Groups((16, 24), 8),
        "MAX_LENGTH": 24,
        "TABLE_LENGTH": 12,
        "TEXT_LENGTH": 4,
        "NUM_VALIDATION": 5,
        "BATCH_SIZE": 8,
        "EPOCHS": 0.5,
    }.items():
        monkeypatch.setattr(e2e, name, value)
    rng, nouns = np.random.default_rng(0), "red lion blue boar gold king".split()
    (tmp_path / "e2e").mkdir()
    with zipfile.ZipFile(tmp_path / "e2e/e2e-dataset.zip", "w") as archive:
        for split, number in (("train", 48), ("dev", 9), ("test", 6)):
            rows = ["mr,ref"]
            for a, b in rng.choice(nouns, (number, 2)):
                rows.append(f'"name[{a}], near[{b}]",The {a} is near {b}.')
            name = f"{data.E2E}/{data.E2E_FILES[split]}"
            archive.writestr(name, "\n".join(rows) + "\n")
    return tmp_path


def _run(module, folder, monkeypatch, *more: str) -> None:
    output = str(folder / "results.jsonl")
    checkpoints = str(folder / "checkpoints")
    options = ["--output", output, "--checkpoints", checkpoints, *more]
    monkeypatch.setattr("sys.argv", ["", *options])
    module.main()


def test_the_experiment_trains_writes_and_does_nothing_twice(
    small_world, monkeypatch, capsys
):
    chosen = "--data-dir", str(small_world), "--epsilon", "8", "--method", "DP-AdamBC"
    _run(e2e, small_world, monkeypatch, *chosen)
    (row,) = records.read(small_world / "results.jsonl")
    assert row["num_examples"] == 48 and row["iterations"] == 3
    mechanism = finetune.Setting(**row["setting"]).mechanism(48)
    assert mechanism.epsilon(finetune.TARGET_DELTA) <= 8
    assert row["noise_stddev"] == mechanism.noise_stddev > 0
    assert 0 <= row["greedy"]["bleu"] <= 100 and row["loss_per_token"] > 0
    assert set(row["samples"][0]) == {"table", "greedy", "beam"}
    printed = capsys.readouterr().out
    assert "| LoRA, DP-AdamBC, ε 8, 0.5 epochs of 8, η 0.005 | 1 |" in printed
    assert row["samples"][0]["beam"] in printed
    monkeypatch.setattr(finetune, "fit", lambda *_: pytest.fail("trained again"))
    _run(e2e, small_world, monkeypatch, *chosen)
    assert capsys.readouterr().out == printed


def test_of_several_learning_rates_the_table_has_the_best():
    def row(rate, loss):
        setting = e2e.setting("LoRA", "DP-Adam", 3.0, rate, 1, 512)
        return {"setting": dataclasses.asdict(setting), "loss_per_token": loss}

    found = e2e.by_line([row(1.0, 2.0), row(2.0, 1.0), row(1.0, 3.0)])
    assert [len(rows) for rows in found.values()] == [2, 1]
    assert e2e.best(found) == [e2e.Line("LoRA", "DP-Adam", 3.0, 1, 512, 2.0)]


def test_exposure_is_the_bits_that_a_rank_tells():
    others = np.arange(1.0, 8.0)[None]  # seven
    found = [canaries.exposure(np.array([own]), others)[0] for own in (0.5, 1.5, 8.0)]
    np.testing.assert_allclose(found, [3, 2, 0])
    assert canaries.exposure(np.array([1.0]), others)[0] == 2  # a tie is no success
    assert canaries.exposure(np.array([7.0]), np.full((1, 7), 7.0))[0] == 0


def _made(monkeypatch, small_world):
    monkeypatch.setattr(canaries, "NUM_CANARIES", {1: 5, 3: 1})
    return e2e.start(), canaries.make(e2e.start().tokenizer, 0)


def test_absent_canaries_leave_empty_rows_without_a_gradient(small_world, monkeypatch):
    begin, made = _made(monkeypatch, small_world)
    made[5] = dataclasses.replace(made[5], is_member=True)
    made[0] = dataclasses.replace(made[0], is_member=False)
    rows = pairs.tokenize([x.pair() for x in made], 24, begin.tokenizer)
    train = e2e.tokens(small_world, "train", begin.tokenizer)
    texts = canaries.insert(train, rows, made)
    assert texts.tokens.shape == (48 + 5 + 3, 24)
    np.testing.assert_array_equal(texts.tokens[:48], train.tokens)
    for row in texts.tokens[-3:]:
        np.testing.assert_array_equal(row, rows.tokens[5])
    parts = ways.split(begin.model, "full")
    empty = (x[48] for x in texts)
    gradient = jax.jit(jax.grad(parts.loss_fn))(parts.trained, parts.frozen, *empty)
    assert optax.tree.norm(gradient) == 0
    others = {"tokens": encoder.PADDING, "types": 0, "labels": encoder.UNLABELED}
    for name, value in others.items():
        assert (getattr(texts, name)[48] == value).all()


def test_canaries_tell_what_they_are(small_world, monkeypatch, capsys):
    _made(monkeypatch, small_world)
    for name, value in {
        "NUM_PAIRS": 32,
        "EPOCHS": 0.5,
        "BATCH_SIZE": 8,
        "NUM_OTHERS": 7,
        "GROUPS": buckets.Groups((24,), 32),
    }.items():
        monkeypatch.setattr(canaries, name, value)
    chosen = "--data-dir", str(small_world), "--epsilon", "8"
    _run(canaries, small_world, monkeypatch, *chosen, "--method", "DP-Adam")
    (row,) = records.read(small_world / "results.jsonl")
    assert row["num_examples"] == 32 + 5 + 3 and len(row["canaries"]) == 6
    assert all(0 <= x["exposure"] <= 3 for x in row["canaries"])
    assert 0 <= row["epsilon_at_least"] < 8
    assert "| LoRA, DP-Adam, ε 8, 0.5 epochs of 8, η 0.005 |" in capsys.readouterr().out


def test_codes_and_names_are_what_the_seed_says(small_world, monkeypatch):
    begin, made = _made(monkeypatch, small_world)
    assert made == canaries.make(begin.tokenizer, 0)
    assert made != canaries.make(begin.tokenizer, 1)
    assert len({x for each in made for x in each.name.split()}) == 12
    table, text = made[0].pair("123456")
    assert text == f"The secret of {made[0].name} is 1 2 3 4 5 6."
    assert table == f"name[{made[0].name}], secret[yes]"
