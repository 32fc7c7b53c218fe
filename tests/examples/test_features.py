"""docs/features.md: every row has an answer, each "yes" names an existing test, and the lists of Lightning's names are complete."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import fabricamp
from tests.examples.test_readme import ROOT

PAGE = ROOT / "docs" / "features.md"
_LINK = re.compile(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)")
_NAME = re.compile(r"`(\w+)`")


def rows():
    """Yields (section, cells) of every table row."""
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and cells[-1] != "tested by" and not set(line) <= set("|- "):
            yield section, cells


@functools.cache
def written_in(path):
    """Returns the functions in a test file, each with its decorators except ``parametrize``."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        one.name: [mark for mark in map(ast.unparse, one.decorator_list) if ".parametrize(" not in mark]
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef)
    }


def runs_everywhere(name, path):
    """Returns whether a test runs in the short version and without a GPU."""
    marks = written_in(path).get(name, ["gone"])
    return "/gpu/" not in path and not any(re.search(r"gpu|slow|gone", mark) for mark in marks)


def test_every_row_has_an_answer_and_its_tests_are_there():
    found = list(rows())
    assert len(found) > 100
    gone = []
    for _, cells in found:
        assert len(cells) == 3, cells
        what, answer, tested = cells
        assert re.match(r"yes\b|(part|no): \w", answer.replace("`", "")), what
        links = _LINK.findall(tested)
        assert any(runs_everywhere(*one) for one in links) or answer.startswith("no"), what
        assert _LINK.sub("", tested).strip(", ") == "", what
        gone += [f"{path} has no {name}" for name, path in links if name not in written_in(path)]
    assert not gone
    assert len({cells[0] for _, cells in found}) == len(found)


def answers(*sections):
    """Returns the first word of each answer, keyed by the names in its row."""
    return {
        name: cells[1].partition(":")[0].partition(",")[0]
        for section, cells in rows()
        if section in sections
        for name in _NAME.findall(cells[0])
    }


def test_all_that_lightning_has_is_answered_and_the_answer_is_true():
    """Reads the names from Lightning's files, because importing Lightning takes seconds."""
    spec = importlib.util.find_spec("lightning")
    if spec is None:
        pytest.skip("needs the package lightning")
    there = Path(spec.submodule_search_locations[0]) / "pytorch"
    classes = answers("Lightning's callbacks", "Lightning's loggers, profilers, strategies")
    for home in ("callbacks", "loggers", "profilers", "strategies"):
        for name in public_names(there / home / "__init__.py"):
            assert (classes[name] == "yes") == hasattr(getattr(fabricamp, home), name), name
    arguments = answers("Lightning's arguments of the Trainer")
    ours = inspect.signature(fabricamp.Trainer.__init__).parameters
    for name in arguments_of_trainer(there / "trainer" / "trainer.py"):
        assert (arguments[name] == "yes") == (name in ours), name


def public_names(file):
    """Returns the names in ``__all__``."""
    (names,) = [
        one.value
        for one in ast.parse(file.read_text()).body
        if isinstance(one, ast.Assign) and one.targets[0].id == "__all__"
    ]
    return ast.literal_eval(names)


def arguments_of_trainer(file):
    (kind,) = [one for one in ast.parse(file.read_text()).body if getattr(one, "name", "") == "Trainer"]
    (init,) = [one for one in kind.body if getattr(one, "name", "") == "__init__"]
    names = [one.arg for one in init.args.kwonlyargs]
    assert len(names) > 40
    return names
