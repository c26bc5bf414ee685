"""Each public name is listed once, reachable by one import, and shown by example."""

import ast
import collections
import dataclasses
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

import dpadambc

ROOT = pathlib.Path(dpadambc.__file__).parent


# Other functions return these, or are made by them.
RETURNED = {
    "Accountant",
    "ClippedSum",
    "Explanation",
    "FactoredMoment",
    "GradientStatistics",
    "KroneckerPreconditioner",
    "Mechanism",
    "PerExampleGradient",
    "PlannedRun",
    "Progress",
    "ReadableDpEvent",
    "Readout",
    "Recipe",
    "Release",
    "Report",
    "Result",
    "SearchResult",
    "Snapshot",
    "Subgraphs",
    "TrainState",
    "Trial",
}


def listed(source):
    """The names that a package lists: `from dpadambc.core.fit import fit as fit`."""
    nodes = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "names")]
    aliases = (alias for node in nodes for alias in node.names)
    return [a.asname for a in aliases if getattr(a, "asname", None) == a.name]


def names_of(module):
    """Of a package, the names that it lists; of one file, those in `__all__`."""
    names = getattr(module, "__all__", None)
    return names or listed(pathlib.Path(module.__file__).read_text())


def modules(name="dpadambc"):
    """The names of the public modules, a package before its parts."""
    found, module = [name], importlib.import_module(name)
    for value in (getattr(module, attribute) for attribute in names_of(module)):
        if inspect.ismodule(value):
            found += modules(value.__name__)
    return found


PUBLIC = modules()


def objects():
    """Every public class and function, by its name."""
    found = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for attribute in names_of(module):
            value = getattr(module, attribute)
            own = getattr(value, "__module__", "").startswith("dpadambc")
            if own and (inspect.isclass(value) or inspect.isfunction(value)):
                found[f"{name}.{attribute}"] = value
    return found


def repeated(values):
    """Those that are in there more than once."""
    return {value for value, n in collections.Counter(values).items() if n > 1}


def test_each_public_name_is_listed_once():
    assert not repeated(objects().values())
    for name in PUBLIC:
        assert not repeated(names_of(importlib.import_module(name)))
    assert 100 < len(objects()) < 200
    assert {name.rpartition(".")[2] for name in objects()} >= RETURNED
    # Negative controls.
    assert repeated([1, 2, 1]) == {1}
    source = "from a import x as x, y\nfrom b import z as w\nfrom c import x as x"
    assert listed(source) == ["x", "x"]


def test_a_package_lists_names_and_has_no_code():
    for name in PUBLIC:
        path = pathlib.Path(importlib.import_module(name).__file__)
        if path.name == "__init__.py":
            kinds = {type(node) for node in ast.parse(path.read_text()).body}
            allowed = {ast.Expr, ast.Import, ast.ImportFrom, ast.If}
            assert kinds <= allowed | {ast.FunctionDef, ast.Assign}, name


def test_one_import_reaches_every_public_module_and_name():
    code = "import dpadambc\n" + "\n".join(
        f"{name}.{attribute}"
        for name in PUBLIC
        for attribute in names_of(importlib.import_module(name))
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(dpadambc, "dp_sdg")


@pytest.mark.slow
def test_names_may_be_used_first_inside_a_traced_function():
    """No module keeps anything of the trace."""
    code = """
import dpadambc, jax
def uses(x):
    dpadambc.audit, dpadambc.contrib, dpadambc.graphs, dpadambc.training.Checkpoints
    return x
with jax.checking_leaks():
    jax.jit(uses)(1.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_top_has_few_files_and_each_module_says_its_idea():
    public = [p for p in ROOT.iterdir() if not p.name.startswith(("_", "."))]
    assert len(public) <= 15
    for name in PUBLIC:
        assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", sorted(objects()))
def test_public_objects_are_explained_and_shown(name):
    value = objects()[name]
    attribute = name.rpartition(".")[2]
    documentation = inspect.getdoc(value) or ""
    assert documentation.split("\n")[0].endswith((".", ":", "?"))
    if attribute in RETURNED:
        return
    assert ">>>" in documentation, f"{name} has no example"
    if inspect.isfunction(value) and inspect.signature(value).parameters:
        assert "Args:" in documentation
        assert "Returns:" in documentation or "Yields:" in documentation


def fields_of(value):
    """Of a named tuple, of a dataclass, or annotated in a class of another kind."""
    if dataclasses.is_dataclass(value):
        found = [field.name for field in dataclasses.fields(value)]
    else:
        found = [*getattr(value, "_fields", ()), *inspect.get_annotations(value)]
    return {name for name in found if not name.startswith("_")}


def without_words(value):
    """The fields that no line of the docstring explains, under Args or Attributes."""
    documentation = inspect.getdoc(value) or ""
    _, _, sections = documentation.partition(":\n  ")
    explained = re.findall(r"^  (\w+)(?: \(.*\))?: \S", "  " + sections, re.MULTILINE)
    return fields_of(value) - set(explained)


class _Unexplained(NamedTuple):
    """A pair.

    Attributes:
      first: has words.
    """

    first: int
    second: int


def test_every_field_of_a_public_class_has_words_in_its_help():
    assert without_words(_Unexplained) == {"second"}
    classes = {name: v for name, v in objects().items() if inspect.isclass(v)}
    found = {name: without_words(value) for name, value in classes.items()}
    assert not {name: names for name, names in found.items() if names}


def test_what_needs_an_extra_is_not_imported_and_says_what_to_install():
    """In one process without any of them; the rest of the package works."""
    code = """
import sys
for name in ("matplotlib", "orbax", "orbax.checkpoint", "rich"):
    sys.modules[name] = None
import dpadambc
for name, extra in [("training.Checkpoints", "checkpoints"),
                    ("training.ProgressBar", "progress")]:
    package, _, attribute = name.partition(".")
    try:
        getattr(getattr(dpadambc, package), attribute)
    except ModuleNotFoundError as error:
        assert f"pip install 'dpadambc[{extra}]'" in str(error), error
    else:
        raise AssertionError(name)
try:
    dpadambc.training.something
except AttributeError as error:
    assert "has no attribute 'something'" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
