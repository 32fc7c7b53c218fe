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
    monkeypatch.setenv("COLUMNS", "100")
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
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert pages - listed == {"index"}
