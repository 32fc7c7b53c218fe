"""Parts of the suite that have their own goals: all exist, and CI makes those whose inputs have changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import parts

ROOT = Path(__file__).parents[1]


def test_every_path_exists_and_every_part_is_a_goal():
    paths = [path for part in parts.PARTS.values() for path in (*part.tests, *part.inputs)]
    assert [path for path in (*paths, *parts.FOR_ALL) if not (ROOT / path).exists()] == []
    tests = [path for part in parts.PARTS.values() for path in part.tests]
    assert len(tests) == len(set(tests))  # no test is made twice
    goals = re.findall(r"^(\w+): ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in parts.PARTS if name not in goals] == []


def test_the_words_of_each_command(capsys):
    parts.main("left-out")
    parts.main("say")
    parts.main("pages")
    parts.main("left-out", "processes", "kernels")
    parts.main("say", "processes", "kernels", "services")
    parts.main("say", *parts.PARTS)
    left_out, said, pages, left, told, nothing = capsys.readouterr().out.splitlines()
    assert {"--ignore=tests/kill", "--ignore=tests/site/test_site.py"} <= set(left_out.split())
    assert said == "left out here: " + ", ".join(f"make {name}" for name in parts.PARTS)
    assert set(pages.split()) == set(parts.PARTS["pages"].tests)
    kept = {f"--ignore={path}" for name in ("processes", "kernels") for path in parts.PARTS[name].tests}
    assert set(left.split()) == set(left_out.split()) - kept
    assert told == "left out here: make sharded, make compiled, make programs, make pages, make installed"
    assert nothing == "left out here: nothing"


def test_the_makefile_and_ci_know_every_part():
    known = " ".join(sorted(parts.PARTS))
    for file, word in (("Makefile", r"^PARTS = (.*)$"), (".ci/run", r'^all="(.*)"$')):
        (names,) = re.findall(word, (ROOT / file).read_text(), re.MULTILINE)
        assert " ".join(sorted(names.split())) == known


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """Returns a function that commits a file of a new repository, in which parts are looked up."""
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def change(name, *, days_later=2.0):
        change.day += days_later
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"{1_700_000_000 + int(change.day * parts.DAY)} +0000")
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.read_text() + "more\n" if file.exists() else "some\n")
        git("add", ".")
        git("commit", "-q", "-m", name)

    git("init", "-q", "-b", "main")
    change.git = git
    change.day = 0.0
    return change


def test_parts_whose_inputs_differ_from_the_day_before(commit):
    assert parts.changed() == list(parts.PARTS)  # no commit yet: git cannot tell
    commit("README.md")
    assert parts.changed() == list(parts.PARTS)  # there is none before
    commit("fabricamp/ops/norm.py")
    assert parts.changed() == ["kernels", "sharded", "programs"]
    commit("fabricamp/metrics/slots.py")
    assert parts.changed() == []
    commit("fabricamp/engine/update.py")
    assert parts.changed() == ["sharded", "compiled", "processes"]
    commit("tests/kill/test_kills.py")
    assert parts.changed() == ["processes"]
    commit("docs/index.md", days_later=0.5)
    assert parts.changed() == ["processes", "pages"]
    commit("constraints.txt")
    assert parts.changed() == list(parts.PARTS)


def test_a_branch_and_a_given_commit_are_compared_as_a_whole(commit, monkeypatch):
    commit("a")
    commit.git("update-ref", "refs/remotes/origin/main", "HEAD")
    commit("docs/index.md")
    commit("b")
    assert parts.changed() == ["pages"]
    monkeypatch.setenv("CI_BASE", "HEAD^")
    assert parts.changed() == []
    monkeypatch.setenv("CI_BASE", "0" * 40)  # what a forge gives for a new branch
    assert parts.changed() == list(parts.PARTS)
