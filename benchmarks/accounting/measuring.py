"""All settings by some accountants, and the file in which that is recorded."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.accounting import exact, process, settings
from benchmarks.accounting.settings import Setting


def rows(
    module: str, name: str, grid: Iterable[Setting] = settings.ALL
) -> dict[str, process.Row]:
    """One accountant of a module on all settings that it can account for."""
    found = {}
    for setting in grid:
        row = process.measure(module, name, setting)
        if "value" in row and setting.target is not None:
            # What the noise really spends, from below.
            row["epsilon"] = exact.epsilon_bounds(setting, row["value"])[0]
        if row:
            found[setting.name] = row
            print(f"{name}, {setting.name}: {row}", file=sys.stderr, flush=True)
    return found


def record(
    module: str,
    names: Sequence[str],
    where: Callable[[str], dict[str, Any]],
    output: pathlib.Path,
    imports: Sequence[str] = (),
) -> None:
    """Measures accountants; what is measured again replaces what was recorded.

    Args:
      module: whose `ACCOUNTANTS` they are.
      names: of the accountants.
      where: the environment of an accountant.
      output: the file.
      imports: modules that the processes have imported before they are measured.
    """
    process.prepare([module, *imports])
    results: dict[str, Any] = {"accountants": {}}
    if output.exists():
        results = json.loads(output.read_text())
    for name in names:
        row = {"environment": where(name), "settings": rows(module, name)}
        results["accountants"][name] = row
        output.write_text(json.dumps(results, indent=1) + "\n")
