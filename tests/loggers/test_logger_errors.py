"""Loggers with a full, missing or slow disk, or an unreachable server: training continues and reports the lost values."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fabricamp import Callback
from fabricamp.callbacks import AsyncCheckpoint, LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger, logger_collection
from tests.small import Classifier, loader, quiet_trainer

STEPS = 16


class At(Callback):
    """Runs an action before a step, after the disk has written or refused all earlier values."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("step")): action for name, action in actions.items()}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if action := self.actions.get(trainer.global_step):
            for logger in trainer.loggers:
                logger.save()
            action()


def fit(logger, *callbacks, **options):
    """Trains and logs 16 steps; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        trainer = quiet_trainer(
            max_epochs=2,
            log_every_n_steps=1,
            logger=logger,
            enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
            callbacks=list(callbacks),
            **options,
        )
        trainer.fit(Classifier(), loader(32, 4))
    assert trainer.global_step == STEPS
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


def csv_logger(folder):
    return CSVLogger(folder, None, "log", flush_logs_every_n_steps=1)


def json_logger(folder):
    return JSONLinesLogger(folder, None, "log", flush_logs_every_n_steps=1)


def tensorboard_logger(folder):
    return TensorBoardLogger(folder, None, "log", max_queue=0)


def log_of(logger):
    """Returns the logger's file; hparams.yaml and run.json are left out."""
    (file,) = (one for one in logger.folder.iterdir() if one.name not in ("hparams.yaml", "run.json"))
    return file


def steps_of(logger):
    """Returns the steps that have a loss in the log."""
    if isinstance(logger, CSVLogger):
        with logger.metrics_file.open() as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    if isinstance(logger, JSONLinesLogger):
        rows = map(json.loads, logger.metrics_file.read_text().splitlines())
        return [row["step"] for row in rows if "loss" in row]
    events = EventAccumulator(str(logger.log_dir))
    events.Reload()
    return [one.step for one in events.Scalars("loss")]


KINDS = pytest.mark.parametrize("kind", [csv_logger, json_logger, tensorboard_logger])


@KINDS
def test_a_deleted_folder(tmp_path, kind):
    logger = kind(tmp_path / "logs")
    told = fit(logger, At(step6=lambda: shutil.rmtree(tmp_path / "logs")), ModelCheckpoint(tmp_path / "checkpoints"))
    assert len(told) == 2
    assert "cannot write" in told[0]
    assert str(logger.log_dir) in told[0]
    assert "No such file or directory; training continues" in told[0]
    assert "6 rows are lost, of the steps 0 to 5" in told[1]
    assert steps_of(logger) == list(range(6, 16))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@KINDS
def test_a_folder_that_cannot_be_written_for_a_while(tmp_path, kind):
    """A file replaces the folder, because root could still write to a read-only folder."""
    logger, folder, aside = kind(tmp_path / "logs"), tmp_path / "logs" / "log", tmp_path / "aside"

    def block():
        folder.rename(aside)
        folder.write_text("")

    def unblock():
        folder.unlink()
        aside.rename(folder)

    told = fit(
        logger, At(step6=block, step10=unblock), ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4)
    )
    assert len(told) == 1
    assert "Not a directory; training continues" in told[0]
    assert str(folder) in told[0]
    assert steps_of(logger) == list(range(16))


