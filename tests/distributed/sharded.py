"""Runs of a small network under strategy="fsdp", on CPUs and GPUs: combinations of options, fits, and comparisons of weights.

from tests.distributed.sharded import CELLS, Block, Cell, Net, alone, fitted, flat, too_far
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, TrainingModule, seed_everything
from fabricamp.optimizers import LARC, FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from fabricamp.strategies import FSDP
from tests.small import loader, quiet_trainer

__all__ = ["CELLS", "OPTIMIZERS", "Block", "Cell", "Net", "SaveAt", "alone", "fitted", "flat", "sharding", "too_far"]

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "torch's fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01, eps=1e-3, weight_decay=0.01),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
    "FusedAdagrad": lambda parameters: FusedAdagrad(parameters, lr=0.05),
    "FusedLion": lambda parameters: FusedLion(parameters, lr=1e-3),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.05, eps=1e-3),
    "FusedNovoGrad": lambda parameters: FusedNovoGrad(parameters, lr=0.1, weight_decay=0.01, norm_type=0),
    "LARC": lambda parameters: LARC(FusedSGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.01)),
}


class Cell(NamedTuple):
    """A combination of options; a step has ``accumulate`` micro-batches."""

    level: str
    optimizer: str
    accumulate: int
    clip: tuple[str, float] | None
    reshard: Any
    units: str

    def __str__(self):
        return "-".join(map(str, self))


CELLS = [
    Cell("O0", "FusedAdam", 1, ("norm", 0.5), True, "blocks"),
    Cell("O0", "torch's fused adamw", 3, ("norm", 0.5), False, "blocks"),
    Cell("O0", "FusedAdagrad", 1, ("value", 0.02), True, "blocks"),
    Cell("O1", "FusedAdam", 3, ("norm", 0.5), True, "blocks"),
    Cell("O1", "torch's fused adamw", 1, None, False, "blocks"),
    Cell("O2", "FusedAdam", 1, ("norm", 0.5), False, "blocks"),
    Cell("O2", "adamw", 3, ("value", 0.02), True, "blocks"),
    Cell("O4", "FusedLion", 1, ("norm", 0.5), True, "blocks"),
    Cell("O5", "FusedSGD", 3, ("norm", 0.5), False, "blocks"),
    Cell("O0", "FusedLAMB", 3, ("value", 0.02), True, "blocks"),
    Cell("O1", "FusedNovoGrad", 3, ("norm", 0.5), False, "blocks"),
    Cell("O5", "LARC", 1, ("norm", 0.5), True, "blocks"),
    Cell("O2", "FusedLAMB", 3, ("norm", 0.5), True, "blocks"),
    Cell("O3", "FusedAdam", 3, ("norm", 0.5), True, "blocks"),
    Cell("O3", "FusedNovoGrad", 1, None, False, "blocks"),
    Cell("O0", "adamw", 1, ("norm", 0.5), True, "offload"),
    Cell("O4", "torch's fused adamw", 3, ("value", 0.02), True, "offload"),
    Cell("O5", "FusedLAMB", 1, ("norm", 0.5), True, "offload"),
]
"""Combinations for CPUs and GPUs."""


class Block(torch.nn.Module):
    """A block with 33 rows: over 2 and 4 ranks the shards differ in size, and some ranks have an empty shard of a bias."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 33)
        self.down = torch.nn.Linear(33, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(TrainingModule):
    """Repeated blocks, and parameters outside of them: one has a single element, one is tied to another."""

    block = Block

    def __init__(self, optimizer="sgd", *, meta=False):
        super().__init__()
        self.optimizer = optimizer
        self.meta = meta
        self.rates = None
        if not meta:
            self.build()

    def build(self):
        self.first = torch.nn.Linear(8, 16)
        self.blocks = torch.nn.ModuleList(self.block() for _ in range(3))
        self.head = torch.nn.Linear(16, 3)
        self.mirror = torch.nn.Linear(16, 3, bias=False)
        self.mirror.weight = self.head.weight
        self.scale = torch.nn.Parameter(torch.ones(1, device=self.head.weight.device))

    def init_weights(self):
        """Initialises the complete module including its units, as in many networks."""
        torch.nn.init.constant_(self.scale, 0.5)
        for block in self.blocks:
            torch.nn.init.normal_(block.down.weight, std=0.01)

    def configure_model(self):
        if self.meta and not hasattr(self, "first"):
            with torch.device("meta"):
                self.build()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.scale * self.mirror(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


class SaveAt(Callback):
    def __init__(self, path, batches):
        self.path, self.batches = str(path), batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.batches:
            trainer.save_checkpoint(self.path)


def flat(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()]).cpu()


def sharding(cell, **options):
    units = [Block] if cell.units == "blocks" else "auto"
    return FSDP(units, reshard_after_forward=cell.reshard, offload=cell.units == "offload", **options)


def fitted(
    cell, strategy, batch_size, *, net=Net, save=None, at=5, ckpt_path=None, accelerator="cpu", callbacks=(), then=None
):
    """Returns the weights and logged values of rank 0 after a fit of two epochs of four or eight micro-batches.

    ``then(trainer, module)`` is called after the fit.
    """
    seed_everything(5, verbose=False)
    module = net(cell.optimizer)
    trainer = quiet_trainer(
        accelerator=accelerator,
        devices=1 if strategy == "single" else "auto",
        strategy=strategy,
        precision=cell.level,
        max_epochs=2,
        accumulate_grad_batches=cell.accumulate,
        gradient_clip_val=cell.clip and cell.clip[1],
        gradient_clip_algorithm=cell.clip[0] if cell.clip else "norm",
        num_sanity_val_steps=1,
        callbacks=[*callbacks, *([] if save is None else [SaveAt(save, at)])],
    )
    trainer.fit(module, loader(32, batch_size), loader(16, batch_size), ckpt_path=ckpt_path)
    assert type(module) is net
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in module.modules())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if then is not None:
        then(trainer, module)
    return None if trainer.global_rank else (flat(module), logged)


@functools.cache
def alone(cell, net=Net, accelerator="cpu"):
    """Returns the result of one process on the joined batch."""
    return fitted(cell, "single", 8, net=net, accelerator=accelerator)


def too_far(cell, found, *, net=Net, accelerator="cpu", limit=1e-6):
    """Returns how weights and loss of several ranks differ from those of one process; None if they are close enough."""
    seed_everything(5, verbose=False)
    before = flat(net(cell.optimizer))
    (together, logged), (single, logged_alone) = found, alone(cell, net, accelerator)
    exact, _ = alone(cell._replace(level="O0"), net, accelerator)
    moved = (exact - before).norm()
    assert moved > 0.02
    own, others = (float((weights - exact).norm() / moved) for weights in (together, single))
    if cell.level == "O0":
        same_loss = logged["val_loss"] == pytest.approx(logged_alone["val_loss"], rel=10 * limit)
        return None if own < limit and same_loss else (own, logged["val_loss"])
    # Sums of half gradients are rounded in another order, so several ranks may be as far from the fp32 result as one process.
    return None if own < 2 * others + 1e-3 else (own, others)
