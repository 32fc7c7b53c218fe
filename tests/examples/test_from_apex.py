"""The example of a script for apex prints the same digits unchanged and with the Trainer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.forked import start_forked

SCRIPT = Path(__file__).parents[2] / "examples" / "from_apex" / "train.py"


def run(folder, *arguments):
    """Runs the script in a forked process; returns the number of losses, the first and the last."""
    process = start_forked(folder, str(SCRIPT), *arguments, CUDA_VISIBLE_DEVICES="")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    assert out.endswith("equal digits\n")
    assert len(set(re.findall(r"^sum of absolute weights and statistics (\S+)$", out, re.MULTILINE))) == 1
    (found,) = set(re.findall(r": (\d+) losses, from (\S+) to (\S+)$", out, re.MULTILINE))
    return tuple(map(float, found))


def test_both_scripts_have_equal_digits(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    count, first, last = run(tmp_path, "--quick", "--picture", "picture.svg")
    assert count == 64
    assert last < first / 5
    assert (tmp_path / "picture.svg").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_the_long_form_reaches_its_loss(tmp_path, level):
    count, _, last = run(tmp_path, "--opt-level", level)
    assert count == 256
    assert last < 0.05
