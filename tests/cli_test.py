"""The command line says what the mechanism says."""

import json
import subprocess
import sys

import pytest

import dpadambc
from dpadambc import cli

NUMBERS = "--noise-multiplier 1.85 --sampling-prob 0.02048 --iterations 3360".split()


def run(*arguments):
    """The exit status of one call."""
    return cli.main([str(a) for a in arguments])


def mechanism(**changed):
    numbers = dict(
        l2_clip_norm=1.0,
        noise_multiplier=1.85,
        sampling_prob=0.02048,
        iterations=3360,
        normalize_by=1.0,
    )
    return dpadambc.PoissonGaussian(**{**numbers, **changed})


def test_epsilon_is_readable_and_complete(capsys):
    assert run("epsilon", *NUMBERS, "--delta", 1e-5) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"epsilon = {mechanism().epsilon(1e-5):.4f} at delta = 1e-05")
    for word in ("ADD_OR_REMOVE_ONE", "PLD", "poisson", "1.85", "0.02048", "3360"):
        assert word in out


def test_json_on_request(capsys):
    assert (
        run("epsilon", *NUMBERS, "--delta", 1e-5, "--accountant", "rdp", "--json") == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"] == mechanism().epsilon(1e-5, accountant="rdp")
    assert report["accountant"] == "rdp"
    assert report["neighboring_relation"] == "ADD_OR_REMOVE_ONE"


def test_calibrate_solves_for_what_is_left_out(capsys):
    arguments = "calibrate --epsilon 3 --delta 1e-5 --json --batch-size 1024".split()
    arguments += ["--num-examples", 50_000]
    assert run(*arguments, "--iterations", 3360) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sampling_prob"] == 0.02048
    assert report["normalize_by"] == 1024
    assert 2.999 < report["epsilon"] <= 3
    assert run(*arguments, "--noise-multiplier", 1.9) == 0
    assert json.loads(capsys.readouterr().out)["iterations"] > 3360


def test_infinite_epsilon_is_valid_json(capsys):
    arguments = "--noise-multiplier 0 --sampling-prob 0.1 --iterations 5".split()
    assert run("epsilon", *arguments, "--delta", 1e-5, "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == "inf"


def test_relation_is_an_argument(capsys):
    arguments = ["epsilon", *NUMBERS, "--delta", 1e-5, "--relation", "replace_one"]
    assert run(*arguments, "--json") == 0
    replace_one = dpadambc.NeighboringRelation.REPLACE_ONE
    expected = mechanism(neighboring_relation=replace_one).epsilon(1e-5)
    assert json.loads(capsys.readouterr().out)["epsilon"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epsilon", *NUMBERS, "--delta", "2"], "target_delta in (0, 1), got"),
        (["epsilon", *NUMBERS[:4], "--delta", "1e-5"], "Expected --iterations to be"),
        (["epsilon", *NUMBERS, "--batch-size", "3", "--delta", "1e-5"], "in place of"),
        (["calibrate", "--epsilon", "1", "--delta", "1e-5"], "all but one of"),
        (
            ["epsilon", *NUMBERS, "--normalize-by", "0", "--delta", "1e-5"],
            "normalize_by",
        ),
        (
            ["epsilon", *NUMBERS[:2], *NUMBERS[4:], "--batch-size", "0"]
            + ["--num-examples", "9", "--delta", "1e-5"],
            "batch_size to be positive",
        ),
        (["calibrate", "--epsilon", "-1", *NUMBERS[2:], "--delta", "1e-5"], "positive"),
    ],
)
def test_wrong_arguments_are_explained_in_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_delta_that_protects_no_one_is_warned_of(capsys):
    assert run("epsilon", *NUMBERS, "--delta", 1e-3, "--num-examples", 50_000) == 0
    assert "warning: target_delta=0.001 is at least 1 / num" in capsys.readouterr().err


def test_the_installed_module_runs():
    command = [sys.executable, "-m", "dpadambc", "epsilon", *NUMBERS, "--delta", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("epsilon = 2.925")
