"""The files that speak of versions agree, and what is published is checked."""

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import pytest

import dpadambc

ROOT = pathlib.Path(__file__).parents[1]
NOT_INSTALLED = """
import importlib.metadata, pathlib, sys
import jax.numpy as jnp, optax
import dpadambc, dpadambc.cli
from dpadambc import training
assert not [*importlib.metadata.distributions(name="dpadambc")]
assert pathlib.Path(dpadambc.__file__).parents[1] == pathlib.Path(sys.argv[1])
dpadambc.audit, dpadambc.contrib, dpadambc.graphs
mechanism = dpadambc.PoissonGaussian(
    l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=1,
    normalize_by=4)
result = training.fit(
    lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism, optax.sgd(0.1),
    key=training.secret_key(), target_delta=1e-5)
about = training.save_release(sys.argv[2], result)
assert about["dpadambc"] == dpadambc.__version__, about
dpadambc.cli.main(["--version"])
"""
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]


def pins(text):
    """The versions of the tools that a text names, each with all that it has."""
    found = re.findall(r"\b(ruff|pyright)(?:\[\w+\])?==([\w.]+)", text)
    return {tool: {v for t, v in found if t == tool} for tool in ("ruff", "pyright")}


def versions(lines, relation):
    """The version of each package: of `jax>=0.10.2`, or `scipy==1.14.*`, any patch."""
    pattern = re.compile(rf"([\w-]+){relation}([\d.]+?)(?:\.\*)?")
    matches = (pattern.fullmatch(line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def test_pre_commit_runs_the_tools_that_make_check_runs():
    expected = pins(PYPROJECT)
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert pins(text) == expected
    assert all(len(each) == 1 for each in expected.values())
    assert pins(text.replace("ruff==", "ruff==9", 1)) != expected  # negative control


def test_what_is_cited_and_what_is_imported_is_what_is_built():
    citation = (ROOT / "CITATION.cff").read_text()
    (cited,) = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    assert cited == PROJECT["version"] == dpadambc.__version__


@pytest.mark.slow
def test_a_source_tree_on_the_path_need_not_be_installed(tmp_path):
    tree, others = tmp_path / "tree", tmp_path / "others"
    shutil.copytree(ROOT / "dpadambc", tree / "dpadambc")
    others.mkdir()
    for kind in ("purelib", "platlib"):
        for path in pathlib.Path(sysconfig.get_path(kind)).iterdir():
            link = others / path.name
            if "dpadambc" not in path.name and not link.exists():
                link.symlink_to(path)

    def outcome(*folders):
        """Without `site`, which would read where the installed package is."""
        places = os.pathsep.join(map(str, folders))
        return subprocess.run(
            [sys.executable, "-S", "-c", NOT_INSTALLED, tree, tmp_path / "release.npz"],
            env=os.environ | {"PYTHONPATH": places},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    done = outcome(tree, others)
    assert done.stdout == "dpadambc 0+unknown\n", done.stderr
    assert "No module named 'dpadambc'" in outcome(others).stderr  # negative control


def test_the_papers_that_are_cited_are_the_sources_of_the_readme():
    papers = re.compile(r"https://arxiv\.org/abs/[\d.]+\d")
    readme = (ROOT / "README.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert papers.findall(citation) == papers.findall(readme) != []


def test_the_citation_page_has_what_the_citation_file_has():
    citation = (ROOT / "CITATION.cff").read_text()
    page = " ".join((ROOT / "docs" / "citation.md").read_text().split())
    papers = citation.split("references:")[1].split("  - type: article")[1:]
    assert page.count("@article") == len(papers) > 0
    version = re.search(r"^version: (\S+)$", citation, re.MULTILINE)
    assert version and f"version = {{{version[1]}}}" in page
    for paper in papers:
        title = re.search(r"title: (?:>-\s+)?(.*?)\n    authors:", paper, re.DOTALL)
        names = re.findall(r"family-names: ([^,]+), given-names: ([^}]+)\}", paper)
        year, url = re.search(r"year: (\d+)\n    url: (\S+)", paper).groups()
        assert title and names
        entry = (
            f"title = {{{' '.join(title[1].split()).strip(chr(34))}}},"
            f" author = {{{' and '.join(f'{a}, {b}' for a, b in names)}}},"
            f" year = {{{year}}}, url = {{{url}}},"
        )
        assert entry in page


def test_the_lower_bounds_are_the_versions_that_are_tested():
    bounds = versions(PROJECT["dependencies"], ">=")
    assert len(bounds) == len(PROJECT["dependencies"])
    oldest = versions((ROOT / ".ci" / "oldest.txt").read_text().splitlines(), "==")
    assert oldest.pop("jaxlib") == bounds["jax"]
    assert oldest == bounds


def test_the_workflows_run_the_oldest_python():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    for name in ("ci", "publish"):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        # The last that is set up is `python3`.
        assert re.findall(r"\b3\.\d+\b", text)[-1] == oldest


def test_what_is_missing_from_an_archive_or_too_much_in_it_is_found():
    release = runpy.run_path(str(ROOT / ".ci" / "release.py"))
    package = release["package"]()
    wheel = package | {"dpadambc-0.1.0.dist-info/METADATA"}
    beside = release["BESIDE"] | release["files_of"]("examples")
    sdist = {f"dpadambc-0.1.0/{name}" for name in package | beside}
    release["check_wheel"](wheel)
    release["check_sdist"](sdist)
    for wrong in (wheel - {"dpadambc/py.typed"}, wheel | {"tests/common.py"}):
        with pytest.raises(SystemExit, match="the wheel lacks"):
            release["check_wheel"](wrong)
    for name in ("dpadambc/__pycache__/x.pyc", "benchmarks/results.jsonl"):
        with pytest.raises(SystemExit, match="should not have"):
            release["check_sdist"](sdist | {f"dpadambc-0.1.0/{name}"})


def test_a_tag_of_another_version_is_not_published():
    check_tag = runpy.run_path(str(ROOT / ".ci" / "release.py"))["check_tag"]
    check_tag("v1.2.3", "1.2.3")
    for tag in ("v1.2.4", "1.2.3"):
        with pytest.raises(SystemExit, match=f"the tag v1.2.3, .* got {tag}"):
            check_tag(tag, "1.2.3")
