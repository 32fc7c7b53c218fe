"""Every way in which a Trainer starts its processes trains the same on two GPUs, over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys

import torch

from fabricamp import Trainer, TrainingModule


class Regression(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.manual_seed(1)
    module = Regression()
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    trainer = Trainer(
        accelerator="gpu", devices=2, strategy="ddp", precision="O1", max_epochs=2, logger=False, start_method=sys.argv[1],
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    if trainer.global_rank == 0:
        torch.save({name: value.cpu() for name, value in module.state_dict().items()}, sys.argv[2])
"""


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_every_way_to_start_processes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment, weights = {**os.environ, "PYTHONPATH": str(ROOT)}, []
    for method in ("script", "spawn", "fork"):
        command = [sys.executable, "train.py", method, f"{method}.pt"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (method, done.stdout[-2000:], done.stderr[-3000:])
        weights.append(torch.load(tmp_path / f"{method}.pt", weights_only=True))
    for others in weights[1:]:
        assert all(torch.equal(others[name], value) for name, value in weights[0].items())
