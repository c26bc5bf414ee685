"""The rings of the house: an arrow goes inward, and what epsilon rests on is known.

Each rule is a function of one file's source; its negative controls are small sources
that break it.
"""

import ast
import graphlib
import io
import pathlib
import re
import sys
import tokenize

import pytest

import dpadambc

PACKAGE = pathlib.Path(dpadambc.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}
# From the inside out. Folders of one ring may import each other, in files of theirs
# that do not.
RINGS = [
    {"core", "engine"},
    {"accounting", "clipping", "mechanisms", "transforms"},
    {"diagnostics", "graphs", "optimizers", "training"},
    {"contrib"},
    {"audit"},
    {"cli", "__init__"},
    {"__main__"},
]
RANK = {name: rank for rank, ring in enumerate(RINGS) for name in ring}
LIBRARIES = {"jax", "numpy", "scipy", "optax", "dp_accounting"}
# These files are imported when a name of theirs is first used, each with an extra.
EXTRAS = {
    "audit/pictures.py": {"matplotlib"},
    "training/checkpoints.py": {"orbax"},
    "training/progress.py": {"rich"},
}
# The core keeps nothing, warns of nothing, and reads no files and no network.
IMPURE = {"warnings", "weakref", "contextvars", "threading", "tempfile", "shutil"} | {
    *("io", "os", "pathlib", "socket", "urllib", "http", "pickle", "shelve"),
}
FILES_OF_NUMPY = {"save", "savez", "savetxt", "load", "loadtxt", "fromfile"}
# Of the core and all that it imports.
MAX_TRUSTED_LINES = 5_400


def folder_of(path):
    """The folder of a file, or its name at the top."""
    return path.removesuffix(".py").partition("/")[0]


def imports(source):
    """Yields (module, names) for every import statement, type checkers' too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ".", tuple(alias.name for alias in node.names)


def folders(source):
    """The folders of the package that a file imports from; a public name is of none."""
    for module, names in imports(source):
        package, _, rest = module.partition(".")
        if package == "dpadambc":
            found = [rest.partition(".")[0]] if rest else names
            yield from (name if name in RANK else "__init__" for name in found)


def foreign(path, source):
    """Imports from outside the package that a file may not have."""
    allowed = LIBRARIES | sys.stdlib_module_names | {"dpadambc"}
    allowed |= EXTRAS.get(path, set())
    return {module.partition(".")[0] for module, _ in imports(source)} - allowed


def outward(path, source):
    """Folders of the package that a file imports and that are further out."""
    rank = RANK[folder_of(path)]
    return {name for name in folders(source) if RANK[name] > rank}


def private(path, source):
    """Underscore modules and names of other folders that a file uses."""
    modules = {}
    for module, names in imports(source):
        package, _, rest = module.partition(".")
        if package != "dpadambc" or rest.partition(".")[0] == folder_of(path):
            continue
        modules |= {name: module for name in names}
        yield from (part for part in (*rest.split("."), *names) if is_private(part))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                yield f"{node.value.id}.{node.attr}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def impure(source):
    """Imports and calls of the core that remember, warn, read or write."""
    yield from IMPURE & {module.partition(".")[0] for module, _ in imports(source)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            yield "global"
        if isinstance(node, ast.Name) and node.id == "open":
            yield "open"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np":
            yield from {node.attr} & FILES_OF_NUMPY


MUTABLE = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
MAKERS = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter"} | {
    *("OrderedDict", "ChainMap", "count", "cycle", "iter", "array", "zeros", "ones"),
}


def is_mutable(value):
    if isinstance(value, ast.Call):
        return getattr(value.func, "attr", getattr(value.func, "id", "")) in MAKERS
    return isinstance(value, MUTABLE)


def mutable(source):
    """Values of a module or class that could change, by name; tables are tuples."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in (node for body in (tree, *classes) for node in body.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield ast.unparse(targets[0])


def code_lines(source):
    """The number of lines that are neither blank nor comments nor docstrings."""
    skipped = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER
    skipped += tokenize.INDENT, tokenize.DEDENT
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            words = node.body[0]
            lines -= {*range(words.lineno, (words.end_lineno or 0) + 1)}
    return len(lines)


def breaches(rule, folders=tuple(RANK)):
    """The breaches of a rule, by file."""
    found = {p: set(rule(p, s)) for p, s in SOURCES.items() if folder_of(p) in folders}
    assert found
    return {path: names for path, names in found.items() if names}


def test_every_folder_has_a_ring():
    assert {folder_of(path) for path in SOURCES} == RANK.keys()


