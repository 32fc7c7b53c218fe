"""The pages of the site: their Python runs as it stands, in the order of the page, and prints what its comments say.

A block below ``<!-- compiled only: REASON -->`` is compiled: it needs what this machine may not have.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([DOCS / "index.md", *(DOCS / "how-to").glob("*.md"), *(DOCS / "guides").glob("*.md")])
NEEDS = {"optuna": "how-to/sweeps.md", "torchao": "how-to/fp8.md", "peft": "how-to/huggingface.md"}
"""Packages that a page's code imports beside those of the package."""
BLOCK = re.compile(
    r"^(?P<mark><!-- compiled only: [^\n]+ -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)


def blocks(page, language):
    """Returns the blocks of a language: whether each is only compiled, its first line in the page, and its code."""
    text = page.read_text()
    found = [one for one in BLOCK.finditer(text) if one["language"] == language]
    return [(bool(one["mark"]), text[: one.start("code")].count("\n"), one["code"]) for one in found]


def name(page):
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_runs_and_prints_what_its_comments_say(page, tmp_path):
    for package in [package for package, needed_by in NEEDS.items() if needed_by == name(page)]:
        pytest.importorskip(package, reason=f"needs the package {package}")
    lines, said = [], []
    for only_compiled, start, code in blocks(page, "python"):
        compile(code, name(page), "exec")
        if only_compiled:
            continue
        lines += [""] * (start - len(lines)) + code.splitlines()  # errors name the page's line
        said += [words.split(": ")[0] for words in PRINTED.findall(code)]
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines) + "\n")
    code, out, err = finish(start_forked(tmp_path, "page.py", CUDA_VISIBLE_DEVICES=""))
    assert code == 0, err
    printed = iter(out.splitlines())
    assert [words for words in said if words not in printed] == [], out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_shell_commands_of_a_page_are_shell(page):
    for _, _, code in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_every_page_begins_with_code_a_picture_or_a_table():
    """What to type, or to look up, comes before how it behaves."""
    begun = {name(page): re.search(r"^(```|!\[|\| )", page.read_text(), re.MULTILINE) for page in PAGES}
    assert [page for page, found in begun.items() if found is None or found.start() > 900] == []
