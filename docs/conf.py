"""The site: ``make site`` builds it from docs/, the examples' pages and the docstrings, without the network.

Sphinx reads the whole repository (``sphinx-build -c docs . build/site``), because pages link to examples, tests and the README.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

import importlib

import fabricamp

ROOT = Path(__file__).resolve().parents[1]

project = "fabricamp"
copyright = "the authors of fabricamp"  # noqa: A001 - Sphinx's name
version = release = fabricamp.__version__
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "examples/*.md",
    "examples/**/*.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
]
exclude_patterns = ["build", "dist", ".*", "tests", "fabricamp", "benchmarks", "tools", "**/__pycache__"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

smartquotes = False  # prose has code's quotes
myst_heading_anchors = 4  # GitHub's anchors, as the pages' links have them
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"fabricamp {version}"
html_theme_options = {"navigation_with_keys": True}
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["templates"]
html_show_sphinx = False
html_copy_source = False
html_permalinks_icon = "#"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "search_scores.js")

MOST_PARAMETERS = 8
"""The most parameters of a class whose signature stands before its text."""
OUT_OF_SEARCH = ["docs/reference", "docs/changes", "CHANGELOG"]
"""What changed, and the reference on one page, whose words the pages of the API have too."""
QUESTIONS = tomllib.loads((ROOT / "docs" / "questions.toml").read_text())["question"]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


class PublicNames(SphinxDirective):
    """``.. public-names:: module`` with names as its content: each by autodoc, under the path from which users import it."""

    required_arguments = 1
    has_content = True
    option_spec = {"inherited": directives.unchanged}  # noqa: RUF012 - docutils' face

    def run(self) -> list[nodes.Node]:
        """Returns what autodoc makes of the names."""
        module = self.arguments[0]
        lines: list[str] = []
        for name in " ".join(self.content).split():
            thing = getattr(importlib.import_module(module), name)
            is_class = inspect.isclass(thing) and thing.__name__ == name
            kind = "autoclass" if inspect.isclass(thing) else "autofunction" if callable(thing) else "autodata"
            lines.append(f".. {kind}:: {module}.{name}")
            if is_class and not issubclass(thing, BaseException):
                lines.append("   :members:")
                if "inherited" in self.options:
                    lines.append(f"   :inherited-members: {self.options['inherited']}")
            lines.append("")
        section = nodes.section()
        section.document = self.state.document
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, section)
        return section.children


def with_import(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Puts the line that imports a public name below the first sentence of its text, and a long signature to its end."""
    module, _, own = name.rpartition(".")
    if what not in ("class", "exception", "function") or own[0] == "_":
        return
    first = next((number for number, line in enumerate(lines) if not line.strip()), len(lines))
    lines[first:first] = ["", f"``from {module} import {own}``", ""]
    if is_long(thing):
        lines += ["", ".. code-block:: python", "", *(f"   {line}" for line in signature_in_lines(own, thing)), ""]


def without_long_signature(
    _app: Sphinx, what: str, _name: str, thing: Any, *_options_and_signature: Any
) -> tuple[str, None] | None:
    """Shortens a signature that would fill the screen before the first sentence; :func:`with_import` shows it."""
    return ("(...)", None) if what == "class" and is_long(thing) else None


def is_long(thing: Any) -> bool:
    """Returns whether the signature of a class has more parameters than a reader takes in at a glance."""
    return inspect.isclass(thing) and len(parameters_of(thing)) > MOST_PARAMETERS


def parameters_of(thing: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a class; none if it has no signature."""
    try:
        return list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):
        return []


def signature_in_lines(name: str, thing: Any) -> list[str]:
    """Returns the call of a class with a line for each parameter."""
    lines: list[str] = []
    for one in parameters_of(thing):
        if one.kind is one.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            lines.append(f"    {one.name}," if one.default is one.empty else f"    {one.name}={one.default!r},")
    return [f"{name}(", *lines, ")"]


def words_asked(docname: str) -> list[str]:
    """Returns the words of the questions that the page answers.

    The search finds only pages that have every word of what is typed; as keywords of the page these are among its words.
    """
    questions = [question["asks"] for question in QUESTIONS if f"docs/{question['at'].split('.md')[0]}" == docname]
    return sorted({word.lower() for question in questions for word in re.findall(r"\w+", question)})


def prepared(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001
    """Turns links to what the site lacks into their text; tells the search what to find, and what not."""
    folder = (ROOT / docname).parent

    def without_folder(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        # A page that is written for the repository; other files there become downloads.
        is_page_outside = target.suffix == ".md" and target.is_relative_to(ROOT / "benchmarks")
        return found[1] if target.is_dir() or is_page_outside else found[0]

    source[0] = LINK.sub(without_folder, source[0])
    asked = words_asked(docname)
    if docname in OUT_OF_SEARCH:
        source[0] = "---\nnosearch: true\n---\n\n" + source[0]
    elif asked:
        keywords = ", ".join(asked)
        source[0] = f'---\nmyst:\n  html_meta:\n    keywords: "{keywords}"\n---\n\n{source[0]}'


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive and the changes of texts."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", with_import, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", without_long_signature)
    app.connect("source-read", prepared)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
