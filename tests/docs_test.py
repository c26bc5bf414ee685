"""The site has a page for every public name, and loads nothing from other hosts."""

import ast
import functools
import inspect
import pathlib
import re
import sys

import pytest

import dpadambc
from dpadambc import training
from tests import api_test

FOLDER = pathlib.Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def extensions(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER / "_ext"), *sys.path])


def test_every_public_object_has_one_page():
    """By the names that the tests of the API find, in another way."""
    import public
    import reference

    pages = reference.pages()
    assert api_test.objects().keys() <= public.full_names() <= pages.keys()


def test_a_name_without_a_page_is_found():
    import public
    import reference

    documented = public.full_names()
    assert not reference.missing(documented)
    without = documented - {"dpadambc.clip_per_example"}
    assert reference.missing(without) == ["dpadambc.clip_per_example"]


def test_the_table_of_samplings_has_every_mechanism_and_what_it_accepts():
    import copies

    rows = dict(copies._mechanisms())
    public = {
        value
        for name, value in api_test.objects().items()
        if isinstance(value, type)
        and issubclass(value, dpadambc.Mechanism)
        and value is not dpadambc.Mechanism
        and ".contrib." not in name
    }
    assert set(rows.values()) == public
    (row,) = (
        line
        for line in copies.sampling_matrix().splitlines()
        if line.startswith("| [`PoissonGaussian`]")
    )
    relations = [relation.name for relation in dpadambc.NeighboringRelation]
    accountants = dict(zip(relations, row.split(" | ")[1:], strict=True))
    assert accountants["REPLACE_ONE"].strip(" |") == "PLD"  # and no Rényi bound
    assert accountants["ADD_OR_REMOVE_ONE"].strip(" |") == "PLD, RDP"


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example.org/x.css">',
        '<img src="http://example.org/x.png">',
        '<p style="background: url(https://example.org/x.png)">',
        "<style>@import 'https://example.org/x.css';</style>",
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(text):
    import offline

    assert offline.loaded_from_elsewhere(text)


def test_links_and_own_files_are_no_resources_of_others():
    import offline

    text = '<a href="https://example.org">x</a><img src="_images/x.png">'
    assert not offline.loaded_from_elsewhere(text)
    assert offline.loaded_from_elsewhere("a { b: url(//example.org/c) }", ".css")


# Written when the site is built.
GENERATED = {"benchmarks", "notebooks", "api", "_generated", "_build"}


def pages():
    """What a reader of the repository reads."""
    found = [
        path
        for path in FOLDER.rglob("*.md")
        if path.relative_to(FOLDER).parts[0] not in GENERATED
    ]
    root = FOLDER.parent
    return [*found, *root.glob("*.md"), *(root / "benchmarks").rglob("README.md")]


def test_links_lead_to_files_of_the_repository():
    """And so not to what is there once the site was built."""
    checked = 0
    for page in pages():
        for target in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", page.read_text()):
            file = (page.parent / target).resolve()
            checked += 1
            assert file.exists(), (page, target)
            if file.is_relative_to(FOLDER):
                assert file.relative_to(FOLDER).parts[0] not in GENERATED, page
    assert checked > 100


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def comparison(page):
    """The table against other libraries, without the addresses of its links."""
    (table,) = re.findall(r"^\| \| dpadambc \|(?:.*\n)+?\n", page.read_text(), re.M)
    return re.sub(r"\]\([^)]*\)", "]", table)


def test_the_first_screens_run_as_they_are_pasted(capsys):
    """Their examples have no prompts, and each goes on where the last one ended."""
    assert blocks(FOLDER / "index.md") == blocks(FOLDER.parent / "README.md")
    assert comparison(FOLDER / "index.md") == comparison(FOLDER.parent / "README.md")
    names = {}
    for block in blocks(FOLDER / "index.md"):
        assert ">>>" not in block
        exec(block, names)
    found = re.findall(r"accuracy (.*) at epsilon (.*)", capsys.readouterr().out)
    assert len(found) == 2
    for accuracy, epsilon in found:
        assert float(accuracy) > 0.75 and epsilon == "3.00"


