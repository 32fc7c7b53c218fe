"""Each row of ``lightning_repros.py`` ends as under Lightning 2.6.6, except those that stay different on purpose.

``lightning_repros.json`` has the outcome of each row under Lightning; a Python with Lightning 2.6.6 records it again:
``cd tests/lightning; python lightning_repros.py --into lightning_repros.json``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.forked_door import run_forked

HERE = Path(__file__).parent
ROWS = HERE / "lightning_repros.py"
MEASURED = HERE / "lightning_repros.json"
VERSION = "2.6.6"

ON_PURPOSE = {
    "c26_max_epochs_by_default": "trainer.max_epochs is always an int; in Lightning it is None until the fit begins",
    "c32_lbfgs_with_accumulation": "Lightning adds the gradients of each call of the closure to those of the calls before",
    "c34_dataloader_iter": "the loop counts batches, so that a resumed run begins at the next one; a step that reads them hides it",
}
"""Rows that are in docs/from-lightning.md, with the reason."""


def outcomes(file):
    return dict(json.loads(line) for line in file.read_text().splitlines())


def measured():
    return outcomes(MEASURED)


def run(folder, *command):
    """Runs the rows in a separate process; returns their outcomes and the process's output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = folder / "found.json"
    done = subprocess.run(
        [*command, str(ROWS), "--into", str(found)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return outcomes(found), done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_the_rows_end_as_under_lightning(tmp_path):
    written = run_forked(tmp_path, ROWS, "--into", tmp_path / "found.json", limit=550)
    found = outcomes(tmp_path / "found.json")
    different = {name: found.get(name) for name, outcome in measured().items() if found.get(name) != outcome}
    assert different.keys() == ON_PURPOSE.keys(), f"{different}\n{written}"


def lightnings_python():
    """Returns an interpreter with Lightning 2.6.6: this one, or the one in LIGHTNING_PYTHON; without one the test is skipped."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("lightning") == VERSION:
            return sys.executable
    if named := os.environ.get("LIGHTNING_PYTHON"):
        return named
    pytest.skip(
        "LIGHTNING_PYTHON names no interpreter that has Lightning; tests/lightning/record.py says how to make one"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rows_end_so_under_lightning_again(tmp_path):
    found, written = run(tmp_path, lightnings_python())
    assert found == measured(), written


def test_every_row_is_measured():
    names = re.findall(r"^@row\ndef (\w+)", ROWS.read_text(), re.MULTILINE)
    assert names == [*measured()]


def test_at_most_eight_rows_stay_different_and_the_page_says_why():
    first = re.compile(r"[A-L]_|c0[0-5]_|c13_|c15_|d[1-9]_")
    assert len(ON_PURPOSE) <= 8
    assert ON_PURPOSE.keys() <= measured().keys()
    assert not any(first.match(name) for name in ON_PURPOSE)
    page = (HERE.parents[1] / "docs" / "from-lightning.md").read_text()
    assert "LBFGS with `accumulate_grad_batches`" in page
    assert "dataloader_iter)`" in page
