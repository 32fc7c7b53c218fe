"""The gallery: a row for each example, with a command that runs, a page, a picture and its lines, and what `make examples` runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_examples

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GALLERY = (EXAMPLES / "README.md").read_text()


def test_each_folder_has_a_row_in_order():
    folders = sorted(one.name for one in EXAMPLES.iterdir() if (one / "README.md").is_file())
    assert list(run_examples.commands(GALLERY)) == folders


def test_pages_pictures_and_files_of_commands_exist():
    links = re.findall(r"\]\(([^)]+)\)", GALLERY)
    files = re.findall(r"examples/[\w/.]+", " ".join(run_examples.commands(GALLERY).values()))
    assert len(links) > 20
    assert [one for one in links if not (EXAMPLES / one).is_file()] == []
    assert [one for one in files if not (ROOT / one).is_file()] == []


def lines_of_code(example):
    """Returns the lines of an example's scripts, and of the cells of its notebooks."""
    scripts = [one for one in example.iterdir() if one.suffix in (".py", ".sh", ".sbatch")]
    lines = sum(len(one.read_text().splitlines()) for one in scripts)
    for notebook in example.glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        lines += sum(len("".join(cell["source"]).splitlines()) for cell in cells if cell["cell_type"] == "code")
    return lines


@pytest.mark.parametrize("name", run_examples.commands(GALLERY))
def test_the_row_has_the_picture_and_the_lines_and_the_page_its_one_thing(name):
    (row,) = (line for line in GALLERY.splitlines() if f"| [{name}]({name}/README.md) |" in line)
    page = (EXAMPLES / name / "README.md").read_text()
    assert f"({name}/picture.png)](" in row
    assert "](picture.png)" in page
    assert row.split(" | ")[-3] == str(lines_of_code(EXAMPLES / name))
    one_thing = re.findall(r"^\*\*(?:The one thing:\*\*|[^*]+[.:]\*\*)", page, re.MULTILINE)
    assert len(one_thing) == 1


def test_a_failed_command_is_named_with_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr(run_examples, "ROOT", tmp_path)
    monkeypatch.setattr(run_examples, "LOGS", tmp_path / "logs")
    assert run_examples.run("good", "test -d .")[-1] == "ok"
    assert run_examples.run("bad", "echo broken && exit 3")[-1] == "exit status 3: logs/bad.log"
    assert (tmp_path / "logs" / "bad.log").read_text() == "broken\n"


def test_a_name_that_the_gallery_lacks_is_refused():
    words = [sys.executable, "tools/run_examples.py", "gpd"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("no example is named gpd; the gallery has audio, cluster")
