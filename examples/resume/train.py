"""Teaches one thing: a run that is killed with SIGKILL and started again ends with the bits of a run that was never killed.

``python train.py`` trains twice on handwritten digits: once without interruption, once killed in the middle and resumed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from compare import draw, equal, last_state, losses
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, Trainer, TrainingModule, seed_everything
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger


class Digits(TrainingModule):
    """Shuffling, dropout, momentum and the schedule all have a state: each of them has to survive the kill."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self.net(images), digits)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Kill(Callback):
    """Ends this process as ``kill -9`` does: nothing can be saved any more."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, steps: int, every: int, kill_at: int | None) -> None:
    """Trains. A run needs no more to survive a kill: ``ckpt_path="auto"`` resumes if there is a checkpoint."""
    seed_everything(0)
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits))
    trainer = Trainer(
        devices=1,
        max_steps=steps,
        deterministic=True,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(folder, name="", version=0, flush_logs_every_n_steps=1),
        callbacks=[ModelCheckpoint(every=f"{every} steps"), *([Kill(kill_at)] if kill_at else [])],
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=64, shuffle=True, drop_last=True), ckpt_path="auto")


def run(folder: Path, steps: int, every: int, kill_at: int | None = None) -> int | None:
    """Runs ``train`` in a new process; returns the exit code."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder, steps, every, kill_at))
    process.start()
    process.join()
    return process.exitcode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 steps instead of 600")
    parser.add_argument("--picture", type=Path, help="draw the losses into this .png or .svg file")
    options = parser.parse_args()
    steps = 60 if options.quick else 600
    kill_at = steps * 3 // 4 - 1
    every = steps // 6
    with tempfile.TemporaryDirectory() as name:
        straight, other = Path(name, "straight"), Path(name, "killed")
        run(straight, steps, every)
        print(f"exit code of the run that kills itself after step {kill_at}: {run(other, steps, every, kill_at)}")
        killed = losses(other)
        print(f"exit code of the same script, started again: {run(other, steps, every)}")
        expected, resumed = losses(straight), losses(other)
        same = expected == resumed and equal(last_state(straight, steps), last_state(other, steps))
    print(f"{len(expected)} losses, from {expected[0]:.3f} to {expected[-1]:.3f}; weights, optimizer and schedule:")
    print("bitwise equal" if same else "different")
    if options.picture:
        draw(options.picture, expected, killed, resumed, resumed_at=kill_at // every * every)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
