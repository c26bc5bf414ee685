"""The scripts of `examples/` run, and print the epsilon of what they did."""

import pathlib
import re
import runpy
import sys
import zipfile

import dp_accounting
import jax
import numpy as np
import pytest

from dpadambc import training

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
PATHS = sorted(FOLDER.glob("*.py"))
ITERATIONS = 8


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script with few steps: the names that it leaves, and what it prints."""

    def of(path):
        few = {"--iterations": ITERATIONS, "--epochs": ITERATIONS / 5}
        (option,) = (name for name in few if f'"{name}"' in path.read_text())
        monkeypatch.setattr(sys, "argv", [str(path), option, str(few[option])])
        names = runpy.run_path(str(path), run_name="__main__")
        return names, capsys.readouterr().out

    return of


def poisson(mechanism):
    """What a run does to the protected data, as dp-accounting has it."""
    step = dp_accounting.PoissonSampledDpEvent(
        mechanism.sampling_prob,
        dp_accounting.GaussianDpEvent(mechanism.noise_multiplier),
    )
    return dp_accounting.SelfComposedDpEvent(step, ITERATIONS)


def epsilon(event, delta):
    return dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(delta)


def check(text, expected, delta):
    """Raises unless the script says this epsilon, and an accuracy."""
    (found,) = re.findall(r"^epsilon (\S+) at delta ([^\s,]+)", text, re.MULTILINE)
    assert float(found[0]) == pytest.approx(expected, abs=0.011)
    assert float(found[1]) == delta
    accuracies = re.findall(r"^test accuracy .*?([\d.]+)%$", text, re.MULTILINE)
    assert accuracies and all(5 < float(accuracy) <= 100 for accuracy in accuracies)


@pytest.mark.parametrize(
    "name",
    [
        "train_nnx",
        pytest.param("finetune_lora", marks=pytest.mark.slow),
        pytest.param("many_devices", marks=pytest.mark.slow),
    ],
)
def test_the_script_says_the_epsilon_of_its_steps(name, run):
    names, text = run(FOLDER / f"{name}.py")
    assert names["result"].iterations == ITERATIONS
    spent = epsilon(poisson(names["mechanism"]), 1e-5)
    check(text, spent, 1e-5)
    with pytest.raises(AssertionError):  # negative control
        check(re.sub(r"epsilon \S+", "epsilon 2.9", text), spent, 1e-5)
    if name == "many_devices":
        assert f"on {jax.device_count()} devices" in text
    if name == "finetune_lora":
        before, after = (
            jax.tree.leaves(names[each]) for each in ("adapters", "trained")
        )
        assert all(np.any(a != b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_the_search_says_what_it_costs(run):
    names, text = run(FOLDER / "search.py")
    score = dp_accounting.GaussianDpEvent(names["score"].noise_multiplier)
    one = dp_accounting.ComposedDpEvent([poisson(names["mechanism"]), score])
    cost = names["cost"]
    assert cost.of_one_trial == pytest.approx(epsilon(one, 1e-5), rel=0.01)
    assert cost.of_one_trial < cost.epsilon < cost.of_composition
    check(text, cost.epsilon, 1e-5)
    with pytest.raises(AssertionError):  # negative control
        check(text, cost.of_one_trial, 1e-5)


@pytest.mark.slow
def test_no_node_of_the_graph_is_in_more_terms_than_it_says(run):
    names, text = run(FOLDER / "graph.py")
    mechanism, (found, _) = names["mechanism"], names["data"]
    assert names["result"].iterations == mechanism.iterations == ITERATIONS
    check(text, mechanism.epsilon(1e-4), 1e-4)
    most = lambda members: np.bincount(members[members >= 0]).max()
    assert most(found.members) == found.max_terms == mechanism.max_terms
    data = names["examples"](np.arange(1_400), names["K"] + 1)
    assert most(data[0].members) > mechanism.max_terms  # negative control
    with pytest.raises(ValueError, match="mechanism"):
        training.fit(
            names["loss_fn"],
            names["params"],
            data,
            mechanism,
            names["adam"],
            **names["options"],
        )


def test_the_recommender_has_one_example_for_each_user(run, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    num_users = 1_600  # 1,280 to train on: as many steps as the others take
    users = np.repeat(1 + np.arange(num_users), rng.integers(2, 9, num_users))
    films, stars = 1 + rng.integers(1_682, size=len(users)), 1 + users % 5
    rows = np.stack([users, films, stars, 0 * users], axis=1)
    lines = ["user_id item_id rating timestamp", *(" ".join(map(str, x)) for x in rows)]
    with zipfile.ZipFile(tmp_path / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        name = "recbole/dataset_example/ml-100k/ml-100k.inter"
        wheel.writestr(name, "\n".join(lines))
    monkeypatch.chdir(tmp_path)
    names, text = run(FOLDER / "recommender.py")
    assert names["result"].iterations == names["mechanism"].iterations == ITERATIONS
    (found,) = re.findall(r"^epsilon (\S+) at delta 0.0001, of a user$", text, re.M)
    spent = epsilon(poisson(names["mechanism"]), 1e-4)
    assert float(found) == pytest.approx(spent, abs=0.011)
    counts = np.bincount(users)
    in_training = np.arange(len(counts)) % 5 > 0
    *_, is_padding = names["data"]
    np.testing.assert_array_equal((~is_padding).sum(axis=1), counts[in_training])
    (error,) = re.findall(r"^test RMSE (\S+) stars$", text, re.M)
    assert 0 < float(error) < 4


def test_there_is_a_test_of_every_script_and_it_is_short():
    names = {"train_nnx", "finetune_lora", "many_devices", "search", "graph"}
    names.add("recommender")
    names.add("finetune_lm")  # in experiments/smollm_test.py
    assert {path.stem for path in PATHS} == names
    assert all(len(path.read_text().splitlines()) <= 70 for path in PATHS)
