"""The report: a table, JSON, an exit code; and the command that prints it."""

import json
import math

import pytest

from dpadambc import audit, cli

FACTORY = """
import jax, jax.numpy as jnp, optax
import dpadambc
from dpadambc import audit

MECHANISM = dpadambc.PoissonGaussian(
    l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1, iterations=50,
    normalize_by=20)
DATA = (jax.random.normal(jax.random.key(0), (200, 20)),)
loss_fn = lambda w, x: jnp.tanh(w @ x)

def sound():
    return audit.Pipeline.of_fit(
        loss_fn, jnp.zeros(20), DATA, MECHANISM,
        dpadambc.adam_bc(0.1, MECHANISM.noise_stddev))

def broken():
    clip = dpadambc.clip_per_example(1.0, normalize_by=20)
    opened = optax.stateless(lambda sums, _: dpadambc.materialize(sums))
    return audit.Pipeline.of_chain(
        loss_fn, jnp.zeros(20), DATA, MECHANISM,
        lambda key: optax.chain(clip, opened, optax.adam(0.1)))

def something_else():
    return 3
"""


def finding(check, passed, figure=1.0, **changes):
    return audit.Finding(check, passed, figure, 2.0, f"About {check}.", **changes)


@pytest.mark.parametrize(
    ("outcomes", "passed", "code"),
    [((True, True), True, 0), ((True, None), None, 3), ((False, None), False, 1)],
)
def test_one_failure_fails_and_not_tested_is_no_pass(outcomes, passed, code):
    report = audit.Report(tuple(finding(str(i), x) for i, x in enumerate(outcomes)))
    assert report.passed is passed and report.exit_code == code


def test_the_table_has_a_row_for_each_check():
    report = audit.Report(
        (
            finding("sensitivity", True, fails_if="fails if it moves"),
            audit.Finding("noise", None, None, None, "Not tested: no noise."),
            finding("state", False, 3.0),
        )
    )
    lines = str(report).splitlines()
    assert lines[0].split() == ["check", "outcome", "figure", "at", "most"]
    assert lines[1].split() == ["sensitivity", "pass", "1", "2"]
    assert "    fails if it moves" in lines
    assert ["noise", "not", "tested", "-", "-"] in [line.split() for line in lines]
    assert ["state", "FAIL", "3", "2"] in [line.split() for line in lines]


def test_json_has_all_parts_and_no_infinity():
    part = finding("level", False, math.inf)
    report = audit.Report((finding("noise", False, math.nan, parts=(part,)),))
    (found,) = json.loads(report.to_json())["findings"]
    assert found["figure"] == "nan" and found["parts"][0]["figure"] == "inf"
    json.dumps(json.loads(report.to_json()), allow_nan=False)


def test_refuses_checks_that_there_are_not():
    with pytest.raises(ValueError, match="Expected checks among .*, got none"):
        audit.run(None, checks=[])
    with pytest.raises(ValueError, match=r"Expected checks among .*, got \['noises'\]"):
        audit.run(None, checks=["noises"])


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return "own_training"


@pytest.mark.slow
def test_the_command_exits_with_what_was_found(module, capsys):
    checks = ["--check", "state", "--check", "isolation"]
    assert cli.main(["audit", f"{module}:sound", *checks]) == 0
    told = capsys.readouterr()
    assert "state        pass" not in told.err and "isolation ..." in told.err
    assert told.out.startswith("check")
    assert cli.main(["audit", f"{module}:broken", "--check", "state", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    assert cli.main(["audit", f"{module}:sound", "--check", "correction"]) == 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("own_training", "Expected MODULE:FACTORY"),
        ("own_training:nothing", "Expected a function 'nothing' in 'own_training'"),
        ("own_training.py:sound", "the name of a module, without .py"),
        ("no_such_module:f", "Expected a function 'f' in 'no_such_module'"),
        ("own_training:something_else", "to return a dpadambc.audit.Pipeline, got 3"),
    ],
)
def test_the_command_says_what_it_cannot_use(module, factory, message, capsys):
    assert cli.main(["audit", factory]) == 2
    assert message in capsys.readouterr().err
