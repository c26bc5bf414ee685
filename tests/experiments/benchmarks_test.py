"""The experiments: their data, their training loop and what they report."""

import dataclasses
import functools
import gzip
import json
import warnings
from functools import partial

import chex
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

import dpadambc
from benchmarks import check, experiment
from benchmarks.adult import data as adult_data
from benchmarks.adult import run as adult_run
from benchmarks.digits import data as digits_data
from benchmarks.digits import run as digits_run
from benchmarks.methods import tasks
from benchmarks.speed import compile as speed_compile
from benchmarks.speed import contenders, given_away, gpu, largest, models, padding, plot
from benchmarks.speed import run as speed_run
from benchmarks.speed import sizes as speed_sizes
from benchmarks.speed import table as speed_table
from benchmarks.training import overhead, saving, scaling
from benchmarks.training import run as training_run
from tests import common

TRAIN = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, \
White, Male, 2174, 0, 40, United-States, <=50K
54, ?, 148657, Preschool, 1, Married-civ-spouse, ?, Wife, White, Female, 0, 0, 40, \
?, >50K

"""
TEST = """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, \
Male, 0, 0, 40, Trinadad&Tobago, <=50K.
44, Private, 160323, Masters, 14, Divorced, Sales, Unmarried, Black, Female, 99999, \
0, 100, Peru, >50K.
"""


def column(name, category=None):
    """The place of a column, or of one of its categories, among the features."""
    start = 0
    for key, kind in adult_data.COLUMNS.items():
        if key == name:
            return start + (kind.index(category) if category else 0)
        if kind is not None:
            start += len(kind) if isinstance(kind, tuple) else 1
    raise KeyError(name)


@pytest.fixture
def adult_dir(tmp_path):
    (tmp_path / "adult.data").write_text(TRAIN)
    (tmp_path / "adult.test").write_text(TEST)
    return tmp_path


def small_data(num_examples=20, num_features=4, num_classes=3):
    rng = np.random.default_rng(0)
    return experiment.Data(
        jnp.asarray(rng.normal(size=(num_examples, num_features)), jnp.float32),
        jnp.asarray(rng.integers(num_classes, size=num_examples), jnp.int32),
    )


def test_adult_features_are_the_published_categories_and_scaled_numbers(adult_dir):
    train, test, _ = adult_data.load(adult_dir)
    row = np.zeros(train.features.shape[1], np.float32)
    for name, category in {
        "workclass": "Private",
        "education": "Masters",
        "marital-status": "Divorced",
        "occupation": "Sales",
        "relationship": "Unmarried",
        "race": "Black",
        "sex": "Female",
        "native-country": "Peru",
    }.items():
        row[column(name, category)] = 1
    row[column("age")] = 0.44
    row[column("education-num")] = 14 / 16
    row[column("capital-gain")] = 1  # 99,999 is the largest
    row[column("hours-per-week")] = 1
    np.testing.assert_allclose(test.features[1], row, rtol=1e-6)


def test_adult_labels_are_read_with_and_without_the_dot(adult_dir):
    train, test, _ = adult_data.load(adult_dir)
    np.testing.assert_array_equal(train.labels, [0, 1])
    np.testing.assert_array_equal(test.labels, [0, 1])


def test_a_missing_value_has_no_category(adult_dir):
    features = np.asarray(adult_data.load(adult_dir).train.features)
    start, stop = column("workclass"), column("education")
    assert features[0, start:stop].sum() == 1
    assert features[1, start:stop].sum() == 0


def test_compressed_adult_files_are_read_alike(adult_dir, tmp_path_factory):
    compressed = tmp_path_factory.mktemp("gz")
    for name in ("adult.data", "adult.test"):
        content = gzip.compress((adult_dir / name).read_bytes())
        (compressed / f"{name}.gz").write_bytes(content)
    expected, got = adult_data.load(adult_dir), adult_data.load(compressed)
    jax.tree.map(np.testing.assert_array_equal, expected[:2], got[:2])
    assert expected.sha256 == got.sha256


def test_an_unpublished_category_is_refused(adult_dir):
    (adult_dir / "adult.data").write_text(TRAIN.replace("Adm-clerical", "Astronaut"))
    with pytest.raises(ValueError, match="Expected occupation .*, got {'Astronaut'}"):
        adult_data.load(adult_dir)


def test_missing_adult_files_are_named_with_their_source(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adult.data.gz in .*UCI Machine"):
        adult_data.load(tmp_path)


def test_the_validation_split_deals_every_example_once():
    parts = experiment.split_validation(small_data(), seed=0)
    assert [part.num_examples for part in parts] == [16, 4]
    features = np.concatenate([part.features for part in parts])
    np.testing.assert_array_equal(
        np.sort(features[:, 0]), np.sort(small_data().features[:, 0])
    )


def test_the_demo_writes_its_results_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(digits_run, "STEPS_PER_CALL", 2)
    rates = {"DP-AdamBC": 0.004, experiment.NON_PRIVATE: 0.004}
    monkeypatch.setattr(digits_run, "LEARNING_RATES", rates)
    report = digits_run.run(tmp_path / "demo", iterations=4, seeds=(0, 1))
    written = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert written == json.loads(json.dumps(report))
    assert written["methods"].keys() == rates.keys()
    assert written["steps"] == [0, 2, 4]

    train, _ = digits_data.load()
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=written["noise_multiplier"],
        sampling_prob=digits_run.BATCH_SIZE / train.num_examples,
        iterations=4,
        normalize_by=digits_run.BATCH_SIZE,
    )
    epsilon = mechanism.epsilon(written["delta"])
    assert epsilon == written["epsilon"] <= digits_run.TARGET_EPSILON
    for method, row in written["methods"].items():
        assert (row["share_at_floor"] is not None) == method.endswith("BC")
        assert np.shape(row["learning_curves"]) == (2, 3)
    for name in ("learning_curves.png", "second_moments.png"):
        picture = matplotlib.image.imread(tmp_path / "demo" / name)
        assert picture.std() > 0.05, f"{name} is blank"
    assert "ADD_OR_REMOVE_ONE" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["DP-SGD", "DP-AdamW-BC", experiment.NON_PRIVATE])
def test_the_adult_benchmark_keeps_the_best_learning_rate(method, monkeypatch):
    rates = (1e-6, 1.0)
    task = dataclasses.replace(
        adult_run.TASK, layer_sizes=(4, 5, 2), batch_size=500, iterations=4
    )
    monkeypatch.setattr(adult_run, "TASK", task)
    monkeypatch.setattr(adult_run, "MODEL", tasks.model(task, False))
    monkeypatch.setattr(adult_run, "SEEDS", (0, 1))
    for name in ("OF_SGD", "OF_ADAM"):
        monkeypatch.setattr(adult_run, name, rates)
    # A task that is learned in a few steps: is the first feature positive?
    data = small_data(num_examples=2_000, num_classes=2)
    data = data._replace(labels=(data.features[:, 0] > 0).astype(jnp.int32))
    epsilon = None if method == experiment.NON_PRIVATE else 8.0
    (cell,) = (
        each
        for each in adult_run.cells()
        if (each.method, each.epsilon) == (method, epsilon)
    )
    row = adult_run.evaluate(cell, data, data)
    assert row["learning_rate"] == 1.0
    assert len(row["test_accuracy"]) == 2
    assert min(row["test_accuracy"]) > row["validation_accuracy_of_trials"][1e-6]
    assert (row["share_at_floor"] is not None) == method.endswith("BC")
    assert (row["epsilon"] is not None) == (epsilon is not None)


def test_the_adult_table_marks_the_best_of_each_epsilon():
    row = {"learning_rate": 0.1, "share_at_floor": None}
    cells = [
        (1, "DP-SGD", 0.8),
        (1, "DP-Adam", 0.7),
        (3, "DP-SGD", 0.7),
        (3, "DP-Adam", 0.9),
        (None, experiment.NON_PRIVATE, 0.95),
    ]
    rows = [
        row
        | {"method": method, "target_epsilon": epsilon}
        | {"test_accuracy": [mean - 0.001, mean, mean + 0.001]}
        | {"majority_class_test_accuracy": 0.6}
        for epsilon, method, mean in cells
    ]
    text = adult_run.tables(rows)["accuracy"]
    assert "| DP-SGD | **80.00 ± 0.10** | 70.00 ± 0.10 |" in text
    assert "| DP-Adam | 70.00 ± 0.10 | **90.00 ± 0.10** |" in text
    assert "more than 20.00 apart" in text and "95.00 ± 0.10" in text


def small_decoder(batch_size=3, width=16, **form):
    return models.decoder(
        batch_size, width, layers=2, heads=2, length=6, vocabulary=11, **form
    )


SMALL_PROBLEMS = {
    "transformer": lambda: models.transformer(
        4, width=16, layers=1, heads=2, length=5, vocabulary=11
    ),
    "decoder": lambda: small_decoder(),
    "unrolled decoder": lambda: small_decoder(scanned=False, rematerialized=False),
    "encoder": lambda: models.encoder(
        3, 5, width=16, layers=2, heads=2, intermediate=8, vocabulary=11, positions=7
    ),
    "mlp": lambda: models.mlp(4, sizes=(5, 3, 2)),
    "cnn5": lambda: models.cnn5(2, channels=(2, 3, 4, 5, 3), side=16),
    "resnet18": lambda: models.resnet18(3, widths=(8, 16), side=8, classes=3),
    "unet": lambda: models.unet(3, widths=(8, 16), side=8),
    "mixer": lambda: models.mixer(3, width=8, layers=1, side=8, classes=3),
    "gcn": lambda: models.gcn(6, rows=3, features=5, latent=4, classes=3),
    "lstm": lambda: models.lstm(3, hidden=4, layers=2, length=5, inputs=3, classes=2),
}


@pytest.fixture
def as_users_write():
    """Others' code broadcasts as users do, and is not ours to keep up to date."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


