"""Formulas as MathML, which browsers draw by themselves: no script and no font.

Docutils translates LaTeX to MathML. What it cannot translate is a warning, which ends
the build.
"""

import re

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)
# What the docstrings have and docutils does not know, by what it knows.
_SYNONYMS = (
    (r"\\dots\b", r"\\ldots"),
    (r"\\[bB]igg?l?(?=[(\[])", r"\\left"),
    (r"\\[bB]igg?r?(?=[)\]])", r"\\right"),
    (r"\\[bB]igg?(?=\|)", ""),
    # An index of an accented letter would come to stand below it.
    (
        r"(\\(?:hat|tilde|bar)\s*(?:\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]))\s*(?=[_^])",
        r"\1{}",
    ),
)


def _translated(node, inline):
    tex = node.astext().strip()
    for unknown, known in _SYNONYMS:
        tex = re.sub(unknown, known, tex)
    if not inline and "\\begin{" not in tex and ("\\\\" in tex or "&" in tex):
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    try:
        return latex2mathml.tex2mathml(tex, as_block=not inline)
    except Exception as error:
        _LOGGER.warning("No MathML for %r: %s", tex, error, location=node)
        return f"<code>{node.astext()}</code>"


def _inline(self, node):
    self.body.append(f'<span class="math">{_translated(node, inline=True)}</span>')
    raise nodes.SkipNode


def _display(self, node):
    self.body.append(f'<div class="math">{_translated(node, inline=False)}</div>')
    raise nodes.SkipNode


def setup(app):
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
