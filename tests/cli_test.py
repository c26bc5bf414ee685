"""The command line reports the numbers of the mechanism."""

import dataclasses
import json
import subprocess
import sys

import pytest

import dpadambc
from dpadambc import accounting, cli
from dpadambc.cli import _FIELDS, _MECHANISMS
from dpadambc.core.spending import class_name
from dpadambc.training.statement import ASSUMPTIONS

ACCOUNTANTS = {"pld": accounting.PLD, "rdp": accounting.RDP}
NUMBERS = "--noise-multiplier 1.85 --sampling-prob 0.02048 --iterations 3360".split()


def run(*arguments):
    """The exit status of one call."""
    return cli.main([str(a) for a in arguments])


def report_of(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


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


def test_relation_and_accountant_are_arguments(capsys):
    arguments = ["epsilon", *NUMBERS, "--delta", 1e-5]
    arguments += ["--relation", "replace_special", "--accountant", "rdp"]
    report = report_of(capsys, *arguments)
    special = dpadambc.NeighboringRelation.REPLACE_SPECIAL
    expected = mechanism(neighboring_relation=special)
    assert report["epsilon"] == expected.epsilon(1e-5, accountant=accounting.RDP)
    assert report["accountant"] == "rdp"
    assert report["neighboring_relation"] == "REPLACE_SPECIAL"


def test_calibrate_solves_for_what_is_left_out(capsys):
    arguments = "calibrate --epsilon 3 --delta 1e-5 --batch-size 1024".split()
    arguments += ["--num-examples", 50_000]
    report = report_of(capsys, *arguments, "--iterations", 3360)
    assert report["sampling_prob"] == 0.02048
    assert report["normalize_by"] == 1024
    assert 2.999 < report["epsilon"] <= 3
    report = report_of(capsys, *arguments, "--noise-multiplier", 1.9)
    assert report["iterations"] > 3360


def test_infinite_epsilon_is_valid_json(capsys):
    arguments = "--noise-multiplier 0 --sampling-prob 0.1 --iterations 5".split()
    assert report_of(capsys, "epsilon", *arguments, "--delta", 1e-5)["epsilon"] == "inf"


DELTA = ["--delta", "1e-5"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["epsilon", *NUMBERS, "--delta", "2"], "target_delta"),
        (["epsilon", *NUMBERS[:4], *DELTA], "--iterations"),
        (["epsilon", *NUMBERS, "--batch-size", "3", *DELTA], "num_examples"),
        (["epsilon", *NUMBERS, "--max-terms", "3", *DELTA], "got --max-terms"),
        (
            ["epsilon", *NUMBERS, "--mechanism", "shuffled", *DELTA],
            "got --sampling-prob",
        ),
        (
            ["calibrate", "--epsilon", "1", "--mechanism", "graph-poisson", *DELTA],
            "--max-terms",
        ),
        (
            ["plan", "--epsilon", "1", "--batch-size", "100", "--epochs", "1"]
            + ["--num-examples", "99", *DELTA],
            "batch_size",
        ),
        (["calibrate", "--epsilon", "-1", *NUMBERS[2:], *DELTA], "target_epsilon"),
    ],
)
def test_wrong_arguments_are_explained_in_one_line(arguments, name, capsys):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and name in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--sampling-probability", "--sampling-prob"),
        ("--sampling_prob", "--sampling-prob"),
        ("--iteration-s=3", "--iterations"),
        ("--dleta", "--delta"),
    ],
)
def test_an_option_that_is_misspelled_is_answered_by_its_name(written, meant, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("epsilon", "--noise-multiplier", 1.85, written, 0.1)
    name = written.partition("=")[0]
    assert f"Expected {meant}, got {name}. Rename it." in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run("calibrte", written, 0.1)
    assert "'calibrate'" in capsys.readouterr().err


def test_the_beginning_of_an_option_and_its_value_are_not_misspelled(capsys):
    arguments = ["--noise-mult", "1.85", "--sampling-prob=0.02048", "--iter", "3360"]
    assert run("epsilon", *arguments, "--delta", "1e-5") == 0
    assert capsys.readouterr().out.startswith("epsilon = 2.92")
    assert run("epsilon", *arguments[:1], "-1", *arguments[2:], "--delta", "1e-5") == 2
    with pytest.raises(SystemExit):  # and near to none
        run("epsilon", *arguments, "--delta", "1e-5", "--steps", 3)
    assert "unrecognized arguments: --steps 3" in capsys.readouterr().err


def test_a_delta_that_protects_no_one_is_refused(capsys):
    arguments = ["epsilon", *NUMBERS, "--num-examples", 50_000]
    assert run(*arguments, "--delta", 1e-3) == 2
    assert "target_delta" in capsys.readouterr().err
    assert run(*arguments, "--delta", 1e-5) == 0
    with pytest.raises(SystemExit):  # no value of it suits all data
        run(*arguments)


@pytest.mark.slow
def test_the_installed_module_runs():
    command = [sys.executable, "-m", "dpadambc", "epsilon", *NUMBERS, "--delta", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("epsilon = 2.925")


def test_every_mechanism_of_the_library_can_be_named():
    named = set(_MECHANISMS.values())
    kinds = {
        value
        for module in (dpadambc, dpadambc.graphs)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, dpadambc.Mechanism)
    }
    assert named == kinds - {dpadambc.Mechanism}


OF_MECHANISMS = {
    "poisson": [],
    "truncated-poisson": ["--truncated-batch-size", 130],
    "fixed-size": ["--accountant", "rdp"],
    "shuffled": [],
    "random-allocation": [],
    "graph-poisson": ["--max-terms", 2, "--accountant", "rdp"],
    "graph-fixed-size": ["--max-terms", 2, "--accountant", "rdp"],
}


@pytest.mark.parametrize("name", sorted(_MECHANISMS))
def test_each_mechanism_spends_what_it_says_and_states_what_it_assumes(name, capsys):
    arguments = ["--mechanism", name, "--num-examples", 1_000, "--delta", "1e-5"]
    arguments += [*OF_MECHANISMS[name], "--batch-size", 100, "--epochs", 2]
    arguments += ["--clip-norm", 0.5, "--noise-multiplier", 3]
    report = report_of(capsys, "epsilon", *arguments)
    cls = _MECHANISMS[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    relation = dpadambc.NeighboringRelation[report["neighboring_relation"]]
    expected = cls(
        l2_clip_norm=0.5,
        neighboring_relation=relation,
        **{field: report[field] for field in _FIELDS if field in fields},
    )
    assert report["iterations"] == 20 and report["noise_multiplier"] == 3
    assert report["epsilon"] == expected.epsilon(
        1e-5, accountant=ACCOUNTANTS[report["accountant"]]
    )
    assert report["noise_stddev"] == pytest.approx(expected.noise_stddev)
    assert report["sampling"] == name
    assert report["assumed"].startswith(ASSUMPTIONS[class_name(cls)])
    # Noise in units of the clip norm would otherwise get the epsilon of more noise.
    clip_norms = round(expected.sensitivity * 100 / 0.5)
    assert (f"{clip_norms} clip norms" in report["assumed"]) == (clip_norms > 1)
    one = {"poisson", "truncated-poisson", "random-allocation"}
    assert (clip_norms > 1) == (name not in one)


def test_a_plan_is_a_table(capsys):
    arguments = ["plan", "--epsilon", 1, 2, "--batch-size", 50, 100, "--epochs", 2.5]
    arguments += ["--num-examples", 1_000, "--delta", 1e-5, "--accountant", "rdp"]
    assert run(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1,000 examples, delta = 1e-05 (ADD_OR_REMOVE_ONE, RDP")
    assert len({len(line) for line in lines[1:6]}) == 1
    rows = [line.split() for line in lines[2:6]]
    assert [row[1:3] for row in rows] == [[e, b] for e in "12" for b in ("50", "100")]
    first = report_of(capsys, *arguments)["rows"][0]
    trained = mechanism(
        noise_multiplier=first["noise_multiplier"], sampling_prob=0.05, iterations=50
    )
    assert 0.99 < trained.epsilon(1e-5, accountant=accounting.RDP) <= 1
    assert first["noise_stddev"] == pytest.approx(first["noise_multiplier"] / 50)
    rounded = [f"{first['noise_multiplier']:.4f}", f"{first['noise_stddev']:.3g}"]
    assert rows[0] == ["2.5", "1", "50", "0.05000", "50", *rounded]


def test_large_numbers_are_read_as_people_write_them(capsys):
    arguments = "plan --epsilon 3 --batch-size 512 --epochs 2 --delta 1e-5".split()
    printed = []
    for number in ("10000", "10,000", "1e4"):
        assert run(*arguments, "--accountant", "rdp", "--num-examples", number) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1
    for number in ("1e4.5", "256,102", "1,5", "0.5"):
        with pytest.raises(SystemExit):
            run(*arguments, "--num-examples", number)


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        run("--version")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"dpadambc {dpadambc.__version__}\n"