written_by_users = pytest.mark.usefixtures("as_users_write")


@written_by_users
@pytest.mark.parametrize("name", SMALL_PROBLEMS)
def test_the_models_that_are_timed_have_one_loss_written_in_two_ways(name):
    models.check_losses(SMALL_PROBLEMS[name]())


@written_by_users
def test_the_models_that_are_timed_have_the_published_numbers_of_parameters():
    assert models.cnn5(1).num_params == 411_466
    assert models.gcn(1).num_params == 173_695
    assert round(models.mixer(1).num_params / 1e6, 1) == 4.4
    assert models.resnet18(1).num_params == 11_173_962
    assert round(models.unet(1).num_params / 1e6, 1) == 2.3
    assert round(models.decoder(1).num_params / 1e6, 1) == 13.7
    assert round(models.encoder(1, length=64).num_params / 1e6, 1) == 22.7


class OfZeros:
    """Draws zeros, which take no time and no memory."""

    def normal(self, *, size, **_):
        return np.broadcast_to(np.float32(0), size)

    def uniform(self, *, size):
        return np.broadcast_to(np.float32(0), size)

    def integers(self, *_, size):
        return np.broadcast_to(np.int32(0), size)


@written_by_users
@pytest.mark.parametrize("of_gpu", [False, True])
@pytest.mark.parametrize("name", speed_sizes.by_name())
def test_every_model_that_can_be_chosen_is_a_program(name, of_gpu, monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", lambda seed: OfZeros())

    def loss():
        problem = speed_sizes.by_name(of_gpu)[name]()
        return problem.batch_loss(problem.params, *problem.arguments)

    assert jax.eval_shape(loss).shape == ()


@pytest.mark.parametrize("name", ["transformer-16", "gcn"])
@pytest.mark.parametrize("options", [[], ["--gpu-sizes"]])
def test_a_model_is_timed_by_its_name(name, options, monkeypatch, tmp_path):
    built = []
    chosen = lambda of_gpu: {name: lambda: built.append(of_gpu)}
    output = str(tmp_path / "results.json")
    monkeypatch.setattr(speed_run.sizes, "by_name", lambda of_gpu=False: chosen(of_gpu))
    monkeypatch.setattr(speed_run, "measure_model", lambda *_: {"gradients": {}})
    monkeypatch.setattr(speed_run.table, "render", lambda results: "")
    command = ["run", "--models", name, "--output", output, *options]
    monkeypatch.setattr(speed_run.sys, "argv", command)
    speed_run.main()
    assert built == [bool(options)]


@written_by_users
def test_the_decoder_is_the_same_function_in_a_loop_and_unrolled():
    losses = []
    for scanned in (True, False):
        for rematerialized in (True, False):
            problem = small_decoder(scanned=scanned, rematerialized=rematerialized)
            models.check_losses(problem)
            losses.append(problem.batch_loss(problem.params, *problem.batch))
            jaxpr = jax.make_jaxpr(problem.batch_loss)(problem.params, *problem.batch)
            assert ("scan" in str(jaxpr)) == scanned
            assert ("remat" in str(jaxpr)) == rematerialized
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-6)


