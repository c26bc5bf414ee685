"""What private fine-tuning costs beside others: the largest batches, the table."""

import json

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from benchmarks import records  # noqa: E402
from benchmarks.language import cost, peers  # noqa: E402

LINE = {2: 500, 4: 500, 8: 800, 16: 1_600}  # the optimizer first, then the texts


@pytest.mark.parametrize(("memory", "expected"), [(99, 0), (420, 8), (1e9, 8192)])
def test_the_largest_batch_of_ours_is_the_last_that_fits(memory, expected):
    asked = []

    def bytes_of(batch_size):
        asked.append(batch_size)
        return 100 + 40 * batch_size

    assert cost.largest_batch(bytes_of, memory) == expected
    assert len(asked) <= 11


def test_the_largest_batch_of_theirs_is_on_the_line_through_the_last_two():
    assert [peers.bytes_at(LINE, n) for n in (4, 16, 64)] == [500, 1_600, 6_400]
    assert peers.largest_batch(LINE, 6_399) == 56
    assert peers.largest_batch(LINE, 6_400) == 64


OURS = [
    {"way": way, "length": 32, "gibibytes": 8.0}
    | {"largest_batch": {"ordinary": n, "private": n - 8}}
    for way, n in (("full", 800), ("LoRA", 1_600))
]


def _program(size, seconds=None):
    found = {"bytes": size}
    if seconds:
        quartiles = {"median": seconds / 2, "q1": seconds / 2, "q3": seconds}
        found |= {"seconds": quartiles, "ratio": quartiles}
    return found


def test_the_table_has_a_line_for_each_program():
    gigabyte = 10**9
    programs = {
        "JAX": _program({"64": gigabyte}, 4.0),
        "dpadambc": _program({"64": 1.5 * gigabyte}, 2.0),
        "PyTorch": _program({"32": gigabyte, "64": 2 * gigabyte}, 6.0),
        "in parts": _program({"64": 3 * gigabyte}, 1.0),
        "too large": _program({"2": gigabyte, "4": 2 * gigabyte}),
    }
    row = {"way": "full", "length": 32, "batch_size": 64, "programs": programs}
    lines = peers.table([row], OURS).splitlines()
    assert "largest batch in 8 GiB" in lines[0]
    assert lines[2:] == [
        "| full | 32 | JAX | 2.00 |  | 1,000 |  | 800 |",
        "| full | 32 | dpadambc | 1.00 | 1.00 (1.00 to 2.00) | 1,500 | 1.50 | 792 |",
        "| full | 32 | PyTorch | 3.00 |  | 2,000 |  | 272 |",
        "| full | 32 | in parts | 0.50 | 0.50 (0.50 to 1.00) | 3,000 | 1.50 | - |",
        "| full | 32 | too large | - | - | 32,000 | 16.00 | 16 |",
    ]


def test_the_compiled_step_of_a_larger_batch_takes_more():
    """Of the last block, the smallest program, at a length that nothing else uses."""
    try:
        sizes = [cost.step_bytes("last block", 4, "private", n) for n in (2, 16)]
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert sizes[0] < sizes[1]


def test_on_record_are_all_ways_and_their_gradients_are_ours():
    """Else the steps that are compared would not do the same."""
    record = json.loads(peers.RESULTS.read_text())
    names = {"Opacus, hooks", "Opacus, ghost", "Opake"}
    compared = {(row["way"], row["step"]) for row in record["agreement"]}
    assert compared >= {(way, name) for way in cost.WAYS for name in names}
    assert all(max(row["norms"], row["clipped"]) < 1e-4 for row in record["agreement"])
    measured = {(row["way"], row["length"]) for row in record["rows"]}
    assert measured == {(way, length) for way in cost.WAYS for length in cost.LENGTHS}
    ours = records.read(cost.RESULTS)
    page = peers.RESULTS.with_name("README.md").read_text()
    assert peers.table(record["rows"], ours) in page
