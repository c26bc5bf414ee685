"""Names that are imported when they are first used.

They need an extra, or would make everybody wait for what few use.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attribute(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: names, each with the module that defines it.

    A name that is its module's own gives the module.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        return module if name == modules[name] else getattr(module, name)

    return __getattr__


def attribute_of(places: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports each name from its place when it is used."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"no attribute {name!r}")
        module, _, attribute = places[name].partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    return find