@written_by_users
@pytest.mark.parametrize("name", ["decoder", "encoder", "mlp"])
def test_only_the_decoder_is_timed_in_microbatches(name):
    grad_fns, _ = contenders.build(SMALL_PROBLEMS[name]())
    expected = contenders.MICROBATCHED if name == "decoder" else ()
    assert {name for name in grad_fns if "microbatches" in name} == set(expected)


# The others are made of the same layers.
SOME = {"mlp", "gcn", "cnn5", "lstm", "transformer", "resnet18", "mixer"}


@written_by_users
@pytest.mark.parametrize(
    "name", [x if x in SOME else common.thorough(x) for x in SMALL_PROBLEMS]
)
def test_contenders_give_the_same_gradient(name):
    problem = SMALL_PROBLEMS[name]()
    grad_fns, _ = contenders.build(problem)
    assert {"non-private", "dpadambc", "vmap", "optax"} <= set(grad_fns)
    del grad_fns["non-private"]
    args = (problem.params, *problem.batch)
    grads = [jax.jit(fun)(*args) for fun in grad_fns.values()]
    for other in grads[1:]:
        chex.assert_trees_all_close(grads[0], other, rtol=1e-3, atol=1e-5)


@written_by_users
def test_the_speed_of_a_small_network_is_measured_and_tabled():
    problem = SMALL_PROBLEMS["mlp"]()
    row = speed_run.measure_model(problem, rounds=2)
    for case in row["gradients"].values():
        assert case["milliseconds"]["q1"] <= case["milliseconds"]["median"]
        assert case["peak_megabytes"] > 0
    assert row["gradients"]["non-private"]["time_ratio"]["median"] == 1
    assert row["operations"]["private"] > 0
    report = speed_table.render({"environment": {}, "models": {"mlp": row}})
    assert "| dpadambc |" in report


