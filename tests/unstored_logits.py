"""A small network of words with its loss of hidden states and head in three ways, and fits of it.

from tests.unstored_logits import FAR, LEVELS, Block, Words, assert_near, batches, fitted, small_chunks
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import TrainingModule, seed_everything
from fabricamp.nn import FusedLinearCrossEntropy
from fabricamp.ops import fused_linear_cross_entropy, linear_cross_entropy
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import OptLevel
from tests.small import quiet_trainer

__all__ = ["FAR", "LEVELS", "Block", "Words", "assert_near", "batches", "fitted", "small_chunks"]

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
WORDS, WIDTH = 36, 16
FAR = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 5e-3, "O4": 2e-2, "O5": 2e-2}
"""Distance of trained weights to those of stored logits: a few roundings of gradients."""


def small_chunks(put=setattr):
    """Makes several chunks of small losses."""
    put(linear_cross_entropy, "_LOGITS_OF_A_CHUNK", 512)
    put(linear_cross_entropy, "_ROWS", 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(TrainingModule):
    """``way``: "stored", "head" (the head is called), "function"; a third of the targets is ignored, evenly."""

    def __init__(self, way, *, reduction="mean", tied=False):
        super().__init__()
        self.way, self.reduction = way, reduction
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            head.weight = self.embedding.weight
        self.head = head if way == "stored" else FusedLinearCrossEntropy.of(head, reduction=reduction)

    def losses(self, tokens, targets):
        hidden = self.blocks(self.embedding(tokens))
        if self.way == "head":
            return self.head(hidden, targets)
        if self.way == "function":
            return fused_linear_cross_entropy(
                hidden, self.head.weight, targets, self.head.bias, reduction=self.reduction
            )
        logits = self.head(hidden).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction=self.reduction)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        losses = self.losses(tokens, targets)
        loss = losses if self.reduction == "mean" else losses.sum() / 60
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.losses(*batch).mean())

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01, eps=1e-3)


def batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (48, 15), generator=generator)
    targets = torch.randint(0, WORDS, (48, 15), generator=generator)
    targets[:, ::3] = -100
    return DataLoader(TensorDataset(tokens, targets), batch_size=batch_size)


def fitted(
    way,
    level="O0",
    *,
    loss_scale=None,
    batch_size=8,
    strategy="single",
    devices=1,
    reduction="mean",
    tied=False,
    **options,
):
    """Returns the trained weights, and what was logged."""
    seed_everything(3, verbose=False)
    module = Words(way, reduction=reduction, tied=tied)
    trainer = quiet_trainer(
        precision=OptLevel(level, loss_scale=loss_scale) if loss_scale else level,
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        **options,
    )
    data = batches(batch_size)
    trainer.fit(module, data, data)
    weights = {name: value.detach().double() for name, value in module.state_dict().items()}
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_near(found, expected, far):
    (weights, logged), (others, said) = found, expected
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert (value - others[name]).norm() < far * others[name].norm() + far, name
    assert logged.keys() == said.keys()
    for name, value in logged.items():
        assert value == pytest.approx(said[name], rel=5 * far), name