@KINDS
def test_a_folder_that_cannot_be_written_any_more(tmp_path, kind):
    logger, folder = kind(tmp_path / "logs"), tmp_path / "logs" / "log"

    def block():
        folder.rename(tmp_path / "aside")
        folder.write_text("")

    told = fit(logger, At(step6=block), LearningRateMonitor(), AsyncCheckpoint(tmp_path / "checkpoints"))
    assert len(told) == 2
    assert "Not a directory; training continues" in told[0]
    assert f"rows are lost, of the steps 6 to 15: cannot write {folder}" in told[1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def on_a_full_disk(folder, kind, sender):
    """Runs in a separate process in which files cannot grow between the steps 6 and 10."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    logger = kind(folder)

    def fill():
        file = log_of(logger)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 7, resource.RLIM_INFINITY))

    def free():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    sender.send((fit(logger, At(step6=fill, step10=free)), steps_of(logger)))


@KINDS
def test_a_full_disk_that_has_room_again(tmp_path, kind):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=on_a_full_disk, args=(tmp_path, kind, sender))
    process.start()
    assert receiver.poll(100)
    told, steps = receiver.recv()
    process.join(60)
    assert len(told) == 1
    assert "File too large; training continues" in told[0]
    assert str(tmp_path) in told[0]
    assert steps == list(range(16))  # no partial row and no duplicate


def in_a_read_only_folder(folder, kind, sender):
    """Runs in a separate process that is not root and cannot write between the steps 6 and 10."""
    # A first fit imports everything, as the packages may be readable only by root.
    fit(kind(folder / "first"))
    if os.geteuid() == 0:
        os.seteuid(65534)
    logger = kind(folder / "logs")

    def allow(here, file):
        one = log_of(logger)
        one.chmod(file)
        logger.folder.chmod(here)

    actions = At(step6=lambda: allow(0o555, 0o444), step10=lambda: allow(0o755, 0o644))
    sender.send((fit(logger, actions), steps_of(logger)))


@KINDS
def test_a_folder_that_is_read_only_for_a_while(kind):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # pytest's own are closed to others
        Path(name).chmod(0o777)
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=in_a_read_only_folder, args=(Path(name), kind, sender))
        process.start()
        sender.close()  # otherwise poll would not notice that the child has ended
        assert receiver.poll(100)
        told, steps = receiver.recv()
        process.join(60)
    assert len(told) == 1
    assert f"cannot write {name}" in told[0]
    assert "Permission denied; training continues" in told[0]
    assert steps == list(range(16))


class Own(Logger):
    """A user's logger: keeps the values, but raises ``error`` at the steps in ``steps``."""

    def __init__(self, error=None, steps=(), wait=None):
        self.error, self.steps, self.wait = error, steps, wait
        self.kept = []
        self.barriers = []

    def log_metrics(self, metrics, step):
        if step in self.steps:
            raise self.error
        self.kept.append(step)

    def barrier(self, step):
        self.barriers.append(step)
        if self.wait is not None:
            self.wait(step)


def test_a_server_that_cannot_be_reached(tmp_path):
    own, beside = Own(ConnectionError("no route"), (5, 6, 9)), csv_logger(tmp_path)
    told = fit([own, beside], ModelCheckpoint(tmp_path / "checkpoints"))
    assert told == [
        "Own: no route; training continues, and lost values are reported at its end",
        "Own: 3 rows are lost, of the steps 5 to 9: no route",
    ]
    assert own.kept == [step for step in range(16) if step not in own.steps]
    assert steps_of(beside) == list(range(16))
    assert own.barriers == [8, 16]


def test_a_mistake_in_a_logger_is_raised(tmp_path):
    with pytest.raises(ValueError, match="a mistake"):
        fit(Own(ValueError("a mistake"), (5,)))

    def mistake(step):
        raise ValueError("a mistake")

    checkpoint = ModelCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="a mistake"):
        fit(Own(wait=mistake), checkpoint)
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=0-step=8.ckpt"]  # written although the logger failed


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
def test_a_logger_that_is_slow_is_given_up(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(logger_collection, "BARRIER_SECONDS", 0.3)
    asked, over = threading.Event(), threading.Event()
    own = Own(wait=lambda step: (asked.set(), over.wait(100)))
    told = fit(own, kind(tmp_path, save_top_k=-1, monitor="step"))
    assert asked.wait(60)
    over.set()
    (only,) = told
    assert only.startswith("Own: its values up to step 8 are not on disk after 0.3 s; checkpoints no longer wait")
    assert own.barriers == [8]  # not called again before it has returned
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_while_a_checkpoint_waits_is_told(tmp_path):
    def refuse(step):
        raise TimeoutError("the server is asleep")

    told = fit(Own(wait=refuse), ModelCheckpoint(tmp_path))
    assert told == ["Own: the server is asleep; training continues, and lost values are reported at its end"]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_step_does_not_wait_for_the_loggers_of_an_asynchronous_checkpoint(tmp_path):
    class Step(Callback):
        now = 0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            Step.now = trainer.global_step

    def until_training_went_on(step):
        deadline = time.monotonic() + 60
        while Step.now <= step:
            assert time.monotonic() < deadline, "the step waits"
            time.sleep(0.01)
        seen.append(list(tmp_path.glob(f"*step={step}.ckpt")))

    seen = []
    own = Own(wait=until_training_went_on)
    checkpoint = AsyncCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, monitor="step")
    assert fit(own, checkpoint, Step()) == []
    assert own.barriers == [5, 10, 15]
    assert seen == [[], [], []]  # the checkpoint gets its name only after the barrier
    assert len(list(tmp_path.iterdir())) == 3
