"""Modules import downwards only; from outside, five packages and those of extras."""

import ast
import pathlib
import sys

import pytest

import dpadambc

PACKAGE = pathlib.Path(dpadambc.__file__).parent
LAYERS = [
    {"_core"},
    {"theory"},
    {"gradients"},
    {"clipping"},
    {"transforms"},
    {"mechanisms"},
    {"optimizers", "graphs"},
    {"diagnostics", "training"},
    {"cli", "__init__"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
OUTSIDE = {"jax", "numpy", "scipy", "optax", "dp_accounting"} | sys.stdlib_module_names
# Not imported by the core, and each with an extra of its own.
EXTRAS = {
    "training/checkpoints.py": {"orbax"},
    "diagnostics/pictures.py": {"matplotlib"},
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
    own = unit(path)
    for internal, name in imported(path):
        within = name == own != path.stem
        outside = OUTSIDE | EXTRAS.get(path.relative_to(PACKAGE).as_posix(), set())
        allowed = within or RANK[name] < RANK[own] if internal else name in outside
        assert allowed, f"{path.name} must not import {name}"
