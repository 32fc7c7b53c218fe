"""The site: it builds without a warning, and what its pages name exists."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.shared import once, shared_folder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC = [
    "fabricamp",
    "fabricamp.callbacks",
    "fabricamp.loggers",
    "fabricamp.strategies",
    "fabricamp.optimizers",
    "fabricamp.nn",
    "fabricamp.tuner",
    "fabricamp.profilers",
    "fabricamp.plugins.io",
]
"""What users import from; ``fabricamp.data`` and ``fabricamp.ops`` also export to other parts of the package."""
INSIDE = {"strategy_from", "profiler_from"}
"""Functions of these that the package's own parts call."""


def script(name, folder=DOCS):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented():
    """The objects that the pages of the API document, by the path that a page shows."""
    found = {}
    for page in (DOCS / "api").glob("*.md"):
        for module, names in re.findall(
            r"^\.\. public-names:: (\S+)\n(?:   :\S+: \S+\n)?\n((?:   \w+\n)+)", page.read_text(), re.MULTILINE
        ):
            for name in names.split():
                found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


FOUND_FIRST = {
    "SIGHUP": "how-to/resume",
    "gather predictions": "how-to/predictions",
    "length of a stream": "how-to/streams",
    "consolidate FSDP weights": "how-to/checkpoints",
    "Skipping step": "how-to/nan",
    "logger=False": "how-to/silence",
}
"""Queries of readers who found nothing, and the page that has to be among the first four of the search."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns the exit code and the errors of a build, and the folder of the search's scripts; built once for all workers."""
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    folder = shared_folder(tmp_path_factory, "site")
    extensions = ",".join([*script("conf").extensions, "tests.site.search_index"])
    options = ["-W", "--keep-going", "-q", "-b", "searchindex", "-D", f"extensions={extensions}", "-c", DOCS]
    command = ["-m", "sphinx", *options, "-d", folder / "read", ROOT, folder / "out"]

    def build():
        # Forked, because autodoc needs torch and nearly all of the package imported.
        process = start_forked(ROOT, *map(str, command), CUDA_VISIBLE_DEVICES="", no_proxy="*")
        code, _, errors = finish(process, 290)
        return code, errors

    return (*once(folder, build), folder / "out")


def test_it_builds_without_a_warning(built):
    code, errors, _ = built
    assert code == 0, errors


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_search_leads_from_words_of_readers_to_the_page(built):
    *_, folder = built
    command = ["node", Path(__file__).with_name("search.js"), folder, *FOUND_FIRST]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    first = {query: pages[:4] for query, pages in zip(FOUND_FIRST, found, strict=True)}
    assert {query: pages for query, pages in first.items() if f"docs/{FOUND_FIRST[query]}" not in pages} == {}


def test_every_public_name_has_its_place_among_the_pages_of_the_api():
    have = list(documented().values())
    lost = []
    for module in PUBLIC:
        exported = importlib.import_module(module)
        for name in exported.__all__:
            thing = getattr(exported, name)
            if (inspect.isclass(thing) or inspect.isroutine(thing)) and name not in INSIDE and thing not in have:
                lost.append(f"{module}.{name}")
    assert lost == []


def test_names_that_pages_import_from_are_documented_from_there():
    """What the how-to pages import stands among the pages of the API, under that path or in the package itself."""
    paths = {*documented(), *(f"fabricamp.{name}" for name in importlib.import_module("fabricamp").__all__)}
    used = set()
    for page in [*DOCS.glob("how-to/*.md"), *DOCS.glob("guides/*.md"), DOCS / "tutorial.md"]:
        for module, names in re.findall(r"^from (fabricamp[.\w]*) import ([^#\n(]+)", page.read_text(), re.MULTILINE):
            used |= {f"{module}.{name.strip()}" for name in names.split(",") if not module.startswith("fabricamp.apex")}
    assert sorted(used - paths) == []


def test_every_question_is_asked_somewhere_and_has_an_answer():
    questions = tomllib.loads((DOCS / "questions.toml").read_text())["question"]
    assert len(questions) == len({question["asks"] for question in questions}) == 60
    assert [question["asks"] for question in questions if not question["source"].startswith("https://")] == []
    # The link itself is followed by test_links_lead_somewhere of test_readme.py.
    assert (DOCS / "questions.md").read_text() == script("render_questions").render(), (
        "questions have changed: make docs"
    )


