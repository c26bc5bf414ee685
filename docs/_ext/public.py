"""The public names of the package, each with the module that lists it.

It needs no Sphinx, so that the tests can compare it with the names that they find
themselves.
"""

import functools
import importlib
import inspect
import re
import types
from collections.abc import Iterator

PACKAGE = "dpadambc"
# Public, but no attribute of the package.
ENTRY_POINTS = ("dpadambc.cli",)
# A name that a package lists: `from dpadambc.core.fit import fit as fit`.
_LISTED = re.compile(r"\b(\w+) as \1\b")


def names_of(module: types.ModuleType) -> list[str]:
    """The names that a module lists, sorted as a reader looks them up."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = _LISTED.findall(inspect.getsource(module))
    return sorted(names, key=str.lower)


def _submodules(module: types.ModuleType) -> Iterator[types.ModuleType]:
    values = (getattr(module, name) for name in names_of(module))
    return (value for value in values if inspect.ismodule(value))


@functools.cache
def modules() -> tuple[types.ModuleType, ...]:
    """Every module that is reached by public names, a package before its parts."""
    found = []

    def visit(module):
        found.append(module)
        for part in _submodules(module):
            visit(part)

    for name in (PACKAGE, *ENTRY_POINTS):
        visit(importlib.import_module(name))
    return tuple(found)


@functools.cache
def homes() -> dict[str, list[str]]:
    """The names that the pages of each module document: all that it lists."""
    return {
        module.__name__: [
            name
            for name in names_of(module)
            if not inspect.ismodule(getattr(module, name))
        ]
        for module in sorted(modules(), key=lambda module: module.__name__)
    }


def full_names() -> set[str]:
    """Every public name of an object, with its module."""
    return {f"{module}.{name}" for module, names in homes().items() for name in names}
