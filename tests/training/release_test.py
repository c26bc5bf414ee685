"""What is published of a run, and the file that says how private it is."""

import collections
import contextlib
import json

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dpadambc import training
from dpadambc.mechanisms import trials
from dpadambc.training import _account, _rows, _siblings
from tests import common

# Where no warning is expected, one is an error, also of those that other tests ignore.
pytestmark = pytest.mark.filterwarnings("error:This process has made")

X = jnp.asarray(np.random.default_rng(0).normal(size=(100, 3)), jnp.float32)
MECHANISM = common.poisson_gaussian(iterations=5, normalize_by=25)
KEY = training.secret_key()


def fit(params, loss_fn, **options):
    return training.fit(
        loss_fn,
        params,
        options.pop("data", (X,)),
        MECHANISM,
        optax.adam(0.1),
        key=options.pop("key", KEY),
        target_delta=1e-5,
        **options,
    )


def of_tree(params, x):
    return (params["w"].astype(float) @ x + params["inner"][0] - 1) ** 2


TREE = {"w": jnp.ones(3, jnp.bfloat16), "inner": (jnp.zeros(()),)}


def test_a_release_has_no_key_and_no_loss():
    result = fit(TREE, of_tree, average_decay=0.9)
    found = training.releasable(result)
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    assert any(map(is_key, jax.tree.leaves(result.state)))
    assert not any(map(is_key, jax.tree.leaves(found)))
    assert not hasattr(found, "history") and not hasattr(found, "noise")
    same = training.releasable(result.state)
    chex.assert_trees_all_equal_structs(found, same)


def test_an_average_that_was_not_made_is_not_read(tmp_path):
    training.save_release(tmp_path / "model.npz", fit(TREE, of_tree))
    with pytest.raises(ValueError, match="made without average_decay"):
        training.load_release(tmp_path / "model.npz", like=TREE, average=True)


def test_a_file_says_what_was_done(tmp_path):
    path = tmp_path / "model.npz"
    result = fit(TREE, of_tree, average_decay=0.9)
    about = training.save_release(path, result)
    params, read = training.load_release(path, like=TREE)
    assert read == about
    chex.assert_trees_all_equal_dtypes(params, TREE)
    chex.assert_trees_all_equal(params, result.state.params)
    average, _ = training.load_release(path, like=TREE, average=True)
    chex.assert_trees_all_equal(average, result.state.average)
    assert not np.array_equal(average["inner"][0], params["inner"][0])
    assert about["epsilon"] == MECHANISM.epsilon(1e-5)
    expected = dict(
        mechanism="dpadambc.mechanisms.PoissonGaussian",
        sampling_prob=0.25,
        neighboring_relation="ADD_OR_REMOVE_ONE",
        iterations=5,
        delta=1e-5,
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
    )
    assert expected.items() <= about.items()
    # No name of the file is of anything else than the parameters and their average.
    with np.load(path) as file:
        names = {name.split("[")[0] for name in file.files}
        assert names == {"params", "average", "about"}
        json.loads(str(file["about"]))


def test_the_steps_taken_count_rather_than_those_planned(tmp_path):
    def stop(progress):
        if progress.iterations == 2:
            raise training.Stop(is_public=True)

    about = training.save_release(tmp_path / "x", fit(TREE, of_tree, callback=stop))
    assert about["iterations"] == 2
    assert about["epsilon"] == MECHANISM.epsilon(1e-5, iterations=2)


@pytest.mark.slow
def test_modules_are_found_again(tmp_path):
    graph, state = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    module, static = eqx.partition(
        eqx.nn.Linear(3, 1, key=jax.random.key(0)), eqx.is_inexact_array
    )
    models = {
        "nnx": (state, lambda p, x: jnp.sum(nnx.merge(graph, p)(x) - 1) ** 2),
        "equinox": (module, lambda p, x: jnp.sum(eqx.combine(p, static)(x) - 1) ** 2),
        "an array": (jnp.zeros(3), lambda w, x: (w @ x - 1) ** 2),
    }
    for name, (params, loss_fn) in models.items():
        result = fit(params, loss_fn)
        training.save_release(tmp_path / name, result)
        found, _ = training.load_release(tmp_path / name, like=params)
        chex.assert_trees_all_equal_structs(found, params)
        chex.assert_trees_all_equal(found, result.state.params)


