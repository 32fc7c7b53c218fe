"""Validation every n steps, epochs or minutes."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest

from fabricamp import Callback, ConfigError
from fabricamp.arguments.cadence import Every, validation_times
from fabricamp.callbacks import ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer


class Validates(Classifier):
    """Records the steps of its validations; each micro-batch takes ``seconds``."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.at, self.seconds = [], seconds

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        self.at.append(self.trainer.global_step)


def fitted(interval, *, module=None, ckpt_path=None, **options):
    module = module or Validates()
    settings = {"max_epochs": 4, "num_sanity_val_steps": 0, "val_check_interval": interval}
    trainer = quiet_trainer(**{**settings, **options})
    trainer.fit(module, loader(20), loader(8), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize(
    ("interval", "options", "at"),
    [
        ("6 steps", {}, [6, 12, 18]),
        ("4 steps", {"accumulate_grad_batches": 2}, [4, 8, 12]),  # three steps an epoch, the last with one micro-batch
        ("2 steps", {"accumulate_grad_batches": 2, "partial_window": "carry"}, [2, 4, 6, 8, 10]),
        ("2 epochs", {}, [10, 20]),
        ("7 steps, 1 epoch", {}, [5, 7, 10, 14, 15, 20]),
        ("5 steps, 1 epoch", {}, [5, 10, 15, 20]),
        ("6 steps", {"check_val_every_n_epoch": None}, [6, 12, 18]),
        ("1 hour", {}, []),
    ],
)
def test_steps_and_epochs(interval, options, at):
    assert fitted(interval, **options).at == at


def test_a_time():
    start = time.monotonic()
    at = fitted("0.1 s", module=Validates(seconds=0.02), max_epochs=8).at
    assert 2 <= len(at) <= (time.monotonic() - start) / 0.1  # holds on a slow host, too
    assert at == sorted(set(at))


@pytest.mark.parametrize(
    "interval", ["90 s", "1.5 min", "00:00:01:30", timedelta(seconds=90), {"minutes": 1, "seconds": 30}]
)
def test_words_for_a_time(interval):
    assert validation_times(interval) == Every(interval=timedelta(seconds=90))


def test_checkpoints_have_the_same_words(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every="6 steps", save_top_k=-1, filename="{step}")
    fitted("6 steps", callbacks=[checkpoint], enable_checkpointing=True)
    assert sorted(one.name for one in tmp_path.glob("*.ckpt")) == ["step=12.ckpt", "step=18.ckpt", "step=6.ckpt"]


def test_a_validation_that_was_cut_is_made_up_for(tmp_path):
    class Cuts(Callback):
        def on_validation_start(self, trainer, pl_module):
            os.kill(os.getpid(), signal.SIGTERM)

    checkpoint = ModelCheckpoint(tmp_path, save_last=True, every="1000 steps")
    with pytest.raises(SystemExit):
        fitted("6 steps", callbacks=[checkpoint, Cuts()], enable_checkpointing=True)
    resumed = fitted("6 steps", ckpt_path=next(tmp_path.glob("*.ckpt")))
    assert resumed.at == [6, 12, 18]


@pytest.mark.parametrize(
    ("interval", "options", "words"),
    [
        ("6 stps", {}, r"val_check_interval='6 stps': '6 stps' cannot be read; did you mean 'steps'"),
        ("0 steps", {}, "val_check_interval='0 steps'"),
        ("00:00:00:00", {}, "not allowed; to leave validation out give limit_val_batches=0"),
        (
            "2 steps",
            {"check_val_every_n_epoch": 2},
            "is the whole schedule of validations; leave check_val_every_n_epoch=2 out",
        ),
    ],
)
def test_what_cannot_be_is_refused(interval, options, words):
    with pytest.raises(ConfigError, match=words):
        fitted(interval, **options)
