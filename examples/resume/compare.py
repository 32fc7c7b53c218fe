"""Compares the logs and checkpoints of two runs bit by bit, and draws their losses."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def losses(folder: Path) -> list[float]:
    """Returns the loss of every step."""
    with (folder / "version_0" / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")]


def last_state(folder: Path, step: int) -> dict[str, Any]:
    """Returns weights, optimizer and schedule of the checkpoint after ``step``."""
    (path,) = folder.rglob(f"*step={step}.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}


def equal(a: Any, b: Any) -> bool:
    """Compares two states; tensors have to have the same bits."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def draw(path: Path, straight: list[float], killed: list[float], resumed: list[float], resumed_at: int) -> None:
    """Draws the uninterrupted run as a wide line, and both parts of the other run on it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("--picture needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(straight, color="#f5cba7", linewidth=5, label="never killed")
    axes.plot(killed, color="#1f618d", linewidth=2, label="until SIGKILL")
    axes.plot(range(resumed_at, len(resumed)), resumed[resumed_at:], color="#c0392b", linewidth=1, label="resumed")
    axes.axvline(resumed_at, color="grey", linestyle=":")
    axes.axvline(len(killed), color="grey", linestyle="--")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=80)
