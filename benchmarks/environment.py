"""Where and when a result was measured."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def commit() -> str:
    """The commit of the repository, where there is one; with a mark if files differ."""
    command = "git", "-C", str(pathlib.Path(__file__).parent), "describe"
    asked = *command, "--always", "--dirty"
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def environment() -> dict[str, Any]:
    """The date, the commit, the machine, and the versions that a number depends on."""
    packages = ("jax", "jaxlib", "optax", "dp-accounting", "numpy")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