def test_the_search_knows_the_words_of_questions_and_leaves_changes_out():
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    conf = script("conf")
    sources = {
        "docs/how-to/testing": ["# Test"],
        "docs/changes": ["# Changes"],
        "docs/architecture": ["# Architecture"],
    }
    for page, source in sources.items():
        conf.prepared(None, page, source)
    (asked,), (changes,), (neither,) = sources.values()
    keywords = re.search(r'^    keywords: "(.*)"$', asked, re.MULTILINE)[1].split(", ")
    assert {"overfit", "batches", "ci", "quickly"} <= set(keywords)
    assert changes.startswith("---\nnosearch: true\n---\n")
    assert neither == "# Architecture"


def test_the_commands_are_those_of_their_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "88")
    words = [
        " ".join(page.split()) for page in ((DOCS / "commands.md").read_text(), script("render_commands").render())
    ]
    assert words[0] == words[1], "help has changed: make docs"


def test_the_charts_are_those_of_the_results():
    charts = importlib.import_module("benchmarks.draw_charts")
    page = (DOCS / "charts.md").read_text()
    revisions = re.findall(r"revision (\w{9}) \(\[result\]\(\.\./benchmarks/results/([\w-]+)\.json\)", page)
    assert page == charts.page({result: revision for revision, result in revisions}), "results have changed: make docs"
    for chart in charts.charts():
        picture = (DOCS / "charts" / f"{chart.name}.svg").read_text()
        assert picture == charts.draw(chart), "results have changed: make docs"
        assert len(chart.bars) >= 2


def test_every_page_can_be_reached():
    """Each page of docs/ stands in the table of contents of the index."""
    listed = {page for page, _ in entries()}
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert pages - listed == {"index"}


def entries():
    """Returns the pages of the table of contents, in order, each with its title there, or None for its own heading."""
    trees = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    found = [re.fullmatch(r"(?:(.+) <)?([^<>]+?)>?", line) for line in lines]
    return [(one[2], one[1]) for one in found]


def test_every_entry_of_the_contents_is_there_once():
    pages = [page for page, _ in entries()]
    assert len(pages) == len(set(pages))
    titles = [title or heading(DOCS / f"{page}.md") for page, title in entries() if "*" not in page]
    assert len(titles) == len({title.lower() for title in titles}), titles


def heading(page):
    return re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)[1]


def test_the_front_page_has_how_to_install_code_and_one_picture():
    front = (DOCS / "index.md").read_text().split("\n| ")[0]
    assert "pip install ." in front
    (code,) = re.findall(r"```python\n(.*?)```", front, re.DOTALL)
    assert 8 <= len([line for line in code.splitlines() if line]) <= 14
    assert front.count("![") == 1


WIDTH = 88


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tutorial.md"])
def test_code_fits_into_its_column(page):
    """What the site shows without a bar to scroll: the comments at the right edge are what explains."""
    blocks = re.findall(r"^```(?:python|bash|diff)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > WIDTH] == []


def test_a_class_of_the_api_begins_with_its_sentence():
    for package in ("sphinx", "myst_parser"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    import fabricamp

    conf = script("conf")
    for thing in (fabricamp.Trainer, fabricamp.CudaGraph):
        lines = inspect.getdoc(thing).splitlines()
        sentence = lines[0]
        conf.with_import(None, "class", f"fabricamp.{thing.__name__}", thing, None, lines)
        assert lines[0] == sentence
        assert lines.index(f"``from fabricamp import {thing.__name__}``") < 6
        is_long = thing is fabricamp.Trainer
        assert ("   Trainer(" in lines[-60:]) == is_long
        shown = conf.without_long_signature(None, "class", "", thing, None, "(a, b)", None)
        assert shown == (("(...)", None) if is_long else None)


SPHINX = """#!/bin/sh
# Stands for Sphinx: writes pages into the last folder that is named, or leaves in the middle.
for folder; do :; done
mkdir -p "$folder" && echo "$1" > "$folder/first.html"
test -e interrupt && exit 1
echo whole > "$folder/index.html"
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_an_interrupted_build_leaves_the_site_and_does_not_spoil_the_next(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in (".torch", ".installed"):
        (tmp_path / ".venv" / name).touch()
    (binaries / "sphinx-build").write_text(SPHINX)
    (binaries / "sphinx-build").chmod(0o755)

    def make():
        return subprocess.run(["make", "site"], cwd=tmp_path, capture_output=True, check=False).returncode

    site = tmp_path / "build" / "site"
    (tmp_path / "interrupt").touch()
    assert make() != 0
    assert not site.exists()
    (tmp_path / "interrupt").unlink()
    assert make() == 0
    assert (site / "index.html").read_text() == "whole\n"
    (tmp_path / "interrupt").touch()
    assert make() != 0
    assert (site / "index.html").exists()
    (tmp_path / "interrupt").unlink()
    assert make() == 0
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["site"]
