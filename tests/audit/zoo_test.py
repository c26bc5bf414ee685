"""The zoo: each broken pipeline fails the check that must find it; sound ones pass."""

import warnings

import pytest

from benchmarks.audit import zoo
from dpadambc import audit

FAST = {
    "clip_per_layer",
    "multi_steps_around_the_noise",
    "shuffled_epochs_as_poisson",
    "correction_of_another_level",
    "loss_over_pairs",
}


# XLA takes a minute for what it does not optimize here, and optimized code 7 seconds.
OPTIMIZED = {"sum_in_bfloat16"}


def some(names):
    marks = lambda name: [
        *([] if name in FAST else [pytest.mark.slow]),
        *([pytest.mark.guarantee] if name in OPTIMIZED else []),
    ]
    return [pytest.param(name, marks=marks(name)) for name in names]


def made(make):
    """Some are broken in ways that the library warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make()


def test_the_zoo_is_large():
    assert len(zoo.BROKEN) >= 25 and len(zoo.SOUND) >= 15
    assert {row.check for row in zoo.BROKEN.values()} == set(audit.CHECKS)


@pytest.mark.parametrize("name", some(zoo.BROKEN))
def test_what_is_broken_is_found(name):
    row = zoo.BROKEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (finding,) = audit.run(row.make(), checks=[row.check]).findings
    assert finding.passed is False, finding
    assert finding.figure is None or finding.figure > finding.bound
    assert finding.sentence and not finding.sentence.startswith("Not tested")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.SOUND)
def test_what_is_sound_passes(name):
    report = audit.run(made(zoo.SOUND[name]))
    for finding in report.findings:
        is_absent = finding.check == "correction" and finding.passed is None
        assert finding.passed or is_absent, finding
