"""The logger steps of logged values: the rows of each case equal Lightning 2.6's."""

from __future__ import annotations

import csv

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from fabricamp import TrainingModule
from fabricamp.callbacks import LearningRateMonitor
from fabricamp.loggers import CSVLogger, Logger, TensorBoardLogger
from tests.small import Classifier, loader, quiet_trainer


class Rows(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))


class Counts(TrainingModule):
    """Logs the number of the batch: ``a`` at steps, ``e`` over the epoch, ``v`` and ``t`` in evaluations."""

    def __init__(self, own=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.own = own

    def training_step(self, batch, batch_idx):
        self.log("a", float(batch_idx))
        self.log("e", float(batch_idx), on_step=False, on_epoch=True)
        if self.own:
            self.log(self.own, 10.0 * self.global_step)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", float(batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("t", float(batch_idx))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def ones(number):
    return DataLoader(torch.ones(number, 1), batch_size=1)


def epoch(number, *rows):
    return [(step, {**values, "epoch": number}) for step, values in rows]


CASES = {
    "two epochs": (
        {},
        [
            *epoch(0, (1, {"a": 1}), (3, {"a": 3}), (3, {"v": 0.5}), (3, {"e": 1.5})),
            *epoch(1, (5, {"a": 1}), (7, {"a": 3}), (7, {"v": 0.5}), (7, {"e": 1.5})),
            *epoch(2, (8, {"t": 0.5}), (8, {"v": 0.5})),
        ],
    ),
    "validation within windows": (
        {"accumulate_grad_batches": 2, "val_check_interval": 1, "log_every_n_steps": 1, "max_epochs": 1},
        [
            *epoch(0, (0, {"v": 0.5}), (0, {"a": 1}), (0, {"v": 0.5}), (1, {"v": 0.5}), (1, {"a": 3}), (1, {"v": 0.5})),
            *epoch(0, (1, {"e": 1.5})),
            *epoch(1, (2, {"t": 0.5}), (2, {"v": 0.5})),
        ],
    ),
    "learning rates": (
        {"callbacks": LearningRateMonitor("step"), "log_every_n_steps": 3, "max_epochs": 1},
        [
            (2, {"lr-SGD": 0.5}),
            *epoch(0, (2, {"a": 2}), (3, {"v": 0.5}), (3, {"e": 1.5})),
            *epoch(1, (4, {"t": 0.5}), (4, {"v": 0.5})),
        ],
    ),
    "learning rates of epochs": (
        {"callbacks": LearningRateMonitor(), "log_every_n_steps": 100},
        [
            (0, {"lr-SGD": 0.5}),
            *epoch(0, (3, {"v": 0.5}), (3, {"e": 1.5})),
            (4, {"lr-SGD": 0.05}),
            *epoch(1, (7, {"v": 0.5}), (7, {"e": 1.5})),
            *epoch(2, (8, {"t": 0.5}), (8, {"v": 0.5})),
        ],
    ),
    "an axis of one's own": (
        {"own": "step", "max_epochs": 1},
        [
            (10, {"a": 1}),
            (30, {"a": 3}),
            *epoch(0, (3, {"v": 0.5}), (3, {"e": 1.5})),
            *epoch(1, (4, {"t": 0.5}), (4, {"v": 0.5})),
        ],
    ),
    "an epoch of one's own": (
        {"own": "epoch", "max_epochs": 1},
        [
            (1, {"a": 1, "epoch": 10}),
            (3, {"a": 3, "epoch": 30}),
            *epoch(0, (3, {"v": 0.5}), (3, {"e": 1.5})),
            *epoch(1, (4, {"t": 0.5}), (4, {"v": 0.5})),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows(case):
    options, expected = CASES[case]
    options = {"max_epochs": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0, **options}
    module, logger = Counts(options.pop("own", None)), Rows()
    trainer = quiet_trainer(logger=logger, **options)
    trainer.fit(module, ones(4), ones(2))
    trainer.test(module, ones(2), verbose=False)
    trainer.validate(module, ones(2), verbose=False)
    assert logger.rows == expected


def test_an_evaluation_alone_stands_at_0():
    logger = Rows()
    quiet_trainer(logger=logger).test(Counts(), ones(2), verbose=False)
    assert logger.rows == [(0, {"epoch": 0, "t": 0.5})]


def test_the_epoch_is_in_the_files(tmp_path):
    loggers = [CSVLogger(tmp_path, "csv", "run"), TensorBoardLogger(tmp_path, "tb", "run")]
    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=4, logger=loggers, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(16), loader(4))
    with loggers[0].metrics_file.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "epoch", "loss", "val_loss"]
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "3"), ("0", "3"), ("1", "7"), ("1", "7")]
    events = EventAccumulator(str(loggers[1].log_dir))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("epoch")] == [(3, 0), (3, 0), (7, 1), (7, 1)]
