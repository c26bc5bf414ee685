"""What is published of a run, and the file that says how private it is."""

import json
import subprocess
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpadambc
from dpadambc import accounting, contrib, training
from tests import common

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
    result = fit(TREE, of_tree)
    found = training.releasable(result)
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    assert any(map(is_key, jax.tree.leaves(result.state)))
    assert not any(map(is_key, jax.tree.leaves(found)))
    assert found._fields == ("step", "params", "opt_state")
    np.testing.assert_array_equal(found.params["w"], result.params["w"])
    assert optax.tree.get(found.opt_state, "mu") is not None
    same = training.releasable(result.state)
    chex.assert_trees_all_equal_structs(found, same)


def test_a_release_has_no_words_of_a_key():
    """Those of rounding follow from the key that it was given, maybe the run's."""
    rounding = dpadambc.round_stochastically(key=KEY)
    step = training.Step(of_tree, MECHANISM, optax.chain(optax.adam(0.1), rounding))
    state = step.init(TREE, key=KEY)
    words = lambda tree: [x for x in jax.tree.leaves(tree) if x.dtype == jnp.uint32]
    assert words(state.opt_state)
    found = training.releasable(state).opt_state
    assert not words(found) and optax.tree.get(found, "mu") is not None


def test_a_file_says_what_was_done(tmp_path):
    path = tmp_path / "model.npz"
    result = fit(TREE, of_tree)
    about = training.save_release(path, result)
    params, read = training.load_release(path, like=TREE)
    assert read == about
    chex.assert_trees_all_equal_dtypes(params, TREE)
    chex.assert_trees_all_equal(params, result.state.params)
    assert about["epsilon"] == MECHANISM.epsilon(1e-5)
    expected = dict(
        sampling_prob=0.25,
        neighboring_relation="ADD_OR_REMOVE_ONE",
        iterations=5,
        delta=1e-5,
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
    )
    assert expected.items() <= about.items()
    # No name of the file is of anything else than the parameters.
    with np.load(path) as file:
        names = {name.split("[")[0] for name in file.files}
        assert names == {"params", "about"}
        json.loads(str(file["about"]))


def test_the_steps_taken_count_rather_than_those_planned(tmp_path):
    def stop(progress):
        if progress.iterations == 2:
            raise training.Stop(is_public=True)

    about = training.save_release(tmp_path / "x", fit(TREE, of_tree, callbacks=stop))
    assert about["iterations"] == 2
    assert about["epsilon"] == MECHANISM.epsilon(1e-5, iterations=2)


def test_of_a_run_that_stopped_early_the_file_has_the_steps_that_epsilon_is_of(
    tmp_path,
):
    def stop(progress):
        if progress.iterations == 2:
            raise training.Stop

    result = fit(TREE, of_tree, callbacks=stop)
    about = training.save_release(tmp_path / "x", result)
    assert (about["iterations"], about["accounted_iterations"]) == (2, 5)
    assert about["epsilon"] == MECHANISM.epsilon(1e-5, iterations=5)
    release = training.load_release(tmp_path / "x", like=TREE)
    assert release.epsilon == result.epsilon and str(release) == str(result)
    assert "epsilon counts 5 steps" in " ".join(str(release).split())


@pytest.mark.parametrize(
    "trials", [accounting.FixedTrials(2), accounting.GeometricTrials(2)]
)
def test_the_best_model_of_a_search_is_released_at_the_epsilon_of_all(tmp_path, trials):
    found = training.search(
        *(of_tree, TREE, (X,), MECHANISM, optax.sgd, [0.1, 0.2]),
        trials=trials,
        score=training.PublicScore(of_tree, (X.copy(),)),
        key=jax.random.key(0),
        target_delta=1e-5,
    )
    about = training.save_release(tmp_path / "x", found)
    release = training.load_release(tmp_path / "x", like=TREE)
    chex.assert_trees_all_equal(release.params, found.params, found.best.params)
    assert about["epsilon"] == release.epsilon == found.epsilon
    assert found.epsilon > MECHANISM.epsilon(1e-5)
    words = " ".join(str(release).split())
    assert words == " ".join(str(found).split()) and repr(trials) in words
    if isinstance(trials, accounting.FixedTrials):
        assert release.spent == found.spent
    else:
        with pytest.raises(ValueError, match="search"):
            release.spent  # noqa: B018