def test_the_file_of_another_model_is_refused(tmp_path):
    training.save_release(tmp_path / "x", fit(TREE, of_tree))
    with pytest.raises(ValueError, match="Expected parameters"):
        training.load_release(tmp_path / "x", like={"v": jnp.zeros(3)})
    with pytest.raises(ValueError, match="of shape"):
        training.load_release(tmp_path / "x", like={**TREE, "w": jnp.zeros(4)})


@pytest.mark.parametrize("seed", [0, 1234])
def test_a_key_that_can_be_guessed_is_warned_of(tmp_path, seed):
    """Its noise can be drawn again."""
    result = fit(TREE, of_tree, key=jax.random.key(seed))
    with pytest.warns(UserWarning, match=rf"is jax.random.key\({seed}\), which was"):
        training.save_release(tmp_path / "x", result)
    # Negative control: what the guess is worth.
    guessed = training.init_state(
        TREE, MECHANISM, optax.adam(0.1), key=jax.random.key(seed)
    )
    noise = MECHANISM.add_noise(key=jax.random.key(0))
    state = guessed.noise
    for _ in range(MECHANISM.iterations):
        _, state = noise.update(TREE, state, TREE)
    chex.assert_trees_all_equal(common.plain(state), common.plain(result.state.noise))
    # And a key of entropy is not found.
    training.save_release(tmp_path / "x", fit(TREE, of_tree, data=(X + 1,)))


def loss_of_vector(w, x):
    return (w @ x - 1) ** 2


def of_vector(**options):
    return fit(jnp.zeros(3), loss_of_vector, key=training.secret_key(), **options)


OTHERS = "has made {} other runs on these data. The epsilon in this file does not"


@pytest.mark.slow
@pytest.mark.guarantee
def test_the_best_of_several_runs_is_warned_of(tmp_path):
    first, second, third = (of_vector() for _ in range(3))
    for result in first, second, third:
        with pytest.warns(UserWarning, match=OTHERS.format(2)):
            training.save_release(tmp_path / "x", result)
    fourth = of_vector(spent=[first])
    with pytest.warns(UserWarning, match=OTHERS.format(2)):
        training.save_release(tmp_path / "x", fourth)
    last = of_vector(spent=[second, third, fourth])  # which was told of the first
    about = training.save_release(tmp_path / "x", last)
    training.save_release(tmp_path / "x", of_vector(spent=about))


@pytest.mark.slow
@pytest.mark.guarantee
def test_the_best_of_several_runs_after_one_on_other_people_is_warned_of(tmp_path):
    """By its key, or its file, that covers no run on these."""
    before = of_vector(data=(X + 1,))
    of_vector(spent=before)
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector(spent=before))
    about = training.save_release(tmp_path / "x", before)
    with pytest.warns(UserWarning, match=OTHERS.format(2)):
        training.save_release(tmp_path / "x", of_vector(spent=about))


@pytest.mark.slow
@pytest.mark.guarantee
def test_the_better_of_two_runs_after_one_of_another_process_is_warned_of(tmp_path):
    """Its file covers neither; a list of mechanisms may be of them, and covers one."""
    about = training.save_release(tmp_path / "x", of_vector(data=(X + 1,)))
    elsewhere = about | {"names": ["0123456789abcdef"]}
    of_vector(spent=elsewhere)
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector(spent=elsewhere))
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector(spent=[(MECHANISM, 4)]))


@pytest.mark.guarantee
def test_a_file_of_another_process_that_was_told_of_this_one_covers_it(
    tmp_path, monkeypatch
):
    ours = training.save_release(tmp_path / "x", of_vector())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(_account, "_TOLD", {})
        elsewhere.setattr(_account, "_WRITTEN", {})
        elsewhere.setattr(_siblings, "_RUNS", collections.deque())
        theirs = training.save_release(tmp_path / "x", of_vector(spent=ours))
    assert theirs["names"][1:] == ours["names"]
    training.save_release(tmp_path / "x", of_vector(spent=theirs))


