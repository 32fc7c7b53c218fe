"""fabricamp's callbacks in Lightning's own Trainer, as in a script with only some of its imports changed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import EMA, AsyncCheckpoint, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ProgressBar

pl = pytest.importorskip("lightning.pytorch", reason="needs the package lightning")


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(callback):
    return pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[callback],
    )  # fmt: skip


def loader():
    return DataLoader(torch.zeros(2, 1))


class Derived(EarlyStopping):
    pass


@pytest.mark.parametrize(
    ("callback", "name", "has_one"),
    [
        (ModelCheckpoint, "ModelCheckpoint", True),
        (lambda: ModelCheckpoint(save_on_exception=True), "ModelCheckpoint", True),
        (AsyncCheckpoint, "AsyncCheckpoint", False),
        (lambda: EarlyStopping("loss"), "EarlyStopping", True),
        (lambda: Derived("loss"), "EarlyStopping", True),
        (LearningRateMonitor, "LearningRateMonitor", True),
        (ProgressBar, "ProgressBar", True),
        (EMA, "EMA", False),
    ],
)
@pytest.mark.parametrize("run", ["fit", "test"])
def test_the_first_hook_says_what_is_mixed_and_what_to_import(run, callback, name, has_one):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as caught:
            getattr(trainer(callback()), run)(Module(), loader())
    words = str(caught.value)
    assert words.startswith(f"{name} of fabricamp.callbacks was given to Lightning's Trainer")
    assert "from fabricamp import Trainer" in words
    assert (f"from lightning.pytorch.callbacks import {name}" in words) == has_one


def test_a_callback_on_the_bare_base_suits_both():
    class Counts(Callback):
        steps = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.steps += 1

    counts = Counts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(counts).fit(Module(), loader())
    assert counts.steps == 2
