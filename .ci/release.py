"""Builds the archives to publish, and tries them outside of the repository.

python .ci/release.py [--tag v0.1.0]    # or `make release-check`; leaves dist/

Tools and library are each installed into an environment of their own: an editable one
would find files that the wheel lacks, and packages that it does not ask for.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Beside the package and the examples, in the sdist. Tests, benchmarks, notebooks and
# documents are in the repository alone.
BESIDE = {
    ".gitignore",  # hatchling adds this one itself
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "pyproject.toml",
}
# No public name may need a package that the wheel does not require.
IMPORTED = """
import dpadambc, sys
assert sys.prefix in dpadambc.__file__, dpadambc.__file__
dpadambc.audit, dpadambc.contrib, dpadambc.graphs
print(dpadambc.__version__)
"""
EXAMPLES = """
import pathlib, sys
names = {}
for block in pathlib.Path(sys.argv[1]).read_text().split("```python")[1:]:
    exec(block.split("```")[0], names)
"""


def files_of(folder: str, suffixes: Iterable[str] = (".py", ".typed")) -> set[str]:
    """The files of a folder of the repository that belong into an archive."""
    paths = (ROOT / folder).rglob("*")
    return {p.relative_to(ROOT).as_posix() for p in paths if p.suffix in suffixes}


def check_wheel(names: Iterable[str]) -> None:
    """Raises unless it has the package, and nothing else beside its metadata."""
    check("the wheel", {n for n in names if ".dist-info/" not in n}, package())


def check_sdist(names: Iterable[str]) -> None:
    """Raises unless it has the package, the examples and what is beside them."""
    found = {name.partition("/")[2] for name in names}
    check("the sdist", found, package() | files_of("examples") | BESIDE)


def package() -> set[str]:
    """The files of the package, the marker of its types among them."""
    return files_of("dpadambc") | {"dpadambc/py.typed"}


def check(what: str, found: set[str], expected: set[str]) -> None:
    """Raises with the difference, if there is one."""
    if found != expected:
        sys.exit(
            f"{what} lacks {sorted(expected - found)}"
            f" and should not have {sorted(found - expected)}"
        )


def check_tag(tag: str, version: str) -> None:
    """Raises unless a tag is of the version that is built."""
    if tag != f"v{version}":
        sys.exit(f"Expected the tag v{version}, as pyproject.toml says, got {tag}.")


def environment(folder: pathlib.Path, *requirements: str) -> pathlib.Path:
    """The Python of a new environment with these packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    install(python, *requirements)
    return python


def install(python: pathlib.Path, *requirements: str) -> None:
    """Adds packages to an environment."""
    quiet = "--quiet", "--disable-pip-version-check"
    run(python, "-m", "pip", "install", *quiet, *requirements)


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> None:
    """Runs a command that sees no module of the repository; ends where it fails."""
    hidden = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, cwd=cwd, env=hidden, check=True)


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The sdist, and the wheel that is made of it, both checked."""
    python = environment(folder / "tools", "build", "twine")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(python, "-m", "build", "--outdir", "dist", ".")
    (sdist,), (wheel,) = ((ROOT / "dist").glob(x) for x in ("*.tar.gz", "*.whl"))
    run(python, "-m", "twine", "check", "--strict", sdist, wheel)
    with tarfile.open(sdist) as archive:
        check_sdist(member.name for member in archive if member.isfile())
    with zipfile.ZipFile(wheel) as archive:
        check_wheel(archive.namelist())
    return sdist, wheel


def try_out(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    """Imports all that is public, then runs the examples of the README."""
    python = environment(folder / "user", str(wheel))
    run(python, "-c", IMPORTED, cwd=folder)
    run(python.with_name("dpadambc"), "--help", cwd=folder)
    install(python, f"{wheel}[demo]")
    run(python, "-c", EXAMPLES, ROOT / "README.md", cwd=folder)


def main() -> None:
    """Builds, checks and tries."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tag", help="which must be of the version that is built")
    tag = parser.parse_args().tag
    if tag:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        check_tag(tag, project["version"])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        sdist, wheel = build(folder)
        try_out(wheel, folder)
    for path in sdist, wheel:
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
