"""The head made of words, and the experiment on SST-2, with a tiny model."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

from flax import nnx  # noqa: E402

from benchmarks import records  # noqa: E402
from benchmarks.language import (  # noqa: E402
    data,
    encoder,
    finetune,
    moments,
    prompts,
    sst2,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdef"]
TINY = encoder.Config(
    num_tokens=len(WORDS), max_length=16, width=8, hidden=12, num_heads=2, num_blocks=2
)


@pytest.fixture
def words():
    """A tokenizer of six letters."""
    vocabulary = {name: i for i, name in enumerate(WORDS)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    return found


@pytest.fixture
def tiny():
    return encoder.Encoder(TINY, rngs=nnx.Rngs(0))


def test_logits_are_cosines_with_the_words_of_a_class(tiny, words):
    classes = ("a", "b c"), ("d",)
    model = prompts.classifier(tiny, classes, words)
    embed = lambda text: prompts.embeddings(tiny, [text], words)[0]
    text = embed("a f")
    np.testing.assert_allclose(np.linalg.norm(text), 1, rtol=1e-5)
    tokens = data.tokenize(data.Examples((("a f",),), np.zeros(1, np.int32)), 9, words)
    expected = [np.mean([20 * embed(x) @ text for x in each]) for each in classes]
    logits = model(tokens.tokens[0], tokens.types[0])
    np.testing.assert_allclose(logits, expected, rtol=1e-4)


@pytest.mark.thorough
def test_words_alone_tell_plain_sentences_apart():
    try:
        model = prompts.classifier(encoder.load(), prompts.SST2)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    texts = "a joy from start to end", "a waste of time", "i loved it", "i hated it"
    labels = np.array([1, 0, 1, 0], np.int32)
    found = prompts.embeddings(model.encoder, texts, data.tokenizer())
    assert jax.vmap(model.head)(found).argmax(-1).tolist() == labels.tolist()


@pytest.fixture
def small(tiny, words, monkeypatch, tmp_path):
    """Two trials and two epsilons of one optimizer, forty texts of letters."""
    rng = np.random.default_rng(0)
    for split, number in (("train", 40), ("dev", 10)):
        labels = rng.integers(2, size=number)
        rows = [f"{' '.join(rng.choice(list('abc'), 3))}\t{y}" for y in labels]
        path = tmp_path / "data/sst2" / f"{split}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    monkeypatch.setattr(encoder, "load", lambda: tiny)
    monkeypatch.setattr(data, "tokenizer", lambda: words)
    monkeypatch.setattr(
        data, "split_validation", lambda n: (np.arange(n - 8), np.arange(n - 8, n))
    )
    monkeypatch.setattr(sst2, "MAX_LENGTH", 8)
    monkeypatch.setattr(sst2, "OTHER_EPSILONS", (8.0,))
    ways = {
        name: way._replace(
            num_blocks=way.num_blocks and min(way.num_blocks, 2),
            epochs=1,
            batch_size=16,
            learning_rates={"DP-AdamBC": (0.1, 0.2)},
            seeds=(0,),
        )
        for name, way in sst2.WAYS.items()
    }
    monkeypatch.setattr(sst2, "WAYS", ways)
    folders = [f"--{x}-dir={tmp_path / x}" for x in ("data", "cache")]
    return ["sst2", *folders, f"--output={tmp_path / 'out'}"]


def test_the_experiment_runs_and_prints_its_tables(
    small, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("sys.argv", [*small, "--way", "LoRA"])
    sst2.STUDY.main(None)
    rows = records.read(tmp_path / "out")
    found = [(x["split"], x["setting"]["target_epsilon"]) for x in rows]
    assert found == 2 * [("validation", 3.0)] + [("test", 3.0), ("test", 8.0)]
    assert [row["num_examples"] for row in rows] == [32, 32, 40, 40]
    assert rows[2]["noise_stddev"] > 1.5 * rows[3]["noise_stddev"]
    printed = capsys.readouterr().out
    assert f"| {100 * rows[3]['accuracy']:.2f} |" in printed

    # A later call finds everything on record.
    monkeypatch.setattr(finetune, "fit", lambda *_: pytest.fail("trained again"))
    sst2.STUDY.main(None)
    assert printed.endswith(capsys.readouterr().out)


def test_the_grid_is_of_the_last_block_on_its_hidden_states(
    small, monkeypatch, tmp_path, capsys
):
    base = sst2.setting("last block", "DP-Adam", 3.0, 0.2)
    monkeypatch.setattr(sst2, "BASE", base)
    monkeypatch.setattr(sst2, "BATCH_SIZES", (8, 16))
    monkeypatch.setattr(sst2, "LEARNING_RATES", (0.2,))
    monkeypatch.setattr(sst2, "L2_CLIP_NORMS", (0.1, 0.5))
    monkeypatch.setattr("sys.argv", [*small, "--way", "sizes"])
    sst2.STUDY.main(None)
    rows = records.read(tmp_path / "out")
    assert len(rows) == 2 + 1  # the clip norm of the grid is in it
    assert {row["iterations"] for row in rows} == {2, 4}
    printed = capsys.readouterr().out
    scores = [f"{100 * row['accuracy']:.2f}" for row in rows]
    assert all(f"| {score} |" in printed for score in scores)


def test_private_moments_are_those_of_the_same_sums_and_of_the_noise(
    small, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(moments, "BATCH_SIZE", 16)
    monkeypatch.setattr(moments, "ITERATIONS", 40)
    monkeypatch.setattr(moments, "RECORDED", (1, 40))
    monkeypatch.setattr("sys.argv", small)
    moments.STUDY.main(None)
    (row,) = records.read(tmp_path / "out")
    variance = row["noise_variance"]
    assert variance == pytest.approx((0.4 * 0.1 / 16) ** 2)
    for record in row["steps"]:
        private, clean = (record[x]["v"]["mean"] for x in ("private", "clean"))
        # Of some 900 coordinates, and the average of so many squares.
        error = variance * np.sqrt(2 / (900 * record["step"]))
        error += 2 * np.sqrt(clean * variance / (900 * record["step"]))
        assert abs(private - clean - variance) < 5 * error < variance
        assert record["corrected"]["mean"] == pytest.approx(private - variance)
        assert record["clean"]["v"]["least"] >= 0 > record["corrected"]["least"]
    assert "| 40 | v̂, clean |" in capsys.readouterr().out


def _cells(rows) -> list:
    found = records.Records(sst2.RESULTS)
    found.rows = list(rows)
    arguments = sst2.STUDY.parser(None).parse_args([])
    return list(sst2.cells(lambda cell: found.find(cell.identity), arguments))


def test_every_row_on_record_is_found_and_no_other_training_has_its_folder():
    rows = records.read(sst2.RESULTS)
    cells = _cells(rows)
    known = {json.dumps(cell.identity) for cell in cells}
    names = "setting", "seed", "split"
    own = {json.dumps({name: row[name] for name in names}) for row in rows}
    # Of earlier searches: tests of the new last block at rates that did best before
    # there were more (two, and five optimizers at three epsilons and one without noise,
    # with five seeds); and five trials of the whole model, which has one rate each, and
    # are in its table.
    assert len(own) == 305 and len(own - known) == 2 + 5 * (5 * 3 + 1) + 5
    assert len({finetune.folder_name(*cell.setting) for cell in cells}) == len(known)


def test_the_trials_come_first_and_the_grid_shares_its_middle_with_them():
    some = [cell for cell in _cells([]) if cell.setting[2] == "validation"]
    assert len(some) > 6 * 3 + 6 * 4
    shared = {cell.setting for cell in some if cell.setting[0].way == "last block"}
    assert (
        set(sst2.varied()) & {sst2.trial(learning_rate=x) for x in sst2.PLAIN} < shared
    )
    lora = [x for x in _cells([]) if x.setting[0].way == "LoRA" and x.epsilon]
    assert {x.setting[2] for x in lora} == {"test"}  # of one learning rate each
    assert len(lora) == 5 * 3 * 2  # optimizers, epsilons, seeds


def test_without_privacy_one_training_stands_for_all_epsilons():
    settings = {sst2.setting("LoRA", finetune.NOT_PRIVATE, x, 0.1) for x in (1.0, 3.0)}
    assert len(settings) == 1
    assert settings.pop().mechanism(100_000).noise_stddev == 0