def test_a_file_of_the_very_key_is_refused(tmp_path):
    """The two would add the same noise."""
    key = training.secret_key()
    first = fit(jnp.zeros(3), loss_of_vector, key=key)
    about = training.save_release(tmp_path / "x", first)
    with pytest.raises(ValueError, match="that of a run in spent="):
        fit(jnp.zeros(3), loss_of_vector, key=key, spent=about)


@pytest.mark.slow
@pytest.mark.guarantee
def test_what_is_no_run_is_refused(tmp_path):
    path = tmp_path / "model.npz"
    with pytest.raises(TypeError, match="got TrainState.*does not know its epsilon"):
        training.save_release(path, fit(TREE, of_tree).state)
    assert not path.exists()


@pytest.mark.parametrize("found", ["text", "array", "arrays"])
def test_what_is_no_file_of_a_release_is_refused(tmp_path, found):
    path = tmp_path / "model.npz"
    with path.open("wb") as file:
        if found == "text":
            file.write(b"a model")
        elif found == "array":
            np.save(file, np.zeros(3))
        else:
            np.savez(file, params=np.zeros(3))
    with pytest.raises(ValueError, match="to be a file of save_release"):
        training.load_release(path, like=jnp.zeros(3))
    with pytest.raises(FileNotFoundError):
        training.load_release(tmp_path / "other.npz", like=jnp.zeros(3))


@pytest.mark.slow
def test_a_run_after_a_search_is_warned_of(tmp_path):
    found = training.search(
        loss_of_vector,
        jnp.zeros(3),
        (X,),
        MECHANISM,
        optax.adam,
        [0.1, 0.2],
        trials=trials.Fixed(2),
        score=training.NoisyScore(
            lambda w, x: w @ x > 0, (X,), noise_multiplier=5.0, normalize_by=100
        ),
        key=training.secret_key(),
        target_delta=1e-5,
    )
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector())
    # A search is one, however many trials it told.
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector(spent=found))


@pytest.mark.slow
@pytest.mark.guarantee
def test_the_better_of_two_runs_after_a_search_on_other_people_is_warned_of(tmp_path):
    found = search(data=(X - 1,), trials=trials.Fixed(2))
    of_vector()
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        about = training.save_release(tmp_path / "x", of_vector(spent=found))
    assert found.name in about["names"]


def search(data=(X,), **options):
    return training.search(
        loss_of_vector,
        jnp.zeros(3),
        data,
        MECHANISM,
        optax.adam,
        [0.1, 0.2],
        score=training.PublicScore(lambda w, x: -loss_of_vector(w, x), (X[:50] + 1,)),
        target_delta=1e-5,
        **{"key": training.secret_key(), "trials": trials.Geometric(2)} | options,
    )


@pytest.mark.guarantee
def test_a_search_after_another_is_warned_of():
    """The second may have the candidates that the first made one think of."""
    key = training.secret_key()
    search(key=key)
    search(key=key)  # the same, again
    with pytest.warns(UserWarning, match="made 1 other runs .* of this search"):
        search()
    search(spent=())


LABELED = X, jnp.asarray(np.random.default_rng(1).integers(2, size=100))


def labeled_loss(w, x, y):
    return (w @ x - y) ** 2


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize(
    "other",
    [
        lambda x, y, w: (x, y - x @ w),
        lambda x, y, w: (jnp.tanh(x), y),
        lambda x, y, w: (jnp.tanh(x), np.asarray(y)),
        lambda x, y, w: (jnp.tanh(x), y.astype(jnp.float32)[:, None]),
        lambda x, y, w: (jnp.tanh(x), y.astype(jnp.int8)),
        lambda x, y, w: (x[:, :, None], -y),
    ],
    ids=[
        *("what a model left", "other features", "NumPy", "column", "int8", "image"),
    ],
)
def test_a_run_with_the_same_labels_or_features_is_warned_of(tmp_path, other):
    loss = lambda w, x, y: labeled_loss(w, x.reshape(3), y.reshape(()))
    run = lambda data: fit(jnp.zeros(3), loss, data=data, key=training.secret_key())
    first = run(LABELED)
    second = run(other(*LABELED, first.state.params))
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", second)


