"""A run that is killed and resumed leaves the same log as a run that was never killed: every row once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fabricamp import Callback
from fabricamp.callbacks import AsyncCheckpoint, LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from tests.kill.attempts import import_everything
from tests.small import Classifier, loader, quiet_trainer

EPOCHS = 4


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


class Net(Classifier):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_end(self):
        # A point on another axis must be neither lost nor logged twice.
        for logger in self.loggers:
            logger.log_metrics({"by_epoch": float(self.global_step)}, self.current_epoch)


class Kill(Callback):
    def __init__(self, step, *, written):
        self.step, self.written = step, written

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            for logger in trainer.loggers if self.written else ():
                logger.save()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, kind, kill, **options):
    """Trains five steps an epoch, with each of these loggers in a named folder."""
    torch.manual_seed(0)
    warnings.simplefilter("error", RuntimeWarning)
    flush, max_steps = options.pop("flush", 100), options.pop("max_steps", -1)
    loggers = [
        CSVLogger(folder, "csv", "run", flush_logs_every_n_steps=flush),
        # With flush=1 also values after the checkpoint are on disk before the kill.
        TensorBoardLogger(folder, "tb", "run", max_queue=0 if flush == 1 else 10),
    ]
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        max_steps=max_steps,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[LearningRateMonitor(), kind(folder / "checkpoints", **options), Kill(kill, written=flush == 1)],
        logger=loggers,
        enable_checkpointing=True,
    )
    trainer.fit(Net(), loader(20), loader(8), ckpt_path="auto")


def run(*args, **options):
    """Runs ``train`` in a separate process; returns its exit code."""
    process = multiprocessing.get_context("fork").Process(target=train, args=args, kwargs=options)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def logs(folder):
    events = EventAccumulator(str(folder / "tb" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return (folder / "csv" / "run" / "metrics.csv").read_text(), curves


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder, ModelCheckpoint, -1) == 0
    text, curves = logs(folder)
    # Two rows per step: values and rate.  Four per epoch: rate, values, validation values, and the point on the epoch axis.
    assert text.count("\n") == 1 + 20 * 2 + EPOCHS * 4
    assert curves["both_epoch"] == [
        (step, value) for step, (_, value) in zip((4, 9, 14, 19), curves["both_epoch"], strict=True)
    ]
    assert [step for step, _ in curves["both_step"]] == list(range(20))
    assert curves["hp_metric"] == [(0, -1.0)]
    return text, curves


@pytest.mark.parametrize("flush", [1, 100])
@pytest.mark.parametrize(
    ("kind", "options", "kills"),
    [
        (ModelCheckpoint, {}, (10, 17)),  # right after an epoch's end, and within an epoch
        (ModelCheckpoint, {"every_n_train_steps": 3}, (7, 12)),
        (AsyncCheckpoint, {"every": "2 steps, 1 epoch"}, (5, 14)),  # step 4's save waits for step 2's write
    ],
)
def test_every_row_is_there_once(tmp_path, straight, kind, options, kills, flush):
    for kill in kills:
        assert run(tmp_path, kind, kill, flush=flush, **options) == -signal.SIGKILL
    assert run(tmp_path, kind, -1, flush=flush, **options) == 0
    text, curves = logs(tmp_path)
    assert text == straight[0]
    assert curves == straight[1]


def test_rows_that_a_checkpoint_counts_are_on_disk_with_it(tmp_path):
    assert run(tmp_path, ModelCheckpoint, 10) == -signal.SIGKILL
    text, curves = logs(tmp_path)
    assert [line.split(",")[0] for line in text.splitlines()].count("9") == 4  # rate, step, validation, epoch
    assert curves["both_epoch"][-1][0] == 9
    assert [step for step, _ in curves["loss"]] == list(range(10))


def test_a_run_that_had_ended_within_an_epoch_keeps_its_end_until_it_goes_on(tmp_path, straight):
    """Restarted with the same limits, the run has nothing to do; with higher limits the epoch ends a second time."""
    ended = []
    for _ in range(2):
        assert run(tmp_path, ModelCheckpoint, -1, max_steps=8) == 0
        ended.append(logs(tmp_path))
    assert ended[0] == ended[1]
    assert [step for step, _ in ended[1][1]["both_epoch"]] == [4, 7]
    assert run(tmp_path, ModelCheckpoint, -1) == 0
    assert logs(tmp_path) == straight