def test_an_import_goes_inward():
    assert not breaches(outward)
    assert outward("core/fit.py", "from dpadambc.training import users") == {"training"}
    assert outward("core/fit.py", "from dpadambc import audit") == {"audit"}
    assert outward("core/fit.py", "from dpadambc import dp_sgd") == {"__init__"}
    assert outward("audit/x.py", "from dpadambc.core.fit import fit") == set()


def test_five_libraries_and_those_of_extras_are_imported():
    assert not breaches(foreign)
    assert foreign("core/fit.py", "import os\nimport pandas.x") == {"pandas"}
    assert foreign("training/progress.py", "from rich import print") == set()


def test_underscores_are_private_to_a_folder():
    assert not breaches(private)
    of_core = lambda source: set(private("audit/x.py", source))
    assert of_core("from dpadambc.core import _keys") == {"_keys"}
    assert of_core("from dpadambc.core._keys import draw") == {"_keys"}
    assert of_core("from dpadambc.core.keys import _draw") == {"_draw"}
    used = "from dpadambc.core import keys\nkeys._draw(1)"
    assert of_core(used) == {"keys._draw"}
    assert of_core("from dpadambc.audit import _keys\n_keys._x, self._x") == set()


def test_the_core_is_pure():
    assert not breaches(lambda _, source: impure(source), ["core"])
    assert set(impure("import warnings\nfrom urllib.request import x")) == {
        *("warnings", "urllib")
    }
    assert set(impure("def f():\n    global x\n    return open('x')")) == {
        *("global", "open")
    }
    assert set(impure("x = np.load('x')")) == {"load"}
    assert set(impure("import jax, math\nx = leaf.open(y), tree.load(z)")) == set()


def test_the_core_has_no_value_that_could_change():
    assert not breaches(lambda _, source: mutable(source), ["core"])
    for value in ("{}", "[1]", "{'a': 1}", "collections.deque()", "{x for x in y}"):
        assert set(mutable(f"NAMES = {value}")) == {"NAMES"}
        assert set(mutable(f"class A:\n    names: dict = {value}")) == {"names"}
    assert set(mutable("NAMES = 'a', 'b'\ndef f():\n    x = {}")) == set()


def nodes_that_run(node):
    """All below a node except for type checkers' imports."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from nodes_that_run(child)


def files_imported(source):
    """The files of the package that a file imports, those of lazy names aside."""
    for node in nodes_that_run(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("dpadambc"):
            base = "/".join(node.module.split(".")[1:])
            names = (f"{base}/{alias.name}".strip("/") for alias in node.names)
            yield from (f"{name}.py" for name in (base, *names))


def closure(folder, sources):
    """The files of a folder and all that they import, directly or not."""
    found, new = set(), {path for path in sources if folder_of(path) == folder}
    while new:
        found |= new
        imported = {each for path in new for each in files_imported(sources[path])}
        new = (imported & sources.keys()) - found
    return found


def test_all_that_epsilon_rests_on_is_listed():
    """In `core/__init__`, file by file, and by its size in README."""
    trusted = {p for p in closure("core", SOURCES) if not p.endswith("__init__.py")}
    assert {folder_of(path) for path in trusted} == {"core", "engine"}
    words = ast.get_docstring(ast.parse(SOURCES["core/__init__.py"])) or ""
    listed = re.findall(r"^ *(?:\d+\.|\*) `([\w.]+)`:", words, re.M)
    name = lambda path: path.removesuffix(".py").replace("/", ".").removeprefix("core.")
    assert sorted(listed) == sorted(map(name, trusted))
    lines = sum(code_lines(SOURCES[path]) for path in trusted)
    assert lines <= MAX_TRUSTED_LINES, lines
    readme = " ".join((PACKAGE.parent / "README.md").read_text().split())
    assert f"{len(trusted)} files, {round(lines, -2):,} lines of code" in readme
    # Negative controls.
    sources = {
        "core/a.py": "from dpadambc.engine import b",
        "engine/b.py": "",
        "c.py": "",
    }
    assert closure("core", sources) == {"core/a.py", "engine/b.py"}
    assert code_lines('"""Two\nlines."""\n\n# Why.\nx = (\n    1\n)\n') == 3
    assert code_lines('def f():\n    """One."""\n    return """a\nb"""\n') == 3


def test_no_files_import_each_other():
    """Sorted, each file comes after those that it imports; the sort finds cycles."""
    files = {p: s for p, s in SOURCES.items() if not p.endswith("__.py")}
    graph = {path: {*files_imported(s)} & files.keys() for path, s in files.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert len(order) == len(files) > 50
    graph[order[0]].add(order[-1])
    graph[order[-1]].add(order[0])
    with pytest.raises(graphlib.CycleError):  # negative control
        graphlib.TopologicalSorter(graph).prepare()
