"""docs/messages.md: every message that it quotes is what a mistake gives, word for word."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabricamp import Trainer, TrainingModule
from fabricamp._utils.say_once import say_once
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
QUOTED = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```", PAGE, flags=re.DOTALL | re.MULTILINE))


class M(Classifier):
    pass


def changed(**members):
    return type("M", (Classifier,), members)


def fit(module=None, data=None, **options):
    trainer = quiet_trainer(max_epochs=1, **options)
    trainer.fit(module or M(), loader(16) if data is None else data)
    return trainer


def with_plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


def sets_before_its_base(self):
    self.net = torch.nn.Linear(1, 1)


def of_the_first_batch(self, batch):
    return self.net(batch[0][:1]).mean()


def cannot_be_built():
    class M(Classifier):
        def __init__(self, size):
            super().__init__()

    fit(M(3)).save_checkpoint("hyper.ckpt")
    M.load_from_checkpoint("hyper.ckpt")


class Narrow(TrainingModule):
    def __init__(self, classes=3):
        super().__init__()
        self.net = torch.nn.Linear(8, classes)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wider(Narrow):
    def __init__(self):
        super().__init__(classes=4)


class Linear(Narrow):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * torch.nan


def does_not_fit():
    fit(Narrow()).save_checkpoint("saved.ckpt")
    Wider.load_from_checkpoint("saved.ckpt")


def weights_only():
    fit().save_checkpoint("weights.ckpt", weights_only=True)
    quiet_trainer(max_epochs=2).fit(M(), loader(16), ckpt_path="weights.ckpt")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.arange(8.0), torch.tensor(1))] * 64)


def logs_a_vector(self, batch, batch_idx):
    self.log("x", torch.zeros(8, 3))
    return of_the_first_batch(self, batch)


def with_its_weight(self, batch, batch_idx):
    return torch.nn.functional.linear(batch[0][:1], self.net.weight)


def logs_nan(self, batch, batch_idx):
    loss = of_the_first_batch(self, batch) * torch.nan
    self.log("loss", loss)
    return loss


ERRORS = {
    "Trainer has no argument": lambda: Trainer(gpus=1),
    "accelerator='gpu' needs a CUDA GPU": lambda: Trainer(accelerator="gpu"),
    "precision is not known": lambda: Trainer(precision="o6"),
    "strategy is not known": lambda: Trainer(strategy="deepspeed"),
    "this run was not started on several machines": lambda: Trainer(num_nodes=2, accelerator="cpu", devices=2),
    "accumulate_grad_batches works with automatic optimization only": lambda: fit(
        changed(automatic_optimization=False)(), accumulate_grad_batches=2
    ),
    "fit got, not an instance": lambda: fit(M),
    "sets before its base is initialised": changed(__init__=sets_before_its_base),
    "has no configure_optimizers": lambda: fit(changed(configure_optimizers=TrainingModule.configure_optimizers)()),
    "training_step returns no value": lambda: fit(changed(training_step=lambda self, batch, batch_idx: None)()),
    "the loss has no graph": lambda: fit(changed(training_step=lambda self, batch, batch_idx: torch.tensor(1.0))()),
    "training_step has to return a scalar": lambda: fit(
        changed(training_step=lambda self, batch, batch_idx: self.net(batch[0]).sum(1))(), loader(16, 8)
    ),
    "there is nothing to train on": lambda: quiet_trainer(max_epochs=1).fit(M()),
    "is a dataset; wrap it": lambda: fit(data=TensorDataset(torch.zeros(4, 8))),
    "has no batches": lambda: fit(data=[]),
    "a ReduceLROnPlateau scheduler needs 'monitor'": lambda: fit(changed(configure_optimizers=with_plateau)()),
    "found no metric": lambda: fit(Narrow(), callbacks=EarlyStopping("val_los")),
    "a logged value has one element": lambda: fit(changed(training_step=logs_a_vector)()),
    "mixes fp32 values with half weights": lambda: fit(
        type("M", (Narrow,), {"training_step": with_its_weight})(), precision="O5"
    ),
    "the gradients were not finite": lambda: fit(Linear(), loader(80), nan_policy="raise"),
    "there is no checkpoint": lambda: quiet_trainer(max_epochs=1).fit(M(), loader(16), ckpt_path="nix.ckpt"),
    "no ModelCheckpoint has saved one yet": lambda: quiet_trainer(
        max_epochs=1, enable_checkpointing=True, callbacks=ModelCheckpoint()
    ).fit(M(), loader(16), ckpt_path="last"),
    "cannot be built from": cannot_be_built,
    "does not fit the model": does_not_fit,
    "holds weights only": weights_only,
    "a CUDA graph needs a CUDA GPU": lambda: fit(cuda_graph=True),
    "a stream that two workers read": lambda: fit(data=DataLoader(Stream(), 8, num_workers=2)),
    "is not offered by fabricamp": lambda: __import__("fabricamp").Fabric,
}
LOGGED = {
    "is not a hook; did you mean": lambda: fit(changed(on_train_epoch_ends=lambda self: None)()),
    "val_dataloaders are given, but there is no validation_step": lambda: quiet_trainer(max_epochs=1).fit(
        type("M", (Narrow,), {})(), loader(16), loader(16)
    ),
    "logs nothing": lambda: M().log("x", 1.0),
    "loss is nan, and training continues": lambda: fit(
        changed(training_step=logs_nan)(), loader(64), log_every_n_steps=1
    ),
}


def test_every_quotation_has_a_mistake_that_gives_it():
    assert sorted(QUOTED) == sorted([*ERRORS, *LOGGED])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def without_what_differs(message):
    message = message.replace(str(Path.cwd()), "FOLDER").replace("cannot_be_built.<locals>.", "")
    return re.sub(r"torch \d\S+", "torch N", message)


@pytest.mark.parametrize("heading", ERRORS)
def test_the_mistake_gives_the_error_that_is_quoted(heading):
    with pytest.raises(Exception) as raised:
        ERRORS[heading]()
    assert without_what_differs(QUOTED[heading]) in without_what_differs(str(raised.value))


@pytest.mark.parametrize("heading", LOGGED)
def test_the_mistake_logs_the_line_that_is_quoted(heading, caplog):
    say_once.cache_clear()  # an earlier test of this process may have made the same mistake
    with caplog.at_level(logging.INFO, logger="fabricamp"):
        LOGGED[heading]()
    assert QUOTED[heading] in [record.getMessage() for record in caplog.records]
