"""The report: a table, JSON, an exit code."""

import json
import math

import pytest

from dpadambc import audit


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
    for checks in ([], ["noises"]):
        with pytest.raises(ValueError, match="checks"):
            audit.run(None, checks=checks)
