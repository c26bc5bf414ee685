"""The command of an experiment with linear probes."""

import argparse
import pathlib
from collections.abc import Callable, Sequence

from benchmarks import records
from benchmarks.probe import pictures


def main(
    doc: str | None,
    results: pathlib.Path,
    run: Callable[[argparse.Namespace], None],
    render: Callable[[Sequence[records.Row]], str],
    **more: tuple[int, str],
) -> None:
    """Trains where it has the data, and then prints the tables or draws the curves.

    Args:
      doc: of the module; its first line describes the command.
      results: the file of the records, unless the user names another.
      run: makes what is not on record, from the arguments of the command.
      render: the tables.
      **more: options that are a number, each with its default and its help.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    parser.add_argument("--cache-dir", type=pathlib.Path, help="of the features")
    parser.add_argument("--output", type=pathlib.Path, default=results)
    parser.add_argument("--pictures", action="store_true", help="draws the curves")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    for name, (default, about) in more.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, help=about)
    arguments = parser.parse_args()
    if arguments.data_dir:
        if not arguments.cache_dir:
            parser.error("Expected --cache-dir beside --data-dir, for the features.")
        run(arguments)
    rows = records.read(arguments.output)
    print(render(rows))
    if arguments.pictures:
        figure = pictures.learning_curves(rows)
        figure.savefig(arguments.output.with_suffix(".png"), dpi=150)