OBJECTS = {x.removeprefix("dpadambc."): y for x, y in api_test.objects().items()}
# What prose calls by these names, and all of its attributes.
CALLED = {
    "mechanism": {x for kind in OBJECTS.values() for x in dir(kind)},
    "batch": {*dir(dpadambc.Batch), *dpadambc.Batch.__annotations__},
    "result": {*dir(training.Result), *training.Result.__annotations__},
    "grad_fn": dir(dpadambc.clipped_grad(abs, l2_clip_norm=1.0, normalize_by=1)),
}


def mistake(code):
    """Why a piece of code in prose is none of this library, if it says that it is."""
    name = re.match(r"(?:dpadambc\.)?([\w.]*)", code)[1]
    first, _, attribute = name.partition(".")
    if first in CALLED and attribute:
        found = attribute.split(".")[0] in CALLED[first]
        return None if found else f"no {name}"
    if name not in OBJECTS:
        is_part = attribute not in ("", "py") and hasattr(dpadambc, first)
        is_own = is_part or code.startswith("dpadambc.")
        try:
            functools.reduce(getattr, name.split("."), dpadambc)
        except AttributeError:
            return f"no {name}" if is_own else None
        return None
    try:
        call = ast.parse(code, mode="eval").body
        known = inspect.signature(OBJECTS[name]).parameters.values()
    except (SyntaxError, TypeError, ValueError):
        return None
    if not isinstance(call, ast.Call) or any(x.kind == x.VAR_KEYWORD for x in known):
        return None
    given = {keyword.arg for keyword in call.keywords}
    wrong = given - {x.name for x in known}
    is_needed = lambda x: x.default is x.empty and x.kind != x.VAR_POSITIONAL
    lacks = not given and not call.args and any(map(is_needed, known))
    return f"no {name}({wrong or ''})" if wrong or lacks else None


def test_names_in_prose_are_those_of_the_package():
    """The changelog has old ones too."""
    checked = []
    for page in (page for page in pages() if page.name != "CHANGELOG.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for code in re.findall(r"`([^`\n]+)`", text):
            checked.append(code)
            assert mistake(code) is None, (page, code, mistake(code))
    assert len(checked) > 1_000


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("training.fit", "training.fits"),
        ("mechanism.batches", "mechanism.batch_iterator"),
        ("batch.gather(x)", "batch.take(x)"),
        ("grad_fn(params, x)", "grad_fn.sensitivity(relation)"),
        ("contrib.QuantileClipping(mechanism)", "contrib.QuantileClipping()"),
        ("add_dp_noise(mechanism, key=key)", "add_dp_noise(mechanism, seed=0)"),
        ("jax.random.key", "dpadambc.accounting.eps"),
    ],
)
def test_names_that_are_not_there_are_found(right, wrong):
    assert mistake(right) is None
    assert mistake(wrong)


@pytest.mark.parametrize(
    ("page", "in_the_repository", "on_the_site"),
    [
        ("faq", "../benchmarks/audit/README.md#x", "benchmarks/audit.md#x"),
        ("guides/runs", "../../benchmarks/README.md", "../benchmarks/index.md"),
        ("guides/runs", "../../notebooks/2_bias.ipynb", "../notebooks/2_bias.ipynb"),
        ("faq", "guides/audit.md", "guides/audit.md"),
        ("faq", "../benchmarks/run.py", "../benchmarks/run.py"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(page, in_the_repository, on_the_site):
    import copies

    source = [f"[x]({in_the_repository})"]
    copies._lead_to_pages(None, page, source)
    assert source == [f"[x]({on_the_site})"]


def test_links_of_a_copy_lead_to_where_they_led():
    import copies

    source = copies.BENCHMARKS / "language/smollm/README.md"
    page = copies.page_of(source)
    assert page == copies.DOCS / "benchmarks/language/smollm.md"
    found = copies.led_to_pages("[a](../README.md#x) [b](e2e.jsonl)", source, page)
    assert found == (
        "[a](../language.md#x) [b](../../../benchmarks/language/smollm/e2e.jsonl)"
    )
