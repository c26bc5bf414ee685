"""The command line that the comparisons of methods have in common."""

import argparse
import pathlib

from benchmarks.methods import tasks


def parser(doc: str | None, output: pathlib.Path) -> argparse.ArgumentParser:
    """Of a command that trains where it has the data, and then prints its tables."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    made.add_argument("--cache-dir", type=pathlib.Path, help="of the features")
    made.add_argument("--output", type=pathlib.Path, default=output)
    made.add_argument("--task", choices=tasks.TASKS, nargs="+", default=tasks.TASKS)
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given; an error for data without a place for its features."""
    arguments = made.parse_args()
    if arguments.data_dir and not arguments.cache_dir:
        made.error("Expected --cache-dir beside --data-dir, for the features.")
    return arguments
