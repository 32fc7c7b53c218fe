"""A compiled run in a process of its own: ``python -m tests.parity.compiled_run OPTIONS`` with JSON; it writes its last weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback
from fabricamp.optimizers import FusedSGD
from tests.small import Classifier, loader, quiet_trainer


class Block(nn.Module):
    """Has a norm and dropout: reductions, and random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Deep(Classifier):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 64), *(Block() for _ in range(3)), nn.Linear(64, 3))

    def configure_optimizers(self):
        return FusedSGD(self.parameters(), lr=0.1, momentum=0.9)


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == 12:  # in the second epoch, after a short batch and a validation
            trainer.save_checkpoint(self.path)


def run(*, compile, device, precision, graph, checkpoint, saves, out):  # noqa: A002 - the Trainer's name of it
    torch.manual_seed(3)
    module = Deep()
    trainer = quiet_trainer(
        accelerator=device,
        precision=precision,
        max_epochs=3,
        compile=compile,
        cuda_graph=graph,
        callbacks=[Saves(checkpoint)] if saves else [],
    )
    trainer.fit(module, loader(66, 8, shuffle=True), loader(20, 8), ckpt_path=None if saves else checkpoint)
    torch.save([one.detach().cpu() for one in module.parameters()], out)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    run(**{**given, "checkpoint": Path(given["checkpoint"])})
