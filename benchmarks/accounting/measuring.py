"""All settings by some accountants, and the file in which that is recorded."""

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.accounting import exact, process, settings
from benchmarks.accounting.settings import Setting


def row(module: str, name: str, setting: Setting, repeats: int) -> process.Row:
    """One accountant of a module on one setting; empty where it cannot account."""
    found = process.measure(module, name, setting, repeats=repeats)
    if "value" in found and setting.target is not None:
        # What the noise really spends, from below.
        found["epsilon"] = exact.epsilon_bounds(setting, found["value"])[0]
    return found


def load(output: pathlib.Path) -> dict[str, Any]:
    """What was recorded, by accountant."""
    return json.loads(output.read_text())["accountants"] if output.exists() else {}


def record(
    module: str,
    names: Sequence[str],
    where: Callable[[str], dict[str, Any]],
    output: pathlib.Path,
    *,
    missing: bool = False,
    repeats: int = process.REPEATS,
    imports: Sequence[str] = (),
) -> None:
    """Measures accountants; what is measured again replaces what was recorded.

    Args:
      module: whose `ACCOUNTANTS` they are.
      names: of the accountants.
      where: the environment of an accountant.
      output: the file, written after each setting.
      missing: only settings that are not in the file.
      repeats: how many processes; what is slow takes one.
      imports: modules that the processes have imported before they are measured.
    """
    process.prepare([module, *imports])
    for name in names:
        results = load(output)
        recorded = results.get(name, {}).get("settings", {})
        results[name] = {"environment": where(name), "settings": recorded}
        for setting in settings.ALL:
            if missing and setting.name in recorded:
                continue
            found = row(module, name, setting, repeats)
            print(f"{name}, {setting.name}: {found}", file=sys.stderr, flush=True)
            recorded[setting.name] = found
            text = json.dumps({"accountants": results}, indent=1)
            output.write_text(text + "\n")
