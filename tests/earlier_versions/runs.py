"""The runs whose checkpoints are kept here, and ``python -m tests.earlier_versions.runs FOLDER NAME``, which writes them.

``format_2/`` and ``format_3/`` hold one checkpoint of each run, named by the commit that wrote it.
All numbers of these runs but those of the shards are exact in their dtypes (whole numbers, and halves of them), in any order of
summation: the same bits on every machine.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import EMA, EarlyStopping
from fabricamp.data import CombinedLoader, LengthGroups
from fabricamp.loggers import CSVLogger
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import OptLevel
from tests.distributed.ranks import run_ranks
from tests.small import data, quiet_trainer

OVERFLOWS_AT = 2


FOLDER = Path(__file__).parent
CUT_SHARDS_AT = 5


def files_of(scene, *formats):
    """The files of a scene, those of format 2 first; with ``formats``, theirs."""
    folders = [FOLDER / f"format_{number}" for number in formats or (2, 3)]
    return [file for folder in folders for file in sorted(folder.glob(f"*-{scene}.ckpt"))]


def whole_numbers(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (size, 8), generator=generator).float()
    y = torch.randint(0, 2, (size, 3), generator=generator).float() * 2 - 1
    return TensorDataset(x, y)


class Draws:
    """Batches without a sampler: each one draws a number, so a resumed pass has to read past the earlier ones."""

    def __len__(self):
        return 4

    def __iter__(self):
        for index in range(len(self)):
            yield torch.randint(0, 4, (2, 8)).float() + index, torch.ones(2, 3)


class Stream:
    """Batches that know their own position; the next pass goes on where a limit ended the one before."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 7:
            self.position += 1
            yield torch.full((2, 8), float(self.position % 3)), torch.ones(2, 3)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Net(TrainingModule):
    """One layer whose gradients do not depend on its weights; logs values of every kind."""

    def __init__(self, *, overflows=True):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(24).reshape(3, 8) / 8)
            self.net.bias.zero_()
        self.total = SumMetric()
        self.overflows = overflows
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen.append([float(x.sum()) for x, _ in parts] + [torch.randint(0, 100, ()).item()])
        loss = sum((self.net(x) * y).sum() for x, y in parts)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("exact", loss.detach().double(), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=4)
        self.log("most", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=4)
        self.log("number", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="sum", batch_size=4)
        self.total.update(float(batch_idx))
        self.log("total", self.total, on_step=False, on_epoch=True, batch_size=4)
        overflow = self.overflows and self.global_step == OVERFLOWS_AT
        return loss * (float("inf") if overflow else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) * batch[1]).sum(), batch_size=4)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1 / 64, momentum=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Two(TrainingModule):
    """Two layers, each with an optimizer and a schedule that are stepped by hand, and with a loss scale of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.nets = torch.nn.ModuleList([torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)])
        with torch.no_grad():
            for net in self.nets:
                net.weight.copy_(torch.arange(24).reshape(3, 8) / 8)
                net.bias.zero_()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append([float(x.sum()), torch.randint(0, 100, ()).item()])
        steps = zip(self.nets, self.optimizers(), self.lr_schedulers(), strict=True)
        for index, (net, optimizer, schedule) in enumerate(steps):
            loss = (net(x) * y).sum()
            self.log(f"loss_{index}", loss, on_step=True, on_epoch=True, batch_size=4)
            overflow = index == 1 and batch_idx == OVERFLOWS_AT and self.current_epoch == 0
            optimizer.zero_grad()
            self.manual_backward(loss * (float("inf") if overflow else 1.0), loss_id=index)
            optimizer.step()
            schedule.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", sum((net(batch[0]) * batch[1]).sum() for net in self.nets), batch_size=4)

    def configure_optimizers(self):
        one = torch.optim.SGD(self.nets[0].parameters(), lr=1 / 64, momentum=0.5)
        other = torch.optim.SGD(self.nets[1].parameters(), lr=1 / 32, momentum=0.5, nesterov=True)
        return [one, other], [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (one, other)]


class WithObjects(Net):
    """Its hyper-parameters are objects: a number, and the layer whose weights it trains."""

    def __init__(self, ratio, head):
        super().__init__(overflows=False)
        self.save_hyperparameters()
        with torch.no_grad():
            head.weight.copy_(self.net.weight)
            head.bias.zero_()
        self.net = head


class Ratio(Callback):
    """Has an object in its state."""

    def __init__(self):
        self.ratio = Fraction(0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.ratio += pl_module.hparams.ratio

    def state_dict(self):
        return {"ratio": self.ratio}

    def load_state_dict(self, state):
        self.ratio = state["ratio"]


class Cut(Callback):
    """Writes a checkpoint after some micro-batch of the run."""

    def __init__(self, path, batches):
        self.path = path
        self.batches = batches

    def on_train_start(self, trainer, pl_module):
        trainer.callback_metrics["own"] = torch.tensor(7.0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.batches:
            trainer.save_checkpoint(self.path)
            self.seen = len(pl_module.seen)


class Restored(Callback):
    """Writes what a run goes on from, before its first batch."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def combined():
    return CombinedLoader(
        {
            "drawn": DataLoader(whole_numbers(32, 1), 4, shuffle=True),
            "own": DataLoader(whole_numbers(10, 2), 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
            "read": Draws(),
        },
        "max_size_cycle",
    )


def limited():
    groups = LengthGroups([1 + index % 5 for index in range(16)], batch_size=2, seed=3)
    return CombinedLoader(
        {"stream": Stream(), "groups": DataLoader(whole_numbers(16, 4), batch_sampler=groups)}, "max_size_cycle"
    )


class Scene(NamedTuple):
    """A run's data, the micro-batch after which it is cut, the Trainer's arguments, and the module."""

    make: Callable[[], Any]
    cut_at: int
    options: dict[str, Any]
    module: Callable[[], TrainingModule]


def calm():
    return Net(overflows=False)


SCENES = {
    # Within the fourth step: two of its micro-batches are done, the overflow of the step before is not read yet.
    "accumulation": Scene(
        combined,
        14,
        {
            "precision": lambda: OptLevel("O2", max_loss_scale=2.0**9),
            "accumulate_grad_batches": 4,
            "max_steps": 6,
            "val_check_interval": 8,
        },
        Net,
    ),
    # In the second epoch of those that a limit ends; each goes on in the stream where the one before ended.
    "limit": Scene(limited, 5, {"precision": lambda: "O0", "limit_train_batches": 3, "max_epochs": 4}, calm),
    # Its steps end within an epoch, and it is saved after its end.
    "end": Scene(
        lambda: DataLoader(whole_numbers(32, 1), 4, shuffle=True),
        0,
        {
            "precision": lambda: OptLevel("O2", max_loss_scale=2.0**9),
            "nan_policy": "stop",
            "max_steps": 5,
            "val_check_interval": 4,
        },
        calm,
    ),
    # The second optimizer has left out a step; both have momentum, a schedule and a loss scale of their own.
    "optimizers": Scene(
        lambda: DataLoader(whole_numbers(32, 1), 4, shuffle=True),
        5,
        {"precision": lambda: OptLevel("O2", num_losses=2, max_loss_scale=2.0**9), "max_epochs": 2},
        Two,
    ),
    "objects": Scene(
        lambda: DataLoader(whole_numbers(32, 1), 4, shuffle=True),
        5,
        {"precision": lambda: "O0", "max_epochs": 2, "checkpoint_objects": True},
        lambda: WithObjects(Fraction(1, 3), torch.nn.Linear(8, 3)),
    ),
}


def fit(scene, folder, *callbacks, ckpt_path=None, **changes):
    made = SCENES[scene]
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(3 if ckpt_path is None else 4)
    module = made.module()
    options = {**made.options, "precision": made.options["precision"](), **changes}
    if scene == "objects":
        callbacks = (Ratio(), *callbacks)
    trainer = quiet_trainer(
        **options,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[EMA(0.5), EarlyStopping("val_loss", patience=99), *callbacks],
        logger=CSVLogger(folder),
        default_root_dir=folder,
    )
    weights_only = False if scene == "objects" else None
    validated = DataLoader(whole_numbers(8, 6), 4)
    trainer.fit(module, made.make(), validated, ckpt_path=ckpt_path, weights_only=weights_only)
    return module, trainer


class Shards(TrainingModule):
    """One layer, Adam; notes what it reads."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(24).reshape(3, 8) / 100)
            self.net.bias.zero_()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0][:, 0].tolist())
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


def sharded(*callbacks, folder, ckpt_path=None):
    """A fit of two ranks that hold shards: five micro-batches, of which one is of the third step, are before the cut."""
    module = Shards()
    trainer = quiet_trainer(
        devices="auto",
        strategy="fsdp",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_steps=6,
        callbacks=[EMA(0.5), *callbacks],
        default_root_dir=folder,
    )
    torch.manual_seed(3 if ckpt_path is None else 4)
    trainer.fit(module, DataLoader(data(48), 4, shuffle=True), ckpt_path=ckpt_path)
    weight = module.net.weight.detach().clone()
    return module.seen, trainer.global_step, None if weight.is_meta else weight  # rank 0 has it


def write(folder, name):
    folder.mkdir(exist_ok=True)
    for scene, made in SCENES.items():
        file = folder / f"{name}-{scene}.ckpt"
        with tempfile.TemporaryDirectory() as logs:
            _, trainer = fit(scene, Path(logs), Cut(file, made.cut_at))
            if scene == "end":
                trainer.save_checkpoint(file)
    run_ranks(lambda: sharded(Cut(folder / f"{name}-fsdp.ckpt", CUT_SHARDS_AT), folder=folder), 2, backend=None)


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute(), sys.argv[2])
