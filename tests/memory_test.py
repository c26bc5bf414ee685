"""The package keeps no memory: a call does the same whatever was called before it."""

import ast
import collections
import pathlib

import pytest

import dpadambc

PACKAGE = pathlib.Path(dpadambc.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}

MODULES = {"weakref", "contextvars", "threading"}
# Containers that are made to change; a table that is written out stays as it is.
KINDS = {"list", "dict", "set", "bytearray", "OrderedDict", "deque", "Counter"} | {
    *("defaultdict", "ChainMap", "ContextVar", "WeakKeyDictionary", "WeakSet"),
    *("WeakValueDictionary", "ref", "local"),
}
CHANGES = {
    *("append", "extend", "insert", "remove", "add", "discard", "update", "pop"),
    *("popitem", "setdefault", "clear", "appendleft", "popleft", "move_to_end"),
}

ALLOWED = {
    # They tell arrays or variables of one program apart, within one call.
    ("clipping/explanation.py", "identity"),
    ("core/gradient.py", "identity"),
    ("engine/rounding.py", "identity"),
    ("engine/weighted.py", "identity"),
    ("training/scores.py", "identity"),
    # Pure functions of frozen values, or made in a call and gone with it.
    ("accounting/search.py", "cache"),
    ("audit/report.py", "cache"),
    ("clipping/plan.py", "cache"),
    ("contrib/banded.py", "cache"),
    ("contrib/strategies.py", "cache"),
    ("core/accounting.py", "cache"),
    ("accounting/calibrate.py", "cache"),
    ("core/programs.py", "cache"),
    ("training/fit.py", "import"),  # of threading, for a line after a second
}


def name_of(node):
    """The last part of the name of a variable, a function or what is called."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", None))


def root_of(node):
    """The variable that an attribute or an item is of."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", None)


def targets_of(node):
    is_list = isinstance(node, ast.Assign | ast.Delete)
    return node.targets if is_list else [node.target]


ASSIGNMENT = ast.Assign | ast.AnnAssign | ast.AugAssign
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def own_names(function):
    """The parameters and variables of a function."""
    nodes = list(ast.walk(function))
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return parameters | {n.id for n in names if isinstance(n.ctx, ast.Store)}


def placed(node, place=None, hidden=frozenset()):
    """Each node below, the definition around it, and the names of its functions."""
    for child in ast.iter_child_nodes(node):
        inner, names = place, hidden
        if isinstance(child, FUNCTION):
            inner, names = child.name, hidden | own_names(child)
        elif isinstance(child, ast.Lambda):
            names = hidden | own_names(child)
        elif isinstance(child, ASSIGNMENT) and not place:
            inner = root_of(targets_of(child)[0])
        yield child, inner, names
        yield from placed(child, inner, names)


def is_made_to_change(value):
    if isinstance(value, ast.Call):
        return name_of(value) in KINDS
    items = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", "x")
    return isinstance(value, ast.List | ast.Dict | ast.Set) and not items


def changed(node):
    """The variable whose items or attributes a node changes."""
    if isinstance(node, ASSIGNMENT | ast.Delete):
        parts = (t for t in targets_of(node) if not isinstance(t, ast.Name))
        return next(map(root_of, parts), None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return root_of(node.func.value) if node.func.attr in CHANGES else None
    return None


def containers(tree):
    """The names of what a module or a class of it begins with and may change."""
    bodies = [
        tree,
        *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
    ]
    for node in (node for body in bodies for node in body.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            if is_made_to_change(node.value):
                yield root_of(targets_of(node)[0])


def module_names(tree):
    """What a module defines, rather than imports."""
    assigned = (ast.walk(node) for node in tree.body if isinstance(node, ASSIGNMENT))
    names = (n for nodes in assigned for n in nodes if isinstance(n, ast.Name))
    defined = (n.name for n in tree.body if isinstance(n, FUNCTION | ast.ClassDef))
    return {*(n.id for n in names if isinstance(n.ctx, ast.Store)), *defined}


def imported(node):
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module} if isinstance(node, ast.ImportFrom) else set()


def memories(source):
    """Yields (place, kind) of all that may outlive the call that made it."""
    tree = ast.parse(source)
    yield from ((name, "container") for name in containers(tree))
    known = module_names(tree)
    for node, place, hidden in placed(tree):
        if imported(node) & MODULES:
            yield place, "import"
        if isinstance(node, ast.Global):
            yield place, "global"
        if changed(node) in known - hidden:
            yield place, "change"
        if isinstance(node, ast.Name) and node.id == "id" and "id" not in hidden:
            yield place, "identity"
        if name_of(node) in ("cache", "lru_cache") and not isinstance(node, ast.Call):
            yield place, "cache"


def test_no_call_remembers_another():
    found = {(p, kind) for p, source in SOURCES.items() for _, kind in memories(source)}
    assert len(SOURCES) > 100
    assert found == ALLOWED


SINS = {
    "import": "import weakref",
    "import ": "from contextvars import ContextVar",
    "container": "_KNOWN: dict[int, str] = {}",
    "container ": "_KNOWN = collections.OrderedDict()",
    "container  ": "class Run:\n    runs = []",
    "container   ": "_KNOWN = weakref.WeakKeyDictionary()",
    "global": "def fun():\n    global count\n    count = 1",
    "change": "_KNOWN = {1: 2}\ndef fun(x):\n    _KNOWN[x] = 3",
    "change ": "_KNOWN = [1]\ndef fun(x):\n    return lambda: _KNOWN.append(x)",
    "change  ": "def fun(x):\n    fun.last = x",
    "identity": "def fun(x):\n    return id(x)",
    "identity ": "def fun(x):\n    return set(map(id, x))",
    "cache": "@functools.lru_cache(8)\ndef fun(x):\n    return x",
    "cache ": "fun = functools.cache(abs)",
}


@pytest.mark.parametrize("kind", SINS)
def test_each_kind_of_memory_is_seen(kind):
    """Negative controls."""
    assert {found for _, found in memories(SINS[kind])} == {kind.strip()}


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {1: 2}\nNAMES = ('a', 'b')\n__all__ = ['fun']",
        "TABLE = {1: 2}\ndef fun(TABLE):\n    TABLE[1] = 3",
        "def fun(x):\n    known = {}\n    known[x] = 1\n    known.update(x)",
        "def fun(array):\n    return array.at[0].add(1), array.id",
        "class Run:\n    def __init__(self, x):\n        self.x = [x]",
        "def fun(tx, state):\n    return tx.update(state)",
    ],
)
def test_a_value_that_ends_with_a_call_is_no_memory(source):
    assert not list(memories(source))


def warned(sources):
    """How many calls of `warnings.warn` there are in each."""
    calls = collections.Counter()
    for path, source in sources.items():
        nodes = ast.walk(ast.parse(source))
        names = [name_of(node) for node in nodes if isinstance(node, ast.Call)]
        calls[path] = names.count("warn") + names.count("warn_explicit")
    return +calls


def test_at_most_five_places_warn():
    assert warned(SOURCES).total() <= 5
    # Negative control.
    assert warned({"a": "warnings.warn('x')", "b": "warn('y')"}).total() == 2
