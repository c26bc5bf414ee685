"""Pages made of what stands elsewhere: notebooks, benchmarks, and a table of the code.

They are written when the site is built, so that none of them can be out of date.
"""

import importlib
import pathlib
import re

import public

import dpadambc

ROOT = pathlib.Path(__file__).parents[2]
# An address inside the repository, after `](`.
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
# Of what is copied, from a page in `docs`, with what leads out of its folder there.
_COPIED = re.compile(r"\]\(((?:\.\./)*)\.\./(benchmarks/README|notebooks/)")


def _mechanisms():
    """Every public mechanism, by the name of its page."""
    for full in sorted(public.full_names()):
        module, _, name = full.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if isinstance(kind, type) and issubclass(kind, dpadambc.Mechanism):
            if kind is not dpadambc.Mechanism and ".contrib." not in full:
                yield full, kind


def sampling_matrix():
    """The accountants for each mechanism under each neighboring relation."""
    relations = list(dpadambc.NeighboringRelation)
    heads = ["mechanism", *(f"`{relation.name}`" for relation in relations)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for full, kind in _mechanisms():
        accountants = [kind.relations.get(relation, ()) for relation in relations]
        link = f"[`{full.removeprefix('dpadambc.')}`](#{full})"
        cells = [", ".join(x.name.upper() for x in each) or "–" for each in accountants]
        lines.append(f"| {link} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def benchmarks():
    """The page of the experiments, with addresses from where the site has it."""

    def moved(match):
        address = match[1]
        if address.startswith("../notebooks/"):
            return f"]({address.removeprefix('../')})"
        return f"](../benchmarks/{address})"

    return _RELATIVE.sub(moved, (ROOT / "benchmarks/README.md").read_text())


def _write(app):
    source = pathlib.Path(app.srcdir)
    texts = {
        "_generated/sampling.md": sampling_matrix(),
        "benchmarks.md": benchmarks(),
    }
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        texts[f"notebooks/{path.name}"] = path.read_text()
    for name, text in texts.items():
        path = source / name
        path.parent.mkdir(exist_ok=True)
        # An unchanged file keeps its time, and its page is not built again.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _lead_to_copies(app, docname, source):
    """Addresses that hold in the repository, for a reader there, are of copies here."""
    names = {"benchmarks/README": "benchmarks"}
    moved = lambda match: f"]({match[1]}{names.get(match[2], match[2])}"
    source[0] = _COPIED.sub(moved, source[0])


def setup(app):
    """Sphinx calls this."""
    app.connect("source-read", _lead_to_copies)
    app.connect("builder-inited", _write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
