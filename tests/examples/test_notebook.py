"""The notebook runs from its first cell to its last, and its bars are outputs that end as lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the package nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs the package nbclient")
pytest.importorskip("ipykernel", reason="needs the package ipykernel")
pytest.importorskip("matplotlib", reason="needs the package matplotlib")
pytest.importorskip("sklearn", reason="needs the package sklearn")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "digits.ipynb"


def test_the_notebook_runs_and_shows_a_line_an_epoch(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output.data for output in outputs if output.output_type == "display_data"]
    lines = [data["text/plain"] for data in shown if data.get("text/plain", "").startswith("epoch ")]
    assert [line.split()[1] for line in lines] == [f"{epoch}/{5 if epoch <= 5 else 10}" for epoch in range(1, 11)]
    assert all("train_loss" in line for line in lines)
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "it/s" not in printed, "the bar wrote plain lines"
    assert "epoch 6/10, step 120" in printed
    assert float(re.search(r"test accuracy: ([\d.]+)%", printed)[1]) > 93
    assert "image/png" in shown[-1]


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[] for _ in code]
    assert {cell.execution_count for cell in code} == {None}
