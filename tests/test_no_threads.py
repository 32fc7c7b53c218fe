"""Runs on a system that starts no thread, or none of a name: what needs one says so by name, before it waits for anything."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, Trainer
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint.checkpoint_io import AsyncCheckpointIO
from fabricamp.engine.report import environment_info
from fabricamp.errors import CheckpointError, ConfigError, NoThreadError
from fabricamp.loggers import CSVLogger, JSONLinesLogger, MLFlowLogger, TensorBoardLogger
from fabricamp.loggers.write_queue import RecordQueue
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, data, loader, quiet_trainer

LIMITS = "needs a thread, and the system starts none (can't start new thread): raise its limit of processes"


def starts_none(monkeypatch, name=""):
    """From now on no thread can be started whose name contains ``name``, as at a limit of the system."""
    start = threading.Thread.start

    def refused(thread):
        if name in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


class WithHyperparameters(Classifier):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters()


class Steps(Callback):
    steps = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steps += 1


def test_without_loggers_and_workers_no_thread_is_needed(monkeypatch, tmp_path):
    starts_none(monkeypatch)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path)
    trainer.fit(Classifier(), loader(16), loader(8))
    assert trainer.global_step == 4
    torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)


@pytest.mark.parametrize("module", [Classifier, WithHyperparameters])
@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger, TensorBoardLogger, None])
def test_loggers(monkeypatch, tmp_path, kind, module):
    starts_none(monkeypatch)
    monkeypatch.setattr(RecordQueue, "SECONDS", 3600)  # a wait for the disk would show
    steps = Steps()
    logger = True if kind is None else kind(tmp_path)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=logger,
        callbacks=[steps],
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    with pytest.raises(NoThreadError) as error:
        trainer.fit(module(), loader(16))
    assert f"a logger {LIMITS}" in str(error.value)
    assert str(error.value).endswith("or give logger=False")
    assert steps.steps == 0


def test_a_server(monkeypatch):
    starts_none(monkeypatch)
    trainer = quiet_trainer(max_epochs=1, logger=MLFlowLogger(tracking_uri="http://127.0.0.1:9"))
    with pytest.raises(NoThreadError, match="a question to http://127.0.0.1:9 needs a thread"):
        trainer.fit(Classifier(), loader(16))


def test_a_checkpoint_does_not_wait_for_values_without_a_thread_that_waits(monkeypatch, tmp_path):
    starts_none(monkeypatch, "fabricamp-log-barrier")
    checkpoint = ModelCheckpoint(tmp_path / "files", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=1,
        logger=CSVLogger(tmp_path, name="", version="run"),
        callbacks=[checkpoint],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), loader(16))
    told = [
        str(one.message)
        for one in caught
        if "the checkpoint of step 2 does not wait for its values" in str(one.message)
    ]
    assert len(told) == 1
    assert len([*(tmp_path / "files").glob("*.ckpt")]) == 2
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 5


@pytest.mark.parametrize("through", ["callback", "plug-in"])
def test_asynchronous_checkpoints(monkeypatch, tmp_path, through):
    steps = Steps()
    callbacks = [AsyncCheckpoint(tmp_path, every_n_train_steps=1)] if through == "callback" else []
    plugins = [AsyncCheckpointIO()] if through == "plug-in" else []
    trainer = quiet_trainer(max_epochs=1, callbacks=[*callbacks, steps], plugins=plugins, enable_checkpointing=True)
    starts_none(monkeypatch)
    with pytest.raises((ConfigError, CheckpointError)) as error:
        trainer.fit(Classifier(), loader(16))
    assert f"a write in the background {LIMITS}" in str(error.value)
    assert steps.steps == 0


def test_an_asynchronous_checkpoint_later_in_the_run(monkeypatch, tmp_path):
    class Limit(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                starts_none(monkeypatch)

    trainer = quiet_trainer(
        max_epochs=1, callbacks=[Limit(), AsyncCheckpoint(tmp_path, every_n_train_steps=3)], enable_checkpointing=True
    )
    with pytest.raises(
        CheckpointError, match="the checkpoint was not written: a write in the background needs a thread"
    ):
        trainer.fit(Classifier(), loader(16))


def test_a_loaders_threads(monkeypatch):
    starts_none(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread") as error:
        quiet_trainer(max_epochs=1).fit(Classifier(), DataLoader(data(8), 4, num_workers=1))
    (note,) = error.value.__notes__
    assert note.startswith("fabricamp: the system starts no thread: raise its limit of processes")
    assert "num_workers" in note


def ranks_without_watch():
    monkeypatch = pytest.MonkeyPatch()
    starts_none(monkeypatch, "fabricamp-")
    with pytest.raises(NoThreadError, match="the watch over the other ranks needs a thread"):
        quiet_trainer(max_epochs=1, devices="auto", strategy="ddp").fit(Classifier(), loader(16))
    return True


def test_several_ranks():
    assert run_ranks(ranks_without_watch, 2) == [True, True]


def test_what_is_noted_of_the_code(monkeypatch):
    """A thread limits git's time; without one nothing is noted, and git is not left running."""
    environment_info._repository.cache_clear()
    starts_none(monkeypatch)
    assert environment_info.code_of(Classifier()) == {}
    environment_info._repository.cache_clear()