@pytest.mark.guarantee
def test_runs_on_the_same_people_in_another_order_or_split_are_warned_of(tmp_path):
    """Shuffled, or split, by the seed of each run."""
    rows = np.random.default_rng(3).normal(size=(130, 3)).astype(np.float32)
    run = lambda rows: of_vector(data=(rows,))
    first = run(rows[:100])
    run(np.random.default_rng(4).normal(size=(100, 3)).astype(np.float32))
    training.save_release(tmp_path / "x", first)  # the other is on other people
    shuffled = np.random.default_rng(5).permutation(100)
    for number, same in enumerate((rows[shuffled], rows[30:])):
        with pytest.warns(UserWarning, match=OTHERS.format(number + 1)):
            training.save_release(tmp_path / "x", run(same))


def test_rows_that_many_people_have_tell_nobody():
    answers = np.random.default_rng(0).integers(2, size=(1_000, 8))
    assert _rows.a_few((answers,)) == _rows.a_few((np.zeros((9, 40)),)) == frozenset()
    ages = np.random.default_rng(0).normal(size=(1_000, 2))
    found = _rows.a_few((ages, answers[:, 0]))
    assert found == _rows.a_few((jnp.asarray(ages[::-1]),)) and len(found) == 64
    assert len(found & _rows.a_few((ages[:500],))) > 16
    assert not found & _rows.a_few((ages + 1,))
    numbers = np.arange(1_000), answers[:, 0]  # others have the same
    ages_in_years = np.round(40 + 20 * ages[:, :1]).clip(20, 60)
    splines = np.maximum(ages_in_years - np.arange(20, 60, 5), 0)
    assert _rows.a_few(numbers) == _rows.a_few((splines,)) == frozenset()


def test_a_column_repeats_if_all_of_it_does():
    blocks = np.r_[np.zeros(256), np.random.default_rng(2).integers(2, size=700)]
    assert not _rows._repeats(blocks)
    assert _rows._repeats(np.arange(900) % 24)
    assert not _rows._repeats(np.r_[np.arange(900) % 24, 5])


GRID = jnp.tile(jnp.arange(3.0), (100, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "column",
    [
        jnp.ones(100),
        jnp.arange(100),
        np.repeat(np.arange(2), 50),
        GRID,
        np.arange(100) % 24,
        np.arange(100, dtype=np.float32) % 2,
        jax.random.split(jax.random.key(0), 100),
    ],
    ids=[
        "one weight",
        "numbers of rows",
        "sorted labels",
        "grid",
        "hours",
        "turns",
        "keys",
    ],
)
def test_what_two_data_sets_have_by_their_form_is_not(tmp_path, column):
    run = lambda x: fit(
        jnp.zeros(3),
        lambda w, x, y: loss_of_vector(w, x),
        data=(x, column),
        key=training.secret_key(),
    )
    run(X)
    training.save_release(tmp_path / "x", run(X + 1))


@pytest.mark.guarantee
def test_what_is_not_counted_in_a_run_is_warned_of_in_its_file(tmp_path):
    """An empty spent= may say that each epsilon is stated alone."""
    of_vector()
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector(spent=()))


@pytest.mark.guarantee
def test_a_run_that_was_refused_is_none(tmp_path):
    file = tmp_path / "history"
    file.write_text("{}\n")
    with pytest.raises((ValueError, FileExistsError)):
        of_vector(history_file=file)
    training.save_release(tmp_path / "x", of_vector())


class Rows:
    """The same examples, one by one."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return (np.asarray(X)[index],)


@pytest.mark.slow
def test_runs_on_other_data_and_one_that_goes_on_are_not_warned_of(tmp_path):
    checkpoints = training.Checkpoints(tmp_path / "run")

    def interrupt(progress):
        if progress.iterations == 2:
            raise KeyboardInterrupt

    of_vector(data=(X + 1,))
    for callback in interrupt, None:
        with contextlib.suppress(KeyboardInterrupt):
            result = of_vector(checkpoints=checkpoints, callback=callback)
    assert result.resumed_from == 0
    training.save_release(tmp_path / "x", result)
    training.save_release(tmp_path / "x", of_vector(data=Rows()))
    with pytest.warns(UserWarning, match=OTHERS.format(1)):
        training.save_release(tmp_path / "x", of_vector(data=Rows()))
