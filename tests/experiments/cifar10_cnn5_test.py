"""CNN5 on CIFAR-10: its fast form, its protocols, on images that are made here."""

import argparse
import dataclasses
import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from benchmarks import experiment
from benchmarks.cifar10 import cnn5, cnn5_training, data, muon, published, short
from dpadambc import clipping, training


class Plain(nn.Module):
    """The network as the papers write it: convolution, bias, tanh, max-pool."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = image[None]
        for i, features in enumerate((32, 64, 128), 1):
            padding = "VALID" if i == 1 else "SAME"
            x = nn.Conv(features, (3, 3), padding=padding, name=f"conv{i}")(x)
            x = nn.max_pool(nn.tanh(x), (2, 2), strides=(2, 2))
        x = nn.tanh(nn.Conv(256, (3, 3), name="conv4")(x))
        x = nn.Conv(10, (3, 3), name="conv5")(x)
        return nn.avg_pool(x, (3, 3)).reshape(10)


@pytest.fixture(scope="module")
def params():
    """Random, biases too."""
    found = cnn5.init(jax.random.key(0))
    noise = optax.tree.random_like(jax.random.key(1), found)
    return optax.tree.add_scale(found, 0.05, noise)


def test_the_network_is_that_of_the_papers(params):
    assert optax.tree.size(params) == cnn5.NUM_PARAMETERS
    slow = jax.eval_shape(Plain().init, jax.random.key(0), jnp.zeros((32, 32, 3)))
    chex.assert_trees_all_equal_shapes(params, slow["params"])


def test_the_fast_form_is_the_slow_twin(params):
    image = jax.random.normal(jax.random.key(2), (32, 32, 3))

    def logits_and_gradient(model):
        logits = lambda params: model.apply({"params": params}, image)
        found, pull = jax.vjp(logits, params)
        return found, pull(jnp.arange(10.0) - 4.5)[0]

    fast, slow = map(logits_and_gradient, (cnn5.CNN5(), Plain()))
    chex.assert_trees_all_close(fast, slow, rtol=1e-4, atol=1e-5)


def test_every_kernel_keeps_its_gradient_as_a_product_or_forms_a_small_one(params):
    image, label = jnp.zeros((32, 32, 3), jnp.uint8), jnp.int32(0)
    found = dpadambc.explain(
        cnn5.loss_fn, params, image, label, jax.random.key(0), batch_size=8,
        prng_argnum=3, batch_argnums=(1, 2),
    )  # fmt: skip
    rules = [found.rules[f"['conv{i}']['kernel']"] for i in range(1, 6)]
    assert rules == ["direct", "direct", "gram", "gram", "outer product"]


def test_a_view_is_a_crop_in_a_black_border_or_its_mirror_image():
    image = np.random.default_rng(0).integers(1, 256, (32, 32, 3), np.uint8)
    border = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    places = itertools.product(range(9), range(9))
    crops = [border[i : i + 32, j : j + 32] for i, j in places]
    known = {crop.tobytes(): (i, 0) for i, crop in enumerate(crops)}
    known |= {crop[:, ::-1].tobytes(): (i, 1) for i, crop in enumerate(crops)}
    keys = jax.random.split(jax.random.key(0), 2_000)
    views = jax.jit(jax.vmap(cnn5.augment, (None, 0)))(image, keys)
    found = np.array([known[np.asarray(view).tobytes()] for view in views])
    counts = np.bincount(found[:, 0], minlength=81)
    # Chi-square of 80 degrees of freedom: mean 80, standard deviation 12.6.
    assert ((counts - 2_000 / 81) ** 2 / (2_000 / 81)).sum() < 80 + 5 * 12.6
    assert abs(found[:, 1].mean() - 0.5) < 5 * 0.5 / 2_000**0.5


def test_accuracy_counts_every_image(params):
    images = np.random.default_rng(0).integers(
        256, size=(35, 32, 32, 3), dtype=np.uint8
    )
    labels = jax.vmap(lambda x: jnp.argmax(cnn5.logits(params, x)))(images)
    labels = labels.at[-1].add(1)
    assert cnn5.accuracy(params, images, labels) == pytest.approx(34 / 35)


# What follows trains a model of ten numbers.


@pytest.fixture
def tiny(monkeypatch):
    """Eight steps on forty images, of a linear model of their mean color."""
    logits = lambda params, image: params * image.astype(jnp.float32).mean() / 255
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels

    def loss_fn(params, image, label, key):
        return cross_entropy(logits(params, cnn5.augment(image, key)), label)

    def accuracy(params, images, labels):
        found = jax.vmap(functools.partial(logits, params))(images)
        return jnp.mean(found.argmax(-1) == labels)

    monkeypatch.setattr(cnn5, "init", lambda key: jax.random.normal(key, 10))
    monkeypatch.setattr(cnn5, "loss_fn", loss_fn)
    monkeypatch.setattr(cnn5, "accuracy", accuracy)
    monkeypatch.setattr(cnn5_training.Setting, "batch_size", 16)
    monkeypatch.setattr(cnn5_training.Setting, "steps_per_epoch", 4)
    monkeypatch.setattr(cnn5_training, "RECORD_EVERY", 20)
    monkeypatch.setattr(cnn5_training, "TARGET_DELTA", 1e-3)
    rng = np.random.default_rng(0)

    def images(number):
        pixels = rng.integers(256, size=(number, 32, 32, 3), dtype=np.uint8)
        return data.Images(pixels, rng.integers(10, size=number).astype(np.int32))

    return data.Cifar(images(40), images(20), False)


def test_a_training_goes_on_where_it_ended(tiny, tmp_path, monkeypatch):
    setting = cnn5_training.Setting("DP-AdamBC", 3.0, 15, 0.01)
    train = lambda name: cnn5_training.train(setting, 0, *tiny[:2], tmp_path / name)
    whole = train("whole")
    assert [record["iterations"] for record in whole["curve"]] == [20, 40, 60]
    assert whole["epsilon"] <= 3.0 and whole["num_examples"] == 40
    assert whole["num_scored"] == 20
    assert 0 <= whole["share_at_floor"] <= 1

    fit = training.fit

    def interrupted(*arguments, callbacks, **options):
        def stop(progress):
            callbacks(progress)
            if progress.iterations == 40:
                raise KeyboardInterrupt

        return fit(*arguments, callbacks=stop, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "fit", interrupted)
        train("parts")
    forget = lambda row: [{**r, "seconds": 0} for r in row["curve"]]
    assert forget(train("parts")) == forget(whole)


def test_choices_are_made_on_images_that_are_not_trained_on(
    tiny, tmp_path, monkeypatch
):
    seen = {}

    def train(setting, seed, examples, scored, folder):
        seen[seed] = examples, scored
        return {}

    monkeypatch.setattr(cnn5_training, "train", train)
    monkeypatch.setattr(data, "load", lambda _: tiny)
    folders = argparse.Namespace(data_dir=tmp_path, cache_dir=tmp_path)
    make = cnn5_training.prepare(folders)
    for seed, split in enumerate(("validation", "test")):
        make(cnn5_training.cell(short.setting("DP-SGD", 3.0, 0.01), seed, split))
    fit, validation = data.split_validation(40)
    for found, known in zip(
        (*seen[0], *seen[1]),
        (tiny.train.take(fit), tiny.train.take(validation), *tiny[:2]),
        strict=True,
    ):
        np.testing.assert_array_equal(found.images, known.images)


SETTINGS = (
    *(short.setting(method, 3.0, 0.01) for method in short.LEARNING_RATES),
    *published.SETTINGS,
)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_optimizer_moves_and_tells_of_its_moments(setting):
    optimizer, params = setting.optimizer(2.0), jnp.zeros(3)
    updates, state = optimizer.update(jnp.ones(3), optimizer.init(params), params)
    assert (updates < 0).all()
    known = setting.moments(state, 2.0)
    assert ("cosine_to_momentum" in known) == (setting.method != "DP-SGD")
    has_floor = "BC" in setting.name
    assert ("share_at_floor" in known) == has_floor


def _updates(optimizer, noise_stddev):
    """Of many coordinates without a gradient, and a few with a large one."""
    signal = jnp.where(jnp.arange(10_000) < 100, 5 * noise_stddev, 0.0)

    def step(state, key):
        noise = noise_stddev * jax.random.normal(key, signal.shape)
        updates, state = optimizer.update(signal + noise, state)
        return state, updates

    keys = jax.random.split(jax.random.key(0), 200)
    return jax.lax.scan(step, optimizer.init(signal), keys)[1][-1]


def test_the_floor_of_the_correction_does_nothing_without_the_subtraction():
    control = dpadambc.adam_bc(
        0.1, 2.0, b2=experiment.B2, variance_floor=experiment.VARIANCE_FLOOR,
        correction=0.0,
    )  # fmt: skip
    adam = optax.adam(0.1, b2=experiment.B2)
    chex.assert_trees_all_close(
        _updates(control, 2.0), _updates(adam, 2.0), rtol=1e-5, atol=1e-7
    )


def test_sgd_in_units_of_the_noise_is_adam_where_there_is_noise_alone():
    sgd = short.setting("DP-SGD", 3.0, 0.1).optimizer(2.0)
    adam = short.setting("DP-Adam", 3.0, 0.1).optimizer(2.0)
    noise = slice(100, None)
    one, other = (_updates(x, 2.0)[noise] for x in (sgd, adam))
    assert jnp.abs(one - other).max() < 0.3 * jnp.abs(one).max()
    assert jnp.corrcoef(one, other)[0, 1] > 0.99


def test_the_best_of_all_trials_is_trained_with_all_seeds():
    """Validation accuracy is highest at the third rate of each optimizer.

    AUTO-S has one rate, and no trials.
    """
    *searched, automatic = short.LEARNING_RATES
    assert automatic == experiment.AUTOMATIC

    def find(cell):
        setting = cell.setting
        assert cell.identity["split"] == "validation"
        third = short.LEARNING_RATES[setting.method][2]
        return {"accuracy": 0.6 if setting.learning_rate == third else 0.5}

    cells = list(short.cells(find, argparse.Namespace()))
    trials, tests = cells[:20], cells[20:]
    assert {cell.identity["seed"] for cell in trials} == {1_000}
    assert [cell.method for cell in trials[:5]] == searched
    assert len(tests) == 45 + 9
    for cell in tests:
        setting = cell.setting
        best = 0 if setting.method == automatic else 2
        assert setting.learning_rate == short.LEARNING_RATES[setting.method][best]
        assert cell.seed in short.PLAN.seeds and cell.identity["split"] == "test"
    assert [cell.epsilon for cell in tests[:6]] == [3.0] * 6
    # Before the trials are there, nothing is chosen.
    assert len(list(short.cells(lambda _: None, argparse.Namespace()))) == 20 + 9


def test_the_recipe_has_the_noise_of_the_flat_clip():
    automatic, flat = (
        short.setting(method, 3.0, 4e-3).mechanism(50_000)
        for method in (experiment.AUTOMATIC, "DP-Adam")
    )
    assert automatic.clip_rule == clipping.Automatic()
    assert dataclasses.replace(automatic, clip_rule=clipping.Flat()) == flat


def test_tables_and_pictures_have_what_is_on_record():
    rows = []
    for i, cell in enumerate(
        published.STUDY.cells(lambda _: None, argparse.Namespace())
    ):
        curve = [{"iterations": i, "accuracy": 0.1} for i in (240, 480)]
        made = {"accuracy": 0.5 + i / 100, "share_at_floor": None, "seconds": 60.0}
        rows.append(cell.identity | made | {"curve": curve})
    table = published.tables(rows)["published"]
    assert "| DP-AdamW | η 0.0015, λ 0.001 | 59.26 ± 0.3 | 50.00 | 1 | - | 1 |" in table
    assert "| DP-AdamW-BC, floor alone |" in table
    assert "| 55.00 |" in table
    (axes,) = published.picture(rows).axes
    assert axes.lines[0].get_ydata().tolist() == [10.0, 10.0]

    rows: list = []
    find = lambda cell: next(
        (r for r in rows if cell.identity.items() <= r.items()), None
    )
    for cell in short.cells(find, argparse.Namespace()):
        is_test = cell.identity["split"] == "test"
        accuracy = 0.4 + cell.identity["seed"] / 10 if is_test else 0.3
        rows.append(cell.identity | {"accuracy": accuracy, "curve": [{}]})
    table = short.tables(rows[:-1])["accuracy"]
    assert "| DP-AdamW | 0.002 | 50.00 ± 10.00 | 50.00 ± 10.00 |" in table
    assert "(2 of 3)" in table


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_weights_are_those_of_the_momentum_of_muon(count):
    """A matrix that is a number has the momentum for its update, without divisions."""
    linear = optax.contrib.scale_by_muon(
        ns_coeffs=(1.0, 0.0, 0.0), ns_steps=0, beta=muon.BETA, eps=1e9
    )

    def momentum(grads):
        state = linear.init(jnp.zeros((1, 1)))
        for grad in grads:
            updates, state = linear.update(jnp.full((1, 1), grad), state)
        return 1e9 * updates[0, 0]

    expected = [momentum(row) for row in np.eye(count)]
    last, norm = muon.momentum_weights(count)
    np.testing.assert_allclose(last, expected[-1], rtol=1e-4)
    np.testing.assert_allclose(norm, np.linalg.norm(expected), rtol=1e-4)


def test_the_corrected_muon_has_less_bias(monkeypatch):
    """A noise and its opposite leave the bias alone, to the second order."""
    monkeypatch.setattr(muon, "KERNELS", {"w": muon._AS_MATRIX, "b": None})
    plain, stddev = muon.muon(1.0), 0.05
    params = {"w": jnp.zeros((1, 1, 8, 4)), "b": jnp.zeros(4)}
    grads = optax.tree.random_like(jax.random.key(4), params)

    def update(optimizer, grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    exact = update(plain, grads)

    def bias(make):
        def mean_of_two(key):
            noise = optax.tree.random_like(jax.random.fold_in(key, 0), params)
            at = lambda sign: optax.tree.add_scale(grads, sign * stddev, noise)
            first, second = (update(make(key), at(sign))["w"] for sign in (1, -1))
            return (first + second) / 2 - exact["w"]

        keys = jax.random.split(jax.random.key(3), 20_000)
        found = jax.lax.map(mean_of_two, keys, batch_size=500)
        return jnp.linalg.norm(found.mean(0))

    corrected = lambda stddev: lambda key: muon.corrected(plain, stddev, key)
    assert bias(corrected(stddev)) < 0.3 * bias(lambda _: plain)
    # With no noise to correct it is Muon.
    chex.assert_trees_all_close(
        update(corrected(0.0)(jax.random.key(0)), grads), exact, rtol=1e-5
    )
