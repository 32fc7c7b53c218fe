"""The notebook runs from its first cell to its last, and its bars are outputs that end as lines."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "digits.ipynb"


@pytest.fixture
def notebook():
    """Returns the notebook, read."""
    nbformat = pytest.importorskip("nbformat", reason="needs the package nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_runs_and_shows_a_line_an_epoch(notebook, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs the package nbclient")
    for package in ("ipykernel", "matplotlib", "sklearn"):
        if importlib.util.find_spec(package) is None:  # the notebook's kernel imports them, in its own process
            pytest.skip(f"needs the package {package}")
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


RANKS = """
import torch
from fabricamp import Trainer, TrainingModule

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_start(self):
        if self.global_rank == 0:
            print("printed by", "the module", end="")

loader = torch.utils.data.DataLoader(torch.rand(32, 1), batch_size=8)
Trainer(max_epochs=2, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False).fit(Line(), loader)
"""


def test_lines_of_two_processes_are_whole_outputs(notebook, tmp_path):
    """A kernel shows each write of a forked process as an output of its own: a line and its end would be two."""
    nbclient = pytest.importorskip("nbclient", reason="needs the package nbclient")
    pytest.importorskip("ipykernel", reason="needs the package ipykernel")
    notebook.cells = [type(notebook.cells[0])(cell_type="code", metadata={}, source=RANKS, outputs=[])]
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output.text for output in notebook.cells[0].outputs]
    assert any(text.startswith("epoch 2/2  step 4") for text in outputs)
    assert [text for text in outputs if text.endswith("\n")] == [text for text in outputs if "printed by" not in text]
    assert "\n" not in outputs
    assert "printed by the module" in "".join(outputs)


def test_the_notebook_is_kept_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[] for _ in code]
    assert {cell.execution_count for cell in code} == {None}
