"""Modules import downwards only; from outside, five packages and those of extras."""

import ast
import graphlib
import pathlib
import sys

import pytest

import dpadambc

PACKAGE = pathlib.Path(dpadambc.__file__).parent
LAYERS = [
    {"_core"},
    {"gradients"},
    {"clipping"},
    {"transforms"},
    {"mechanisms"},
    {"optimizers", "graphs"},
    {"diagnostics", "training"},
    {"audit"},
    {"cli", "__init__"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
OUTSIDE = {"jax", "numpy", "scipy", "optax", "dp_accounting"} | sys.stdlib_module_names
# Files and folders not imported by the core, each with an extra of its own.
EXTRAS = {
    "training/checkpoints.py": {"orbax"},
    "audit/pictures.py": {"matplotlib"},
    "training/progress.py": {"rich"},
}


def imported(path):
    """Yields (is_internal, module) for every import statement of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((False, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package, *rest = node.module.split(".")
            if package != "dpadambc":
                yield False, package
            elif rest:
                yield True, rest[0]
            else:
                yield from ((True, alias.name) for alias in node.names)


def unit(path):
    """The module, or the package of a module in a folder."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: "/".join(p.parts[-2:])
)
def test_imports_point_downwards(path):
    own, place = unit(path), path.relative_to(PACKAGE).as_posix()
    extras = [names for start, names in EXTRAS.items() if place.startswith(start)]
    for internal, name in imported(path):
        within = name == own != path.stem
        outside = OUTSIDE.union(*extras)
        allowed = within or RANK[name] < RANK[own] if internal else name in outside
        assert allowed, f"{path.name} must not import {name}"


def nodes_that_run(node):
    """All below a node but what a type checker alone reads."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from nodes_that_run(child)


def modules_imported(path):
    """The files of the package that a file imports, those of lazy names aside."""
    for node in nodes_that_run(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("dpadambc"):
            base = PACKAGE.parent.joinpath(*node.module.split("."))
            for name in (base, *(base / alias.name for alias in node.names)):
                if name.with_suffix(".py").exists():
                    yield name.with_suffix(".py")


def test_no_files_import_each_other():
    """Sorted, each file comes after those that it imports; the sort finds cycles."""
    files = {p for p in PACKAGE.rglob("*.py") if p.stem not in ("__init__", "__main__")}
    graph = {path: set(modules_imported(path)) & files for path in files}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert len(order) == len(files) > 50
    graph[order[0]].add(order[-1])
    graph[order[-1]].add(order[0])
    with pytest.raises(graphlib.CycleError):  # negative control
        graphlib.TopologicalSorter(graph).prepare()