def test_a_snapshot_has_the_epsilon_of_all_steps(tmp_path):
    snapshots = {}
    keep = lambda progress: snapshots.update({progress.iterations: progress.params})
    result = fit(TREE, of_tree, callbacks=keep)
    about = training.save_release(tmp_path / "x", result, params=snapshots[2])
    params, _ = training.load_release(tmp_path / "x", like=TREE)
    chex.assert_trees_all_equal(params, snapshots[2])
    assert not np.array_equal(params["w"], result.params["w"])
    assert about["iterations"] == 5
    assert about["epsilon"] == MECHANISM.epsilon(1e-5)


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
    with pytest.raises(ValueError, match="parameters"):
        training.load_release(tmp_path / "x", like={"v": jnp.zeros(3)})
    with pytest.raises(ValueError, match="w"):
        training.load_release(tmp_path / "x", like={**TREE, "w": jnp.zeros(4)})


@pytest.mark.slow
@pytest.mark.guarantee
def test_what_is_no_run_is_refused(tmp_path):
    path = tmp_path / "model.npz"
    with pytest.raises(TypeError, match="result"):
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
    with pytest.raises(ValueError, match="save_release"):
        training.load_release(path, like=jnp.zeros(3))
    with pytest.raises(FileNotFoundError):
        training.load_release(tmp_path / "other.npz", like=jnp.zeros(3))


def test_a_release_has_no_name_but_that_of_its_runs(tmp_path):
    """Which is random, and tells nothing of a key."""
    runs = [fit(TREE, of_tree) for _ in range(2)]
    files = [training.save_release(tmp_path / "x", result) for result in runs]
    names = [file["spent"][0]["parts"][0][0] for file in files]
    assert names[0] != names[1]
    assert all(len(name) == 16 for name in names)
    again = training.save_release(tmp_path / "x", runs[0])
    assert again["spent"] == files[0]["spent"]


NUMBERS = dict(l2_clip_norm=1.0, noise_multiplier=0.5, iterations=3, normalize_by=25)
OF_CONTRIB = [
    contrib.BandedGaussian(
        strategy_coefficients=(1.0, 0.5), sampling_prob=0.1, **NUMBERS
    ),
    contrib.CorrelatedGaussian(
        noising_coefficients=(1.0, -0.5), batches_per_epoch=4, **NUMBERS
    ),
    contrib.QuantileClipping(common.poisson_gaussian(**NUMBERS)),
    contrib.SlackClipping(common.poisson_gaussian(**NUMBERS)),
]
FRESH = """
import json, sys
from dpadambc import accounting, training
assert "dpadambc.contrib" not in sys.modules
releases = [training.load_release(path, like=0.0) for path in sys.argv[1:]]
print(json.dumps([accounting.spending_to_json(x.spent) for x in releases]))
"""


def test_a_fresh_process_knows_the_mechanisms_of_contrib(tmp_path):
    public = {x for x in vars(contrib).values() if isinstance(x, type)}
    assert {x for x in public if issubclass(x, dpadambc.Mechanism)} == {
        *map(type, OF_CONTRIB)
    }
    of_poisson, paths, expected = fit(0.0, lambda w, x: w * x[0]), [], []
    for mechanism in OF_CONTRIB:
        spent = accounting.compose([mechanism])
        paths.append(str(tmp_path / f"{type(mechanism).__name__}.npz"))
        expected.append(accounting.spending_to_json(spent))
        result = of_poisson._replace(mechanism=mechanism, spent=spent)
        about = training.save_release(paths[-1], result)
        assert about["mechanism"] == f"dpadambc.contrib.{type(mechanism).__name__}"
    found = subprocess.run(
        [sys.executable, "-c", FRESH, *paths], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == expected