@pytest.mark.thorough
@written_by_users
def test_microbatches_are_tabled_with_their_memory_and_operations(monkeypatch):
    names = ("non-private", "dpadambc", "dpadambc, microbatches of 2")
    few = {name: contenders.ALL[name] for name in names}
    monkeypatch.setattr(contenders, "ALL", few)
    row = speed_run.measure_model(small_decoder(batch_size=16), rounds=1)
    counts = row["operations"]["contenders"]
    assert set(counts) == set(row["gradients"])
    assert counts["dpadambc, microbatches of 2"] > 0.9 * counts["dpadambc"]
    report = speed_table.microbatches({"models": {"decoder": row}})
    assert "| dpadambc, microbatches of 2 |" in report
    assert speed_table.microbatches({"models": {}}) == ""


@pytest.mark.thorough
@written_by_users
def test_the_loop_its_checkpoints_and_devices_are_measured_and_tabled():
    problem = models.mlp(8, (4, 3, 2))
    report = {
        "overhead": [overhead.measure(problem, rounds=2, steps_per_call=20)],
        "checkpoints": [saving.measure(problem, rounds=1)],
        "scaling": scaling.measure(problem, rounds=2),
    }
    assert report["overhead"][0]["ratio"]["median"] > 0
    assert report["checkpoints"][0]["bytes"] > 3 * 4 * problem.num_params
    rows = {(r["devices"], r["split_params"]): r for r in report["scaling"]}
    assert len(rows) == 2 * 4
    assert rows[2, True]["state_bytes"] < rows[2, False]["state_bytes"]
    assert "| MLP 4-3-2 | 8 | split | 8 |" in training_run.render(report)


