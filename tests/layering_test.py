"""Modules import downwards only; from outside, five packages and those of extras."""

import ast
import pathlib
import sys

import pytest

import dpadambc

PACKAGE = pathlib.Path(dpadambc.__file__).parent
LAYERS = [
    {"_validate", "collectives", "explicit", "keys", "manual", "precision", "seal"}
    | {"threefry"},
    {"factored", "mixture", "noise_level", "theory"},
    {"leaves", "batch_statistics", "graphs"},
    {"clipping", "noise", "moments", "decay", "rounding", "sampling", "accounting"},
    {"per_example", "mechanism"},
    {"clipped", "private_gradient", "subsampled", "multi_term", "explanation"},
    {"optimizers", "diagnostics", "training"},
    {"checkpoints", "cli", "pictures", "progress", "__init__"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
OUTSIDE = {"jax", "numpy", "scipy", "optax", "dp_accounting"} | sys.stdlib_module_names
# Not imported by the core, and each with an extra of its own.
EXTRAS = {
    "checkpoints": {"orbax"},
    "pictures": {"matplotlib"},
    "progress": {"rich"},
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
        outside = OUTSIDE | EXTRAS.get(own, set())
        allowed = within or RANK[name] < RANK[own] if internal else name in outside
        assert allowed, f"{path.name} must not import {name}"
