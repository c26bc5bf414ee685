"""The public names of the package, each with the module where it is documented.

It needs no Sphinx, so that the tests can compare it with what they find themselves.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Iterator

PACKAGE = "dpadambc"
# Modules and names that their package imports when they are first used.
LAZY = {
    "dpadambc.diagnostics": ("pictures",),
    "dpadambc.training": ("Checkpoints", "ProgressBar"),
}
# What is public but no attribute of the package.
ENTRY_POINTS = ("dpadambc.cli",)


def names_of(module: types.ModuleType) -> list[str]:
    """What a module exports, sorted as a reader looks it up."""
    names = {*getattr(module, "__all__", ()), *LAZY.get(module.__name__, ())}
    return sorted(names, key=str.lower)


def _submodules(module: types.ModuleType) -> Iterator[types.ModuleType]:
    for name in names_of(module):
        value = getattr(module, name)
        # A top-level name may be a module: the packages are.
        if inspect.ismodule(value) and value.__name__.startswith(PACKAGE):
            yield value


def modules() -> list[types.ModuleType]:
    """Every module that is reached by public names, a package before its parts."""
    found = {}

    def visit(module):
        if module.__name__ not in found:
            found[module.__name__] = module
            for part in _submodules(module):
                visit(part)

    visit(importlib.import_module(PACKAGE))
    for name in ENTRY_POINTS:
        visit(importlib.import_module(name))
    return list(found.values())


@functools.cache
def homes() -> dict[str, list[str]]:
    """The names that each module's pages document, each object in one place.

    The package itself only repeats names of its parts. Where two parts have one object,
    the part whose path is shorter has its page.
    """
    documented: dict[str, list[str]] = {}
    seen: set[int] = set()
    parts = [m for m in modules() if m.__name__ != PACKAGE]
    for module in sorted(parts, key=lambda m: m.__name__.count(".")):
        documented[module.__name__] = own = []
        for name in names_of(module):
            value = getattr(module, name)
            is_object = inspect.isclass(value) or inspect.isroutine(value)
            if inspect.ismodule(value) or (is_object and id(value) in seen):
                continue
            seen.add(id(value))
            own.append(name)
    return dict(sorted(documented.items()))


@functools.cache
def aliases() -> dict[str, str]:
    """Every public name of an object, with the one under which it is documented."""
    documented = {
        id(getattr(importlib.import_module(module), name)): f"{module}.{name}"
        for module, names in homes().items()
        for name in names
    }
    found = {}
    for module in modules():
        for name in names_of(module):
            home = documented.get(id(getattr(module, name)))
            if home:
                found[f"{module.__name__}.{name}"] = home
    return found
