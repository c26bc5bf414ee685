"""`dpadambc audit`: the checks of a training pipeline."""

import argparse
import importlib
import inspect
import os
import sys
from typing import Any

from dpadambc.audit import report
from dpadambc.audit.pipeline import Pipeline


def _pipeline(factory: str) -> Pipeline:
    """What `MODULE:FACTORY` makes, from the working directory or an installation."""
    module, _, name = factory.partition(":")
    if not name:
        raise ValueError(f"Expected MODULE:FACTORY, got {factory!r}.")
    if module.endswith(".py"):
        raise ValueError(f"Expected the name of a module, without .py, got {module!r}.")
    # It stays: the factory, and what it returns, may import from there later.
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Expected a function {name!r} in {module!r}: {error}.") from (
            error
        )
    _check_takes_nothing(factory, make)
    made = make()
    if not isinstance(made, Pipeline):
        raise TypeError(
            f"Expected {factory} to return a dpadambc.audit.Pipeline, got {made!r}."
        )
    return made


def _check_takes_nothing(factory: str, make: Any) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:  # of what is not written in Python
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"Expected {factory} to be a function without arguments: {error}."
        ) from error


def run(args: argparse.Namespace) -> int:
    """Prints what the checks find; progress goes to the standard error stream."""
    found = report.run(
        _pipeline(args.factory),
        checks=args.check or report.CHECKS,
        progress=lambda text: print(text, file=sys.stderr),
    )
    print(found.to_json() if args.json else found)
    return found.exit_code
