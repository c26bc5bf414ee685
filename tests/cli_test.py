"""The command line says what the mechanism says."""

import dataclasses
import importlib.metadata
import json
import math
import subprocess
import sys
import typing

import pytest

import dpadambc
from dpadambc import accounting, cli
from dpadambc.accounting import planning
from dpadambc.audit.report import CHECKS
from dpadambc.cli import _options, _plans

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
        (["epsilon", *NUMBERS, "--batch-size", "3", "--delta", "1e-5"], "num_examples"),
        (
            ["epsilon", *NUMBERS, "--batch-size", "3", "--num-examples", "9"]
            + ["--delta", "1e-5"],
            "batch_size in place of sampling_prob",
        ),
        (["epsilon", *NUMBERS[:4], "--epochs", "3", "--delta", "1e-5"], "with epochs"),
        (
            ["epsilon", *NUMBERS, "--epochs", "3", "--batch-size", "3"]
            + ["--num-examples", "9", "--delta", "1e-5"],
            "epochs in place of iterations",
        ),
        (["epsilon", *NUMBERS], "Expected --delta to be given"),
        (["epsilon", *NUMBERS, "--num-examples", "5000"], "such as 2e-05"),
        (
            ["epsilon", *NUMBERS, "--max-terms", "3", "--delta", "1e-5"],
            "for --mechanism poisson, got --max-terms",
        ),
        (
            ["epsilon", *NUMBERS, "--mechanism", "shuffled", "--delta", "1e-5"],
            "for --mechanism shuffled, got --sampling-prob",
        ),
        (
            ["calibrate", "--epsilon", "1", "--mechanism", "graph-poisson"]
            + ["--delta", "1e-5"],
            "Expected --max-terms to be given",
        ),
        (
            ["plan", "--epsilon", "1", "--batch-size", "100", "--epochs", "1"]
            + ["--num-examples", "99", "--delta", "1e-5"],
            "batch_size <= num_examples=99, got batch_size=100",
        ),
        (
            ["plan", "--epsilon", "1", "--batch-size", "9", "--epochs", "1", "2"]
            + ["--num-examples", "99", "--delta", "1e-5", "--picture", "a.png"],
            "one number of --epochs with --picture",
        ),
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


def test_a_delta_that_protects_no_one_is_refused(capsys):
    assert run("epsilon", *NUMBERS, "--delta", 1e-3, "--num-examples", 50_000) == 2
    assert "target_delta" in capsys.readouterr().err
    assert run("epsilon", *NUMBERS, "--delta", 1e-5, "--num-examples", 50_000) == 0


