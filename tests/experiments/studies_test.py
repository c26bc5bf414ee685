"""The studies: their pages, and their records."""

import importlib

import pytest

from benchmarks import pages, records

STUDIES = [
    "adult.membership",
    "adult.run",
    *(f"cifar10.{name}" for name in ("pretrained", "published", "scattered", "short")),
    "language.moments",
    "movielens.run",
    *(f"methods.{name}" for name in ("clip_norms", "recipe", "run")),
]


def test_the_tables_of_the_pages_are_those_of_the_records():
    assert not list(pages.differing())


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_on_record_is_found_by_a_cell(name):
    study = importlib.import_module(f"benchmarks.{name}").STUDY
    found = records.Records(study.results)
    arguments = study.parser(None).parse_args([])
    find = lambda cell: found.find(cell.identity)
    rows = [find(cell) for cell in study.cells(find, arguments)]
    # Heads that were tuned on ImageNet's features: their program is no longer kept.
    kept = [row for row in found.rows if row.get("what") != "head"]
    assert {id(row) for row in kept} <= {id(row) for row in rows}
