"""Frequent wrong names say what to do, and signatures show the right ones."""

import dataclasses
import inspect
import subprocess
import sys

import pytest

import dpadambc
from dpadambc import contrib, graphs, training
from dpadambc.mechanisms import names
from tests import api_test, common

RETURNED = {"ClippedSum", "GradientStatistics"}  # the library makes them
CALLED = {
    name: value
    for name, value in api_test.objects().items()
    if "l2_clip_norm" in inspect.signature(value).parameters
    and name.rpartition(".")[2] not in RETURNED
}
MECHANISMS = [
    kind
    for module in (dpadambc, graphs, contrib)
    for kind in vars(module).values()
    if inspect.isclass(kind)
    and issubclass(kind, dpadambc.Mechanism)
    and not inspect.isabstract(kind)
    and "mechanism" not in inspect.signature(kind).parameters
]


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("wrong", ["clip_norm", "l2_norm_clip", "max_grad_norm"])
def test_another_name_of_the_clip_norm_is_explained(name, wrong):
    with pytest.raises(TypeError, match=f"Expected l2_clip_norm=, got {wrong}="):
        CALLED[name](**{wrong: 1.0})


def test_other_wrong_names_are_those_of_python():
    """Near misses: of no argument, and of a function without a clip norm."""
    assert len(CALLED) > 12
    for called in CALLED.values():
        with pytest.raises(TypeError, match="unexpected keyword argument 'norm'"):
            called(norm=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip_norm'"):
        dpadambc.adam_bc(0.1, 1.0, clip_norm=1.0)


@pytest.mark.parametrize("how", ["calibrate", "of_epochs"])
def test_the_clip_norm_is_explained_where_a_mechanism_is_solved_for(how):
    numbers = dict(sampling_prob=0.1, iterations=3, normalize_by=1, max_grad_norm=1.0)
    targets = dict(target_epsilon=1.0, target_delta=1e-5)
    with pytest.raises(TypeError, match="Expected l2_clip_norm="):
        getattr(dpadambc.PoissonGaussian, how)(
            **numbers, **(targets if how == "calibrate" else {})
        )


@pytest.mark.parametrize("wrong", ["epochs", "batch_size", "steps", "num_steps"])
def test_the_steps_of_a_run_are_those_of_its_mechanism(wrong):
    for call in (
        training.fit,
        training.search,
        common.poisson_gaussian,
        dpadambc.ShuffledGaussian,
    ):
        if call is dpadambc.ShuffledGaussian and wrong == "batch_size":
            continue
        with pytest.raises(TypeError, match=f"got {wrong}=. Give it iterations = epoc"):
            call(**{wrong: 5})


def test_names_that_are_right_pass():
    mechanism = dpadambc.ShuffledGaussian.of_epochs(
        epochs=2, batch_size=5, num_examples=10, l2_clip_norm=1.0, noise_multiplier=1.0
    )
    assert (mechanism.iterations, mechanism.batch_size) == (4, 5)
    assert dataclasses.replace(mechanism, iterations=2).iterations == 2
    solved = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=4.0,
        target_delta=1e-5,
        accountant=dpadambc.accounting.RDP,
        l2_clip_norm=1.0,
        noise_multiplier=None,
        epochs=2,
        batch_size=5,
        num_examples=100,
    )
    assert solved.iterations == 40
    assert mechanism.calibrate is not None  # of a value, as of its class
    assert dpadambc.sensitivity.__doc__ and dpadambc.sensitivity.__module__


@pytest.mark.parametrize("kind", MECHANISMS)
def test_signatures_show_the_numbers_of_the_class(kind):
    fields = set(inspect.signature(kind).parameters)
    assert fields == {field.name for field in dataclasses.fields(kind)}
    for made, own in (
        (kind.calibrate, {"target_epsilon", "target_delta"}),
        (kind.of_epochs, set()),
    ):
        found = inspect.signature(made).parameters
        assert fields | own | {*names.IN_PLACE} <= set(found)
        assert set(found) <= fields | own | {*names.IN_PLACE, "accountant"}
        needed = {k for k, x in found.items() if x.default is inspect.Parameter.empty}
        assert needed == own
        assert "Args:" in made.__doc__


def test_editors_know_the_numbers_of_all_mechanisms():
    fields = {
        name for kind in MECHANISMS for name in inspect.signature(kind).parameters
    }
    assert len(MECHANISMS) == 9
    assert names.PublicNumbers.__annotations__.keys() == fields | {*names.IN_PLACE}


@pytest.mark.slow
def test_pyright_takes_right_calls_and_no_wrong_names(tmp_path):
    pytest.importorskip("pyright")
    targets = "target_epsilon=1.0, target_delta=1e-5"
    calls = {
        f"PoissonGaussian.calibrate({targets}, l2_clip_norm=1.0)": True,
        f"PoissonGaussian.calibrate({targets}, clip_norm=1.0)": False,
        f"PoissonGaussian.calibrate({targets}, iterations='3')": False,
        "PoissonGaussian.calibrate(target_epsilon=1.0)": False,
        "PoissonGaussian.of_epochs(epochs=3, batch_size=5, num_examples=9)": True,
        "PoissonGaussian.of_epochs(num_epochs=3)": False,
        "clipped_grad(abs, l2_clip_norm=1.0, normalize_by=1)": True,
        "clipped_grad(abs, clip_norm=1.0, normalize_by=1)": False,
    }
    path = tmp_path / "calls.py"
    path.write_text("\n".join(["import dpadambc", *(f"dpadambc.{x}" for x in calls)]))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        str(path),
    ]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    wrong = {i for i in range(len(calls)) if f"calls.py:{i + 2}:" in found}
    assert wrong == {i for i, is_right in enumerate(calls.values()) if not is_right}
