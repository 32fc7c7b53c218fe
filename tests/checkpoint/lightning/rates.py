"""Runs with schedules; writes ``rates.pt.gz``: checkpoints of Lightning, with the rates that it gives after them.

Needs a Python with Lightning 2.6: ``python tests/checkpoint/lightning/rates.py``.
"""

from __future__ import annotations

import gzip
import io
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

FILE = Path(__file__).with_name("rates.pt.gz")
BATCHES = 4
"""Batches of an epoch."""
KINDS = {
    "automatic": (True, 1, 1),
    "accumulated": (True, 1, 2),
    "manual": (False, 1, 1),
    "manual, two optimizers": (False, 2, 1),
}
"""Whether optimization is automatic, the number of optimizers, and the micro-batches of a step."""


class OneGroup(LRScheduler):
    """Halves the rate of one of the optimizer's groups at each step."""

    def __init__(self, optimizer, group):
        self.group = group
        super().__init__(optimizer)

    def get_lr(self):
        halved = [self.last_epoch > 0 and index == self.group for index in range(len(self.optimizer.param_groups))]
        return [
            group["lr"] * (0.5 if half else 1) for group, half in zip(self.optimizer.param_groups, halved, strict=True)
        ]


def plateau_of(optimizer, group):
    """Returns a schedule that halves the rate of one group, at each value that is not the lowest so far."""
    lowest = [0.0 if index == group else float("inf") for index in range(len(optimizer.param_groups))]
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=lowest)


def net_class(base):
    """Returns the module's class; ``base`` is Lightning's module or fabricamp's."""

    class Net(base):
        """One group of parameters for each schedule; records every group's rate in each batch."""

        def __init__(self, kind, raise_in=-1):
            super().__init__()
            self.automatic_optimization, self.num_optimizers, _ = KINDS[kind]
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(5))
            self.rates = []
            self.raise_in = raise_in

        def training_step(self, batch, batch_idx):
            if len(self.rates) == self.raise_in:
                raise RuntimeError("on purpose")
            optimizers = self.trainer.optimizers
            self.rates.append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])
            loss = sum(layer(batch[0]).pow(2).mean() for layer in self.layers)
            self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)
            if not self.automatic_optimization:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                self.manual_backward(loss)
                given = self.optimizers()
                for optimizer in given if self.num_optimizers > 1 else [given]:
                    optimizer.step()
                self.lr_schedulers()[2].step()
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.layers[0](batch[0]).pow(2).mean())

        def on_train_epoch_end(self):
            if not self.automatic_optimization:
                self.lr_schedulers()[0].step()
                self.lr_schedulers()[-1].step()

        def configure_optimizers(self):
            optimizers = [
                torch.optim.SGD([{"params": list(layer.parameters())} for layer in layers], lr=1.0)
                for layers in (
                    list(self.layers)[number :: self.num_optimizers] for number in range(self.num_optimizers)
                )
            ]
            first, last = optimizers[0], optimizers[-1]
            schedulers = [
                {"scheduler": OneGroup(first, 0), "interval": "epoch"},
                {"scheduler": OneGroup(first, 1), "interval": "epoch", "frequency": 2},
                {"scheduler": OneGroup(first, 2), "interval": "step"},
            ]
            if self.num_optimizers == 1:
                schedulers += [
                    {"scheduler": OneGroup(first, 3), "interval": "step", "frequency": 2},
                    {"scheduler": plateau_of(first, 4), "interval": "epoch", "monitor": "epoch"},
                ]
            if not self.automatic_optimization:
                schedulers.append({"scheduler": OneGroup(last, len(last.param_groups) - 1), "interval": "epoch"})
            return optimizers, schedulers

    return Net


def loader():
    """Returns the data, in :data:`BATCHES` batches."""
    return DataLoader(TensorDataset(torch.arange(4.0 * BATCHES).reshape(2 * BATCHES, 2) / 8), batch_size=2)


def options_of(kind, place):
    """Returns the Trainer's options for a kind of run and a place of a save."""
    automatic, _, accumulated = KINDS[kind]
    options = {"num_sanity_val_steps": 0}
    if automatic:
        options["accumulate_grad_batches"] = accumulated
    if place == "validation within an epoch":
        options["val_check_interval"] = 0.5
    return options


def write():
    """Writes :data:`FILE`: for each kind of run and place of a save a checkpoint, and what Lightning does after it.

    That is the rates of ten batches, after a resume and in a run without a stop, and the batches of a resumed run of six epochs.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    net = net_class(pl.LightningModule)
    places = {
        "end of an epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "validation after an epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        "validation within an epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        "within an epoch": {"every_n_train_steps": BATCHES + 2},
        "last batch": {"every_n_train_steps": 2 * BATCHES},
        "end of the run": None,
        "error within an epoch": None,
        "error in the last batch": None,
    }
    files = {}
    for kind, (_, optimizers, accumulated) in KINDS.items():
        for place, options in places.items():
            with tempfile.TemporaryDirectory() as folder:

                def fit(epochs, raise_in=-1, path=None, callbacks=(), kind=kind, place=place, folder=folder):
                    module = net(kind, raise_in)
                    trainer = pl.Trainer(
                        accelerator="cpu",
                        max_epochs=epochs,
                        logger=False,
                        enable_checkpointing=bool(callbacks),
                        callbacks=list(callbacks),
                        enable_progress_bar=False,
                        enable_model_summary=False,
                        default_root_dir=folder,
                        **options_of(kind, place),
                    )
                    try:
                        trainer.fit(module, loader(), loader() if "validation" in place else None, ckpt_path=path)
                    except RuntimeError as error:
                        if "on purpose" not in str(error):
                            raise
                    return module, trainer

                straight, _ = fit(6)
                path = f"{folder}/end.ckpt"
                if place == "end of the run":
                    _, trainer = fit(2)
                    trainer.save_checkpoint(path)
                elif place.startswith("error"):
                    batch = BATCHES + 2 if place == "error within an epoch" else 2 * BATCHES - 1
                    fit(2, batch, callbacks=[OnExceptionCheckpoint(folder, "end")])
                else:
                    saves = dict(options)
                    if "every_n_train_steps" in saves:
                        # Lightning counts the optimizers' steps.
                        saves["every_n_train_steps"] = saves["every_n_train_steps"] * optimizers // accumulated
                    fit(2, callbacks=[ModelCheckpoint(folder, filename="{step:02d}", save_top_k=-1, **saves)])
                    written = sorted(Path(folder).glob("*.ckpt"))
                    # The validations of an epoch are two: the first is within it.
                    path = str(written[-2 if place == "validation within an epoch" else -1])
                checkpoint = torch.load(path, weights_only=True)
                done = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
                resumed, _ = fit(6, path=path)
                files[kind, place] = {
                    "checkpoint": checkpoint,
                    "resumed": resumed.rates[:10],
                    "straight": straight.rates[done : done + 10],
                    "batches": len(resumed.rates),
                }
    content = io.BytesIO()
    torch.save(files, content)
    FILE.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def read():
    """Returns the content of :data:`FILE`."""
    return torch.load(io.BytesIO(gzip.decompress(FILE.read_bytes())), weights_only=True)


if __name__ == "__main__":
    write()
