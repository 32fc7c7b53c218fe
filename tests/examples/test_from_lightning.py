"""The example of a script for Lightning prints the same digits under both packages; its README shows the changes."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.distributed.forked import start_forked

FOLDER = Path(__file__).parents[2] / "examples" / "from_lightning"


def run(folder, *arguments):
    """Runs the script in a forked process; returns its first and last loss, and what it printed."""
    process = start_forked(folder, str(FOLDER / "train.py"), *arguments, CUDA_VISIBLE_DEVICES="")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    first, last = map(float, re.search(r"losses each, from (\S+) to (\S+)", out).groups())
    return first, last, out


def test_the_unchanged_and_the_changed_script_print_equal_digits(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    first, last, out = run(tmp_path, "--quick", "--picture", "picture.svg")
    assert out.endswith("2 runs: equal digits\n")
    assert last < first / 5
    assert (tmp_path / "picture.svg").stat().st_size > 1000


@pytest.mark.slow
def test_the_long_form_prints_lightnings_digits(tmp_path):
    _, _, out = run(tmp_path)
    count = 3 if importlib.util.find_spec("lightning") else 2
    assert out.endswith(f"{count} runs: equal digits\n")
    assert len(re.findall(r"^test_accuracy (?:0\.99|1\.0)", out, re.MULTILINE)) == count


def test_the_readme_shows_the_difference():
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    (shown,) = re.findall(r"```diff\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    expected = [line[0] + line[2:] for line in changes if line[2:].strip() and '"""' not in line]
    assert shown.splitlines() == expected
