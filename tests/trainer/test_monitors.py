"""A monitored name that nothing logs is told at the first batch, and one that may still come is not."""

from __future__ import annotations

import logging

import pytest
import torch
import torchmetrics

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer

SOFT = "nothing has logged it yet"


class Told(Callback):
    """Keeps the number of warnings before each batch."""

    def __init__(self, caplog):
        self._caplog = caplog
        self.after = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.after.append(len(self._caplog.records))


class Plateau(Classifier):
    """Has a plateau schedule that watches a misspelt name."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_los"}}


def told(caplog, module, *callbacks, validates=True, error=ConfigError, **options):
    """Returns the warnings of a fit that ends in ``error``, and the number of them before each batch."""
    when = Told(caplog)
    trainer = quiet_trainer(
        **{"max_epochs": 1, "callbacks": [*callbacks, when], "enable_checkpointing": True, **options}
    )
    loaders = [loader(), loader()] if validates else [loader()]
    with caplog.at_level(logging.WARNING, "fabricamp"):
        if error is None:
            trainer.fit(module, *loaders)
        else:
            with pytest.raises(error):
                trainer.fit(module, *loaders)
    return caplog.messages, when.after


@pytest.mark.parametrize(
    ("monitor", "what"),
    [
        (lambda name: ModelCheckpoint(monitor=name), "ModelCheckpoint(monitor='val_los')"),
        (EarlyStopping, "EarlyStopping(monitor='val_los')"),
        (None, "ReduceLROnPlateau with monitor='val_los'"),
    ],
)
def test_a_misspelt_name_is_told_at_the_first_batch(caplog, monitor, what):
    module = Plateau() if monitor is None else Classifier()
    callbacks = [ModelCheckpoint()] if monitor is None else [monitor("val_los")]
    messages, before = told(caplog, module, *callbacks)
    assert messages == [f"{what}: {SOFT}; did you mean 'val_loss'?"]
    assert before == [0] + [1] * 7


def test_a_name_of_training_is_told_without_a_validation(caplog):
    messages, before = told(caplog, Classifier(), EarlyStopping("los"), validates=False)
    assert messages == [f"EarlyStopping(monitor='los'): {SOFT}; did you mean 'loss'?"]
    assert before == [0] + [1] * 7


def test_without_a_sanity_check_the_first_validation_comes_first(caplog):
    options = {"num_sanity_val_steps": 0, "val_check_interval": 4}
    messages, before = told(caplog, Classifier(), EarlyStopping("train_acc", check_on_train_epoch_end=True), **options)
    assert messages == [f"EarlyStopping(monitor='train_acc'): {SOFT} (logged so far: loss, val_loss)"]
    assert before == [0] * 4 + [1] * 4


def test_a_trial_run_tells_of_it(caplog):
    messages, _ = told(caplog, Classifier(), EarlyStopping("val_los"), error=None, fast_dev_run=True)
    assert [one.startswith("EarlyStopping(monitor='val_los')") for one in messages] == [True]


class LogsLater(Classifier):
    """Logs what the sanity check and the first batch do not show."""

    def on_train_epoch_end(self):
        self.log("train_acc", 0.5)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log_dict({"val_map": 0.5, "val_f1": 0.1})


class LogsToo(Callback):
    """Publishes a value itself."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.callback_metrics["of_callback"] = torch.tensor(1.0)


@pytest.mark.parametrize("name", ["loss", "val_loss", "train_acc", "val_map", "val_f1", "of_callback", "lr-SGD"])
def test_a_name_that_may_still_come_is_not_told(caplog, name):
    callbacks = [LogsToo(), LearningRateMonitor("step"), EarlyStopping(name), ModelCheckpoint(monitor=name)]
    options = {"error": None, "logger": True, "log_every_n_steps": 1}
    messages, _ = told(caplog, LogsLater(), *callbacks, **options)
    assert messages == []


BOTH_ENDS = "whole/name"


def log_later(module, part):
    module.log("helped/" + part, 0.5)


class Composes(Classifier):
    """Logs names, composed of parts, only after the sanity check and the first batch."""

    SHARE = "share"

    def __init__(self):
        super().__init__()
        self.ends = {"low": 0.1}
        measured = {"acc": torchmetrics.MeanMetric(), "f1": torchmetrics.MeanMetric()}
        self.train_metrics = torchmetrics.MetricCollection(measured, prefix="train/", postfix="_all")

    def on_train_epoch_end(self):
        for metric in self.train_metrics.values():
            metric.update(1.0)
        self.log_dict(self.train_metrics.compute())
        for kind, end in (("mean", 0.5), *self.ends.items()):
            self.log(f"epoch_{kind}", end)
            self.log("%s/percent" % kind, end)  # noqa: UP031
        self.log(self.SHARE, 0.5)
        self.log(BOTH_ENDS, 0.5)
        log_later(self, "part")
        self.log("rare", 0.5, on_epoch=True)


COMPOSED = [
    "train/acc_all",
    "train/f1_all",
    "epoch_mean",
    "epoch_low",
    "low/percent",
    "share",
    "whole/name",
    "helped/part",
    "rare",
]


@pytest.mark.parametrize("name", COMPOSED)
def test_a_name_that_is_composed_later_is_not_told(caplog, name):
    callbacks = [EarlyStopping(name, strict=False), ModelCheckpoint(monitor=name)]
    messages, _ = told(caplog, Composes(), *callbacks, error=None)
    assert messages == []


def test_a_part_that_nothing_shows_may_come(caplog):
    """When the name is needed and is not there, it is an error."""
    messages, _ = told(caplog, Composes(), ModelCheckpoint(monitor="epoch_others"))
    assert messages == []


class ComposesNow(Classifier):
    """Composes the name that it logs in a validation."""

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        for kind in ("loss", "cost"):
            self.log(f"val_{kind}", loss, on_step=False, on_epoch=True)


@pytest.mark.parametrize("name", ["val_los", "vall_loss", "val_costs", "vl_cost"])
def test_a_misspelt_part_of_a_composed_name_is_told(caplog, name):
    messages, _ = told(caplog, ComposesNow(), EarlyStopping(name))
    assert [SOFT in one for one in messages] == [True]


@pytest.mark.parametrize("name", ["epoch", "step"])
def test_what_a_checkpoint_always_knows(caplog, name):
    messages, _ = told(caplog, Classifier(), ModelCheckpoint(monitor=name), error=None)
    assert messages == []


def test_names_with_both_forms_and_of_several_loaders(caplog):
    class Both(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("both", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    names = ["both", "both_step", "both_epoch", "val_loss/dataloader_idx_1"]
    trainer = quiet_trainer(max_epochs=1, callbacks=[EarlyStopping(name) for name in names])
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer.fit(Both(), loader(), [loader(), loader()])
    assert caplog.messages == []
