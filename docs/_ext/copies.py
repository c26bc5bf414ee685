"""Pages made of what stands elsewhere: notebooks, benchmarks, and a table of the code.

They are written when the site is built, so that none of them can be out of date.
"""

import importlib
import os
import pathlib
import re

import public

import dpadambc

ROOT = pathlib.Path(__file__).parents[2]
DOCS, BENCHMARKS = ROOT / "docs", ROOT / "benchmarks"
# An address inside the repository, after `](`.
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")


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


def page_of(file):
    """Where the site has a file of the repository."""
    folder = file.parent
    if folder == ROOT / "notebooks":
        return DOCS / "notebooks" / file.name
    if file.name == "README.md" and folder.is_relative_to(BENCHMARKS):
        name = "index" if folder == BENCHMARKS else folder.relative_to(BENCHMARKS)
        return DOCS / "benchmarks" / f"{name}.md"
    return file


def led_to_pages(text, source, page):
    """The text of a file as that of a page: each address is of the same file still."""

    def moved(match):
        target = page_of((source.parent / match[1]).resolve())
        return f"]({os.path.relpath(target, page.parent)}"

    return _RELATIVE.sub(moved, text)


def _copied():
    """The files that are pages of the site, each with its page."""
    files = [*BENCHMARKS.rglob("README.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    return {file: page_of(file) for file in sorted(files)}


def _studies():
    """The pages of the benchmarks, but for the first."""
    pages = map(page_of, sorted(BENCHMARKS.glob("*/**/README.md")))
    return [page.with_suffix("") for page in pages]


def _write(app):
    texts = {DOCS / "_generated/sampling.md": sampling_matrix()}
    for file, page in _copied().items():
        texts[page] = led_to_pages(file.read_text(), file, page)
    names = [str(page.relative_to(DOCS / "benchmarks")) for page in _studies()]
    tree = ["```{toctree}", ":hidden:", "", *names, "```"]
    texts[page_of(BENCHMARKS / "README.md")] += "\n".join(["", *tree, ""])
    for page, text in texts.items():
        page.parent.mkdir(exist_ok=True, parents=True)
        # An unchanged file keeps its time, and its page is not built again.
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _lead_to_pages(app, docname, source):
    """Addresses that hold in the repository, for a reader there, are of pages here."""
    page = DOCS / f"{docname}.md"
    if page not in _copied().values():
        source[0] = led_to_pages(source[0], page, page)


def setup(app):
    """Sphinx calls this."""
    app.connect("source-read", _lead_to_pages)
    app.connect("builder-inited", _write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
