"""The example of a killed and resumed run, as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.forked import start_forked
from tests.examples.in_process import import_for_digits

SCRIPT = Path(__file__).parents[2] / "examples" / "resume" / "train.py"


@pytest.fixture(autouse=True)
def _needs_sklearn():
    import_for_digits()


def run(folder, *arguments):
    """Runs the script in a forked process; returns its last loss and what it printed."""
    process = start_forked(folder, str(SCRIPT), *arguments, CUDA_VISIBLE_DEVICES="")
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    assert out.endswith("bitwise equal\n")
    assert "exit code of the same script, started again: 0\n" in out
    first, last = map(float, re.search(r"losses, from (\S+) to (\S+);", out).groups())
    assert last < first / 5
    return last, out


def test_a_killed_run_is_resumed_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    _, out = run(tmp_path, "--quick", "--picture", "picture.svg")
    assert "kills itself after step 44: -9\n" in out
    assert "60 losses" in out
    assert (tmp_path / "picture.svg").stat().st_size > 1000


@pytest.mark.slow
def test_the_long_form_reaches_its_loss(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    last, out = run(tmp_path)
    assert "600 losses" in out
    assert last < 0.05
