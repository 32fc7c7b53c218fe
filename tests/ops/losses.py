"""Rows of logits with targets, and their cross-entropy in float64."""

from __future__ import annotations

import torch
from torch.nn import functional as F

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
RULES = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01, "reduction": "sum"},
    {"label_smoothing": 1.0, "z_loss": 0.1, "reduction": "none"},
    {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.01},
]


def truth(
    logits,
    target,
    *,
    label_smoothing=0.0,
    ignore_index=-100,
    reduction="mean",
    z_loss=0.0,
    softcap=0.0,
    class_weight=None,
):
    """In float64, by torch's own function; class weights multiply the loss of a row, also its ``z_loss``."""
    rows, labels = logits.double().reshape(-1, logits.shape[-1]), target.long().reshape(-1)
    if softcap:
        rows = softcap * torch.tanh(rows / softcap)
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    counts = labels != ignore_index
    losses = F.cross_entropy(rows, labels, **how) + z_loss * rows.logsumexp(-1).square().masked_fill(~counts, 0)
    if class_weight is not None:
        counts = class_weight.double()[labels.where(counts, 0)] * counts
        losses = losses * counts
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def sample(device, *shape, dtype=torch.float32, ignored=0.2, seed=0, labels=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    target[torch.rand(shape[:-1], generator=generator) < ignored] = -100
    return logits.to(device), target.to(device, labels)
