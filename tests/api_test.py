"""What is public: reachable by one import, exported by name, and shown by example."""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

import dpadambc

MODULES = [
    "dpadambc",
    *(m.name for m in pkgutil.walk_packages(dpadambc.__path__, "dpadambc.")),
]
PUBLIC = [
    name
    for name in MODULES
    if not any(part.startswith("_") for part in name.split("."))
]
# Names that need an extra are imported when they are first used.
OF_EXTRAS = {
    "dpadambc.diagnostics": {"pictures"},
    "dpadambc.training": {"Checkpoints", "ProgressBar", "checkpoints", "progress"},
}
# What other functions return, or are made by.
RETURNED = {
    "AddBandedNoiseState",
    "AddCorrelatedNoiseState",
    "AddDPNoiseState",
    "Advice",
    "Choice",
    "ClipBound",
    "ClippedGrad",
    "ClippedSum",
    "DelayedPreconditionerState",
    "Explanation",
    "FactoredMoment",
    "GradientStatistics",
    "KroneckerPreconditioner",
    "LowPassState",
    "Mechanism",
    "ParameterCost",
    "PerExampleGradient",
    "Plan",
    "PlannedRun",
    "Progress",
    "Readout",
    "Releasable",
    "Release",
    "Report",
    "Result",
    "RoundStochasticallyState",
    "ScaleByAdafactorBCState",
    "ScaleByAdamBCState",
    "ScaleByAdemamixBCState",
    "ScaleByRmsBCState",
    "ScaleThenPrivatizeState",
    "SearchResult",
    "Seen",
    "Snapshot",
    "Spent",
    "Subgraphs",
    "TrainState",
    "Trial",
}


def names_of(module):
    return {*getattr(module, "__all__", ()), *OF_EXTRAS.get(module.__name__, ())}


def defined_in(module):
    """Classes and functions of its own, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def objects():
    """Every public class and function, once, by its shortest name."""
    found = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for attribute in sorted(names_of(module)):
            value = getattr(module, attribute)
            own = getattr(value, "__module__", "").startswith("dpadambc")
            if own and (inspect.isclass(value) or inspect.isfunction(value)):
                found.setdefault(id(value), (f"{name}.{attribute}", value))
    return dict(found.values())


def test_one_import_reaches_every_public_module_and_name():
    names = [n for n in PUBLIC if not n.endswith("cli")]
    code = "import dpadambc\n" + "\n".join(f"{n}.__name__" for n in names)
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_names_of_the_package_are_lazy_and_type_checkers_see_them_all():
    tree = ast.parse(pathlib.Path(dpadambc.__file__).read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: (statement.module.partition(".")[2] or alias.name)
        for statement in branch.body
        for alias in statement.names
    }
    assert branch.test.id == "TYPE_CHECKING"
    modules = ast.literal_eval(branch.orelse[0].value.args[1])
    assert modules == seen
    assert sorted(modules) == sorted(dpadambc.__all__)
    assert set(dpadambc.__all__) <= set(dir(dpadambc))
    # First used inside a traced function: no module keeps anything of the trace.
    code = """
import dpadambc, sys
assert "jax" not in sys.modules
import jax
def uses(x):
    for name in dpadambc.__all__:
        getattr(dpadambc, name)
    return x
with jax.checking_leaks():
    jax.jit(uses)(1.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(dpadambc, "dp_sdg")


@pytest.mark.parametrize("name", PUBLIC)
def test_what_looks_public_is_exported(name):
    """By the module itself where it is a name space, else by its package."""
    module = importlib.import_module(name)
    package = importlib.import_module(name.rpartition(".")[0] or name)
    exported = names_of(module) | names_of(package)
    assert not set(defined_in(module)) - exported
    for attribute in names_of(module):
        assert getattr(module, attribute) is not None


def test_the_top_has_few_files_and_each_folder_says_what_it_is_for():
    folder = pathlib.Path(dpadambc.__file__).parent
    public = [p for p in folder.iterdir() if not p.name.startswith(("_", "."))]
    assert len(public) <= 12
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
for name in ("matplotlib", "matplotlib.axes", "orbax", "orbax.checkpoint", "rich"):
    sys.modules[name] = None
import dpadambc
for name, extra in [("training.Checkpoints", "checkpoints"),
                    ("training.ProgressBar", "progress"),
                    ("diagnostics.pictures", "pictures")]:
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