@written_by_users
def test_a_contender_that_exceeds_the_memory_limit_is_not_timed():
    problem = SMALL_PROBLEMS["mlp"]()
    cases = speed_run.gradient_cases(problem)
    results, _ = speed_run.measure(cases, "non-private", 1, memory_limit=0)
    assert all("milliseconds" not in case for case in results.values())


@written_by_users
def test_the_largest_batch_is_the_last_that_fits():
    assert largest.largest_exponent(lambda exponent: exponent <= 21) == 21
    assert largest.largest_exponent(lambda exponent: False) is None
    assert largest.largest_exponent(lambda exponent: True) == largest.MOST
    problem = SMALL_PROBLEMS["mlp"]()
    fits = largest.largest_batch(problem, "vmap", memory=1e5)
    assert largest.peak_bytes(problem, "vmap", fits) <= 1e5
    more = round(fits * largest.FACTOR)
    assert largest.peak_bytes(problem, "vmap", more) > 1e5


def planned_in_twos(problem, memory_limit):
    if memory_limit < 1e4:
        raise ValueError("nothing fits")
    return 2 if problem.batch_size > 2 else None


@written_by_users
def test_the_largest_planned_batch_is_in_microbatches(monkeypatch):
    monkeypatch.setattr(contenders, "planned_microbatch_size", planned_in_twos)
    problem = models.mlp(4, sizes=(20, 30, 2))
    row = largest.largest_batches(problem, 1e5, ("dpadambc", largest.PLANNED))
    whole, planned = row["batch_sizes"].values()
    assert planned > whole
    assert row["planned_microbatch_size"] == 2
    assert largest.largest_batch(problem, largest.PLANNED, memory=1e3) is None
    report = speed_table.largest({"gibibytes": 1e-4, "models": {"mlp": row}})
    assert f"| {whole} | {planned} |" in report


@written_by_users
def test_the_plan_is_asked_for_one_example_and_a_whole_batch(monkeypatch):
    asked = []

    class Explanation:
        microbatch_size = 3

    def explain(fun, params, *example, batch_size, memory_limit):
        del fun, params
        asked.append(([x.shape for x in example], batch_size, memory_limit))
        return Explanation()

    monkeypatch.setattr(dpadambc, "explain", explain)
    problem = SMALL_PROBLEMS["mlp"]()
    assert contenders.planned_microbatch_size(problem, 1e6) == 3
    assert asked == [([(5,), ()], 4, 1_000_000)]


@pytest.mark.thorough
@written_by_users
def test_the_time_of_compilation_is_measured_and_tabled():
    sizes = dict(batch_size=2, width=8, layers=2, heads=2, length=3, vocabulary=5)
    one = partial(speed_compile.measure_here, **sizes)
    cases = ("non-private", "dpadambc", "adam, step", "private, step")
    results = speed_compile.measure(["scan, remat"], cases, 2, one)
    row = results["scan, remat"]["cases"]
    assert row["non-private"]["ratio"]["median"] == 1
    assert row["adam, step"]["ratio"]["median"] == 1
    for case in row.values():
        times = {stage: spread["median"] for stage, spread in case["seconds"].items()}
        assert 0 < times["trace"] < times["total"]
        assert 0 < times["compile"] < times["total"]
    report = speed_table.compile_times({"models": results})
    assert "| decoder, scan, remat | private, step |" in report


