"""Programs, epsilons and verdicts have the numbers that were recorded.

A change of these numbers is made on purpose, by `python -m tests.golden.record` in a
commit of its own. Bits of floats depend on the processor, so here floats are compared
by some values and moments; `python -m tests.golden.record --check` compares bits.
"""

import math

import numpy as np
import pytest

from tests.audit import zoo, zoo_test
from tests.golden import epsilons, programs, record

RTOL = {"float64": 1e-9, "float32": 2e-5}


def assert_close(found, recorded):
    """Up to rounding, in units of the root mean square where values cancel."""
    rtol = RTOL[recorded["dtype"]]
    size = math.prod(recorded["shape"])
    squares = recorded["sum_of_squares"]
    near = lambda name, atol: np.testing.assert_allclose(
        found[name], recorded[name], rtol=rtol, atol=rtol * atol
    )
    near("leading", math.sqrt(squares / max(size, 1)))
    near("sum", math.sqrt(squares * size))
    near("sum_of_squares", 0)


def assert_same_array(found, recorded):
    for name in ("dtype", "shape"):
        assert found[name] == recorded[name]
    if recorded["dtype"] in RTOL:
        assert_close(found, recorded)
    else:
        assert found["sha256"] == recorded["sha256"]


def test_all_rows_are_recorded():
    for name, rows, _ in (*record.tables(False), *record.tables(True)):
        assert list(record.read(name)["rows"]) == rows


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_program_has_the_numbers_that_were_recorded(name):
    found, recorded = record.of_program(name), record.read("programs")["rows"][name]
    for one, other in zip(found, recorded, strict=True):
        assert_same_array(one, other)


@pytest.mark.parametrize("name", epsilons.table())
def test_an_epsilon_is_the_one_that_was_recorded(name):
    recorded = record.read("epsilons")["rows"][name]
    assert record.of_epsilon(name) == pytest.approx(recorded, rel=1e-7)


def test_other_numbers_are_found():
    """The negative control: one value in ten thousand, and noise of another level."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=10_000).astype(np.float32)
    assert_same_array(record.summary(x * np.float32(1 + 1e-6)), record.summary(x))
    changed = x.copy()
    changed[-1] += 1
    for other in (changed, x * np.float32(1.0001), x[::-1], x.astype(np.float64)):
        with pytest.raises(AssertionError):
            assert_same_array(record.summary(other), record.summary(x))
    with pytest.raises(AssertionError):
        integers = np.arange(9)
        assert_same_array(record.summary(integers[::-1]), record.summary(integers))


def rows_of_the_zoo():
    """Those of `zoo_test`, which says what they must be."""
    kind = lambda name: "slow" if name in zoo_test.FAST else "thorough"
    return [
        pytest.param(name, marks=getattr(pytest.mark, kind(name)))
        for name in (*zoo.BROKEN, *zoo.SOUND)
    ]


@pytest.mark.parametrize("name", rows_of_the_zoo())
def test_a_verdict_is_the_one_that_was_recorded(name):
    assert record.of_zoo(name) == record.read("zoo")["rows"][name]