def test_the_installed_module_runs():
    command = [sys.executable, "-m", "dpadambc", "epsilon", *NUMBERS, "--delta", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("epsilon = 2.925")


@pytest.mark.slow
def test_help_and_wrong_options_do_not_wait_for_what_computes():
    code = """
import sys
from dpadambc import cli
for arguments in (["--help"], ["plan", "--help"], ["meaning", "--nonsense"], [],
                  ["epsilon", "--noise-multiplier", "2"],
                  ["epsilon", "--mechanism", "shuffled", "--delta", "1e-5"]):
    try:
        assert cli.main(arguments) == 2
    except SystemExit as error:
        assert error.code in (0, 2)
    for name in ("jax", "numpy", "scipy", "optax", "dp_accounting", "matplotlib"):
        assert name not in sys.modules, (arguments, name)
try:
    cli.main(["epsilon", "--noise-multiplier", "2", "--sampling-prob", "0.1",
              "--iterations", "2", "--delta", "1e-5"])
finally:
    assert "jax" in sys.modules  # negative control
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_words_of_the_options_are_those_of_the_library():
    relations = (relation.name.lower() for relation in dpadambc.NeighboringRelation)
    assert sorted(_options.RELATIONS) == sorted(relations)
    assert _options.CHECKS == tuple(CHECKS)
    assert set(planning.SAMPLINGS) <= set(_options.SAMPLINGS)
    assert typing.get_args(accounting.Accountant) == ("pld", "rdp")


COMMON = {"l2_clip_norm", "noise_multiplier", "iterations", "normalize_by"}


@pytest.mark.parametrize("name", sorted(_options.SAMPLINGS))
def test_every_mechanism_has_options_for_all_its_fields(name):
    sampling = _options.SAMPLINGS[name]
    cls = getattr(getattr(dpadambc, sampling.package), sampling.name)
    needed = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
    }
    assert needed == COMMON | set(sampling.needs)
    fields = {field.name for field in dataclasses.fields(cls)}
    # Epsilon and noise, which the commands are about, do not depend on the rule.
    optional = {"neighboring_relation", "clip_rule", *sampling.takes}
    assert fields - needed == optional
    assert {*sampling.needs, *sampling.takes} <= set(_options.FIELDS)
    if name in planning.SAMPLINGS:
        assert planning.SAMPLINGS[name] is cls


def test_every_mechanism_of_the_library_can_be_named():
    modules = (dpadambc.mechanisms, dpadambc.graphs)
    mechanisms = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, dpadambc.Mechanism)
        and value is not dpadambc.Mechanism
    }
    named = {
        getattr(getattr(dpadambc, sampling.package), sampling.name)
        for sampling in _options.SAMPLINGS.values()
    }
    assert named == mechanisms


OF_MECHANISMS = {
    "poisson": ["--batch-size", 100],
    "truncated-poisson": ["--batch-size", 100, "--truncated-batch-size", 130],
    "fixed-size": ["--batch-size", 100, "--accountant", "rdp"],
    "shuffled": ["--batch-size", 100],
    "random-allocation": ["--batch-size", 100],
    "correlated": ["--batch-size", 100, "--noising-coefficients", 1, -0.9],
    "banded": ["--batch-size", 100, "--strategy-coefficients", 1, 0.5, 0.375],
    "graph-poisson": ["--batch-size", 100, "--max-terms", 2, "--accountant", "rdp"],
    "graph-fixed-size": ["--batch-size", 100, "--max-terms", 2, "--accountant", "rdp"],
}


@pytest.mark.parametrize("name", sorted(_options.SAMPLINGS))
def test_each_mechanism_spends_what_it_says_and_states_what_it_assumes(name, capsys):
    arguments = ["--mechanism", name, "--num-examples", 1_000, "--delta", "1e-5"]
    arguments += [*OF_MECHANISMS[name], "--epochs", 2, "--clip-norm", 0.5]
    assert run("epsilon", *arguments, "--noise-multiplier", 3, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    sampling = _options.SAMPLINGS[name]
    cls = getattr(getattr(dpadambc, sampling.package), sampling.name)
    expected = cls(
        l2_clip_norm=0.5,
        noise_multiplier=3.0,
        iterations=20,
        normalize_by=100,
        neighboring_relation=dpadambc.NeighboringRelation[
            report["neighboring_relation"]
        ],
        **{field: report[field] for field in (*sampling.needs, *sampling.takes)},
    )
    assert report["iterations"] == 20
    assert report["epsilon"] == expected.epsilon(1e-5, accountant=report["accountant"])
    stddev = expected.noise_stddev
    if callable(stddev):
        first, last = float(stddev(0)), float(stddev(19))
        stddev = {"first": first, "largest": last, "last": last}
    assert report["noise_stddev"] == pytest.approx(stddev)
    assert report["sampling"] == name
    assert report["assumed"].startswith(sampling.assumed)
    # Else who gives the noise in clip norms is told the epsilon of more noise.
    clip_norms = round(expected.sensitivity * 100 / 0.5)
    is_told = f"here {clip_norms} clip norms. If yours is"
    assert (is_told in report["assumed"]) == (clip_norms > 1)
    one = {"poisson", "truncated-poisson", "random-allocation", "correlated", "banded"}
    assert (clip_norms > 1) == (name not in one)


def test_the_noise_of_a_schedule_is_told_for_three_steps(capsys):
    arguments = ["--mechanism", "banded", "--strategy-coefficients", 1, 0.5]
    arguments += ["--sampling-prob", 0.2, "--normalize-by", 10, "--delta", 1e-5]
    numbers = ["--noise-multiplier", 2, "--iterations", 5]
    assert run("epsilon", *arguments, *numbers) == 0
    out = capsys.readouterr().out
    assert "0.2 (first), 0.230827 (largest), 0.230827 (last)" in out
    assert "1.0 0.5\n" in out
    assert "take turns" in out
    # Solved for, it is that of the noise that is told.
    given = ["--epsilon", 2, "--iterations", 5, "--json"]
    assert run("calibrate", *arguments, *given) == 0
    report = json.loads(capsys.readouterr().out)
    assert 1.99 < report["epsilon"] <= 2
    assert report["noise_stddev"]["first"] * 10 == pytest.approx(
        report["noise_multiplier"]
    )
    # Their options are of no other mechanism, and needed for these.
    assert run("epsilon", *arguments[2:], *numbers) == 2
    assert "got --strategy-coefficients" in capsys.readouterr().err
    assert run("epsilon", *arguments[:2], *arguments[5:], *numbers) == 2
    assert "Expected --strategy-coefficients to be given" in capsys.readouterr().err


def test_what_an_epsilon_means(capsys, tmp_path):
    numbers = ["--noise-multiplier", 2, "--sampling-prob", 1, "--iterations", 1]
    picture = tmp_path / "roc.png"
    arguments = ["meaning", *numbers, "--delta", 1e-5]
    assert run(*arguments, "--json", "--picture", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(capsys.readouterr().out)
    assert report["gaussian_mu"] == pytest.approx(0.5, rel=1e-3)
    assert report["true_positive_rates"]["0.01"] == pytest.approx(0.0339, abs=1e-4)
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    for word in ("by 0.500", "1e-06", "1.00%", "3.39%", "independently"):
        assert word in out
    bare = ["--noise-multiplier", 0, "--sampling-prob", 1, "--iterations", 1]
    assert run("meaning", *bare, "--delta", 1e-5, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gaussian_mu"] == "inf"
    assert report["true_positive_rates"]["0.0001"] == 1.0
    assert run("meaning", *bare, "--delta", 1e-5) == 0
    assert "Nothing is hidden" in capsys.readouterr().out


PLAN = ["--epochs", 2.5, "--num-examples", 1_000, "--delta", 1e-5]
PLAN += ["--accountant", "rdp"]


def test_a_plan_is_a_table(capsys):
    arguments = ["plan", "--epsilon", 1, 2, "--batch-size", 50, 100, *PLAN]
    assert run(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1,000 examples, delta = 1e-05 (ADD_OR_REMOVE_ONE, RDP")
    assert len({len(line) for line in lines[1:6]}) == 1
    rows = [line.split() for line in lines[2:6]]
    assert [row[1:3] for row in rows] == [[e, b] for e in "12" for b in ("50", "100")]
    assert rows[0][:5] == ["2.5", "1", "50", "0.05000", "50"]
    # Rounded to four digits, the noise multiplier of which this is the epsilon.
    multiplier = float(rows[0][5])
    trained = mechanism(noise_multiplier=multiplier, sampling_prob=0.05, iterations=50)
    assert trained.epsilon(1e-5, accountant="rdp") == pytest.approx(1, rel=1e-3)
    assert float(rows[0][6]) == pytest.approx(multiplier / 50, rel=1e-2)


def test_a_plan_is_json_and_a_picture_and_compares(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    arguments = ["plan", "--epsilon", 1, "--batch-size", 50, *PLAN, "--compare"]
    assert run(*arguments, "--json", "--picture", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert report["accountant"] == "rdp"
    assert row["iterations"] == 50
    spent = mechanism(
        noise_multiplier=row["noise_multiplier"], sampling_prob=0.05, iterations=50
    ).epsilon(1e-5, accountant="rdp")
    assert 0.99 < spent <= 1
    compared = {
        (r["sampling"], r["neighboring_relation"], r["accountant"]): r["epsilon"]
        for r in row["comparison"]
    }
    assert compared["poisson", "ADD_OR_REMOVE_ONE", "rdp"] == pytest.approx(spent)
    assert compared["poisson", "ADD_OR_REMOVE_ONE", "pld"] < spent
    assert compared["shuffled", "REPLACE_SPECIAL", "pld"] > spent
    text = _plans.as_text(report)
    assert "with the noise of epsilon 1, batch size 50 and 2.5 epochs:" in text
    assert "shuffled           REPLACE_ONE        PLD  epsilon" in text


def test_large_numbers_are_read_as_people_write_them(capsys):
    arguments = "plan --epsilon 3 --batch-size 512 --epochs 2 --delta 1e-5".split()
    printed = []
    for number in ("10000", "10,000", "1e4"):
        assert run(*arguments, "--accountant", "rdp", "--num-examples", number) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1
    for number in ("1e4.5", "256,102", "1,5"):
        with pytest.raises(SystemExit):
            run(*arguments, "--num-examples", number)
    with pytest.raises(SystemExit):
        run(*arguments, "--num-examples", "0.5")
    assert "Expected a whole number, got 0.5" in capsys.readouterr().err


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        run("--version")
    assert end.value.code == 0
    version = importlib.metadata.version("dpadambc")
    assert capsys.readouterr().out == f"dpadambc {version}\n"


@pytest.mark.parametrize(
    ("path", "match"),
    [("there/plan.png", "a folder that exists"), ("plan", "end in one of .png, .pdf")],
)
def test_a_picture_that_could_not_be_written_is_refused(
    capsys, monkeypatch, path, match
):
    """Before anything is computed."""
    monkeypatch.setattr(_plans, "report", None)
    arguments = "plan --epsilon 3 --batch-size 512 --epochs 2 --delta 1e-5".split()
    assert run(*arguments, "--num-examples", 10_000, "--picture", path) == 2
    assert match in capsys.readouterr().err


def test_an_audit_of_what_takes_arguments_is_refused(capsys):
    assert run("audit", "json:loads") == 2
    assert "to be a function without arguments" in capsys.readouterr().err


def test_a_claim_means_what_its_inequality_says(capsys):
    """Of each pair of rates, TPR <= e^epsilon FPR + delta, and the other way round."""
    epsilon, delta = 3.0, 1e-5
    arguments = ("meaning", "--epsilon", epsilon, "--delta", delta)
    assert run(*arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    for rate, reached in report["true_positive_rates"].items():
        alpha, factor = float(rate), math.exp(epsilon)
        best = min(factor * alpha + delta, 1 - (1 - alpha - delta) / factor)
        assert reached == pytest.approx(best, rel=1e-9)
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("epsilon = 3.0000 at delta = 1e-05\nAn attacker takes")
    assert "hides more" in out
    assert run(*arguments, *NUMBERS) == 2
    assert "or a mechanism without --epsilon" in capsys.readouterr().err
    assert run("meaning", "--epsilon", -1, "--delta", delta) == 2


def test_an_audit_finds_what_its_factory_imports(capsys, monkeypatch, tmp_path):
    (tmp_path / "rows_of_its_own.py").write_text("ROWS = 3\n")
    factory = (
        "def make():\n    import rows_of_its_own\n    return rows_of_its_own.ROWS\n"
    )
    (tmp_path / "training_with_rows_of_its_own.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("audit", "training_with_rows_of_its_own:make") == 2
    assert "to return a dpadambc.audit.Pipeline, got 3" in capsys.readouterr().err
