"""The API reference: a page for each public name, written when the site is built.

A public name without a page ends the build.
"""

import importlib
import inspect
import pathlib
import re

import public

FOLDER = "api"
# What has no docstring of this library.
OWN_WORDS = {
    "dpadambc.NeighboringRelation": (
        "The difference of two neighboring data sets, which epsilon protects;"
        " dp-accounting's enumeration. ``ADD_OR_REMOVE_ONE``: one has an example more."
        " ``REPLACE_ONE``: an example of one is another in the other, which changes a"
        " clipped sum by up to twice the clip norm. ``REPLACE_SPECIAL``: an example of"
        " one is a null example in the other, whose gradient is zero."
    ),
    "dpadambc.audit.CHECKS": "The names of the checks that `run` can make, in order.",
    "dpadambc.accounting.PLD": "Privacy loss distributions: tight.",
    "dpadambc.accounting.RDP": "Rényi divergences: an upper bound, and faster.",
}
# Of classes of others, and of what every mechanism has: these stand in one place.
NOT_INHERITED = (
    "Mechanism",
    "Trials",
    "PrivacyAccountant",
    "DpEvent",
    "NamedTuple",
    "tuple",
    "str",
    "Enum",
    "Exception",
)


def _title(text):
    return f"{text}\n{'=' * len(text)}\n"


def _public_base(kind):
    """The nearest public class of this library that a class is made of, if any."""
    for base in kind.__mro__[1:]:
        for full in sorted(public.full_names()):
            if full.rpartition(".")[2] == base.__name__ and _named(full) is base:
                return full
    return None


def _named(full):
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _object_page(module, name):
    value = getattr(importlib.import_module(module), name)
    if text := OWN_WORDS.get(f"{module}.{name}"):
        kind = "class" if inspect.isclass(value) else "data"
        directive = f".. py:{kind}:: {name}\n\n   {text}\n"
    elif inspect.isclass(value):
        directive = (
            f".. autoclass:: {name}\n   :members:\n"
            f"   :inherited-members: {', '.join(NOT_INHERITED)}\n"
        )
        if _public_base(value):
            directive += "   :show-inheritance:\n"
    else:
        directive = f".. autofunction:: {name}\n"
    return f"{_title(name)}\n.. currentmodule:: {module}\n\n{directive}"


def _summary(module, name):
    text = OWN_WORDS.get(f"{module}.{name}")
    if text is None:
        text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    return re.split(r"(?<=\.)\s|\n\n", text)[0].replace("\n", " ")


def _table(full_names):
    """Rows of public names, each with the first sentence of its docstring."""
    lines = [".. list-table::\n   :widths: 35 65\n   :class: summary\n"]
    for full in full_names:
        module, _, name = full.rpartition(".")
        lines += [
            f"   * - :py:obj:`~{full}`",
            f"     - {_summary(module, name)}",
        ]
    return lines


def _module_page(module, names, parts):
    lines = [_title(module), f".. automodule:: {module}\n   :no-members:\n"]
    if names:
        lines += _table(f"{module}.{name}" for name in names)
    pages = [f"{module}.{name}" for name in names] + parts
    if parts:
        lines += ["\n.. rubric:: Modules\n"]
        lines += [f"* :doc:`{part}`" for part in parts]
    if pages:
        lines += ["\n.. toctree::\n   :hidden:\n"]
        lines += [f"   {_label(page)} <{page}>" for page in pages]
    return "\n".join(lines) + "\n"


def _label(page):
    return page.rpartition(".")[2]


# The modules of each group of names; a function in no other group is of the chain.
GROUPS = {
    "Train": ("training", "diagnostics", "audit", "cli"),
    "Chain": ("clipping",),
    "Mechanisms": ("graphs", "contrib"),
    "Accounting": ("accounting",),
    "Types": (),
}
_FUNCTIONS = {"recipe": "Train", "explain": "Train", "sensitivity": "Accounting"}


def _group(full):
    """The group of a public name of the package itself."""
    value = _named(full)
    if inspect.isclass(value):
        is_mechanism = issubclass(value, _named("dpadambc.Mechanism"))
        return "Mechanisms" if is_mechanism else "Types"
    return _FUNCTIONS.get(full.rpartition(".")[2], "Chain")