def test_the_times_of_pytorch_are_tabled_with_the_errors_and_versions():
    text = json.loads(speed_table.PYTORCH.read_text())
    report = speed_table.pytorch(text)
    assert "| Opacus, hooks |" in report
    assert "opacus 1.6.0" in report
    assert speed_table.pytorch_name("ghost, untied head").startswith("Opacus, ghost")
    case = {"error": "ValueError: no"}
    row = {"model": "net", "batch_size": 2, "gradients": {"opake": case}}
    row |= {"command": "python", "environment": {"torch": "2"}}
    assert "- net, batch 2, Opake: ValueError: no" in speed_table.pytorch(
        {"models": {"net": row}}
    )


def test_a_step_on_poisson_batches_is_timed_against_one_without_padding():
    line = padding.measure(padding.SMALL["MLP"], batch_size=8, draws=3)
    assert line["rows"] > line["batch_size"] == 8
    assert 0 < line["mean_examples"] < line["rows"]
    line |= {"model": "MLP", "device": "cpu", "ratio_of_means": 1.234}
    twice = [line | {"ratio_of_means": 5.678}, {"date": "today"}, line]
    report = padding.table(twice)
    assert "1.23" in report and "5.68" not in report


def test_what_is_frozen_has_no_gradient_and_is_timed_alike():
    with jax.numpy_rank_promotion("allow"):
        problem = models.encoder(**gpu.SMALL["encoder"])
    cases = gpu.gradients(gpu.low_rank(problem))
    with jax.numpy_rank_promotion("allow"):
        ordinary, private = (fun(*args) for fun, args in cases.values())
    chex.assert_trees_all_equal_shapes_and_dtypes(ordinary, private)
    assert {"q", "v"} == set(private["blocks"][0])
    steps = gpu.steps(gpu.low_rank(problem)).values()
    with jax.numpy_rank_promotion("allow"):
        steps = [fun(*args)[0] for fun, args in steps]
    chex.assert_trees_all_equal_shapes_and_dtypes(*steps, ordinary)


def test_the_share_that_rounding_costs_is_that_of_an_outer_product(monkeypatch):
    mlp = functools.partial(models.mlp, sizes=(400, 300, 3))
    monkeypatch.setattr(given_away, "MODELS", {"MLP": mlp})
    # k' of TF32 and of bfloat16: no sum is in the norm, and biases have little of it.
    shares = ["| MLP | float32 | 0.20 | 0.39 |", "| MLP | bfloat16 | 0.39 | 0.39 |"]
    assert given_away.table().splitlines()[2:] == shares


def test_of_a_row_on_a_gpu_the_later_measurement_counts():
    line = {"row": "net", "case": "ordinary", "milliseconds": 1.0}
    other = line | {"case": "private", "milliseconds": 2.0, "ratio": {"median": 2.0}}
    lines = [{"device": "old"}, line, other, {"device": "new"}]
    found = gpu.records([*lines, other | {"ratio": {"median": 3.0}}])
    assert found["net"]["private"]["device"] == "new"
    assert found["net"]["ordinary"]["device"] == "old"
    assert "| net | 1.0 | 3.00 | - | -, - |" in gpu.table(found)


def test_the_ratios_of_speed_are_drawn():
    results = speed_table.load([speed_table.RESULTS])
    pytorch = json.loads(speed_table.PYTORCH.read_text())
    on_gpu = gpu.load(gpu.RESULTS, gpu.PEERS)
    time, memory = plot.picture(results, pytorch, on_gpu).axes
    labels = [label.get_text() for label in time.get_yticklabels()]
    assert sum("cores" in label for label in labels) == len(results["models"])
    assert 3 < sum("NVIDIA" in label for label in labels)
    assert all(("cores" in label) != ("NVIDIA" in label) for label in labels)
    assert len(time.lines) > len(memory.lines)
    time, _ = plot.first_screen(results, pytorch, on_gpu).axes
    assert len(time.get_yticklabels()) == 5


def test_the_sentences_of_the_first_screens_are_as_the_records_have_them():
    made = list(check.claims())
    assert len(made) > 30
    for page, words in made:
        assert check.is_there(page, words), (page, words)
    page, words = made[0]
    assert not check.is_there(page, words.replace("0.9", "0.8"))  # negative control
