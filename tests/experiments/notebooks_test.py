"""The notebooks run from beginning to end."""

import pathlib
import re

import nbclient
import nbformat
import pytest

from tests import common

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


# What makes a notebook long, and what will do to run every cell.
SHORTER = {
    "jnp.arange(10)": "jnp.arange(2)",  # seeds
    "iterations=200": "iterations=20",
    "iterations=300": "iterations=60",
    "steps, size = 10_000, 10_000": "steps, size = 1_000, 1_000",
    "epochs = [32, 64, 128, 256, 512], 48": "epochs = [32, 64, 128, 256, 512], 5",
    "B, N = 1_024": "B, N = 16",
    "epochs=57": "epochs=11",
    "256, 38": "256, 4",
}
REVIEWS = "a joy\t1", "a bore\t0", "one of the best this year\t1", "not good\t0"


# They have many trainings, and the others have each of their cells' parts.
THOROUGH = {"2_bias", "3_choosing", "5_ablations", "6_finetune"}


@pytest.mark.parametrize(
    "path",
    [
        (common.thorough if path.stem in THOROUGH else common.slow)(path, id=path.stem)
        for path in PATHS
    ],
)
@pytest.mark.filterwarnings("default")
def test_the_notebook_runs(path, monkeypatch, tmp_path):
    """With fewer seeds and steps, where it has many, and few reviews."""
    (tmp_path / "sst2").mkdir()
    for split, times in (("train", 10), ("dev", 1)):
        rows = "\n".join(["sentence\tlabel", *times * REVIEWS]) + "\n"
        (tmp_path / "sst2" / f"{split}.tsv").write_text(rows)
    monkeypatch.setenv("SST2_DIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": FOLDER}}
    )
    client.execute()
    drawn = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    asked = [s for s in sources if re.search(r"^pictures\.", s, re.MULTILINE)]
    assert len(drawn) == len(asked)


def test_what_is_shortened_is_there():
    sources = "".join(path.read_text() for path in PATHS)
    assert all(long in sources for long in SHORTER)


def test_there_are_notebooks_with_their_outputs():
    """Readers see them without running them."""
    assert len(PATHS) == 6
    for path in PATHS:
        cells = nbformat.read(path, as_version=4).cells
        assert any(cell.get("outputs") for cell in cells)