def _top_page(homes):
    packages = [m for m in homes if m.count(".") == 1]
    names = [f"{public.PACKAGE}.{name}" for name in homes[public.PACKAGE]]
    grouped = {public.PACKAGE + "." + x for group in GROUPS.values() for x in group}
    assert grouped == set(packages), grouped ^ set(packages)
    lines = [
        _title("API reference"),
        "Every public name, with its formula, its guarantees and examples that the"
        " tests run.\n",
    ]
    for group, modules in GROUPS.items():
        lines += [f"\n.. rubric:: {group}\n"]
        lines += _table(name for name in names if _group(name) == group)
        for package in (f"{public.PACKAGE}.{module}" for module in modules):
            summary = (importlib.import_module(package).__doc__ or "").split("\n")[0]
            lines += [f"   * - :doc:`{package}`", f"     - {summary}"]
    lines += ["\n.. toctree::\n   :hidden:\n"]
    lines += [f"   {_label(page)} <{page}>" for page in [*names, *packages]]
    return "\n".join(lines) + "\n"


def pages():
    """The text of each page, by its name."""
    homes = public.homes()
    written = {"index": _top_page(homes)}
    for module, names in homes.items():
        if module != public.PACKAGE:
            parts = [m for m in homes if m.rpartition(".")[0] == module]
            written[module] = _module_page(module, names, parts)
        for name in names:
            written[f"{module}.{name}"] = _object_page(module, name)
    return written


def _write(app):
    folder = pathlib.Path(app.srcdir, FOLDER)
    folder.mkdir(exist_ok=True)
    texts = {f"{page}.rst": text for page, text in pages().items()}
    for old in folder.iterdir():
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        path = folder / name
        # An unchanged file keeps its time, and its page is not built again.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def missing(documented):
    """Public names that are not among the documented ones."""
    return sorted(public.full_names() - set(documented))


def _check_coverage(app, env):
    documented = set(env.get_domain("py").objects)
    if absent := missing(documented):
        from sphinx.errors import ExtensionError

        raise ExtensionError(
            f"Expected a page for every public name, got none for {', '.join(absent)}."
        )


def _resolve(app, env, node, contnode):
    """Links `dp_sgd`, `accounting.epsilon` and the place where a class is defined."""
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    names, last = app.dpadambc_names, target.rpartition(".")[2]
    looks_public = target.startswith("dpadambc") or last != last.lower() or "_" in last
    found = {target, f"{public.PACKAGE}.{target}"} & names
    if not found and "." in target:
        found = {name for name in names if name.rpartition(".")[2] == last}
    if not looks_public or len(found) != 1 or target in found:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", *found, node, contnode
    )


def _skip(app, what, name, value, skip, options):
    """Fields of named tuples: the docstring of the class says what they are."""
    if (inspect.getdoc(value) or "").startswith("Alias for field number"):
        return True
    return None


def _public_bases(app, name, value, options, bases):
    """Private bases give way to the public one that they are made of."""
    bases[:] = [f":py:obj:`{_public_base(value)}`"]


def _type_names():
    """What unions of JAX and Optax are written as, and their names; long ones first."""
    import jax
    import optax
    from sphinx.util.typing import stringify_annotation

    named = {
        "ArrayLike": jax.typing.ArrayLike,
        "ArrayTree": optax.Params,
        "DTypeLike": jax.typing.DTypeLike,
        "ScalarOrSchedule": optax.ScalarOrSchedule,
        "Schedule": optax.Schedule,
    }
    written = {stringify_annotation(v, "smart"): name for name, v in named.items()}
    return sorted(written.items(), key=lambda pair: -len(pair[0]))


def _name_types(app, what, name, value, options, arguments, returned):
    texts = [arguments, returned]
    for written, short in _type_names():
        texts = [text and text.replace(written, short) for text in texts]
    return tuple(texts)


def setup(app):
    """Sphinx calls this."""
    app.dpadambc_names = public.full_names()
    app.connect("builder-inited", _write, priority=100)
    app.connect("env-check-consistency", _check_coverage)
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-bases", _public_bases)
    app.connect("autodoc-process-signature", _name_types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
