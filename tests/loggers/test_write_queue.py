"""The thread that writes the loggers' files: a disk that hangs, a process that ends or forks, an error in the thread."""

from __future__ import annotations

import atexit
import multiprocessing
import threading

import pytest

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger, logger_collection
from fabricamp.loggers.append_file import AppendFile
from fabricamp.loggers.write_queue import RecordQueue, WriteQueue
from tests.loggers.test_logger_errors import KINDS, csv_logger, fit, json_logger, steps_of, tensorboard_logger
from tests.small import Classifier, loader, quiet_trainer


class Until(Callback):
    """Waits at the second step until the thread has begun its first write."""

    def __init__(self, begun):
        self.begun = begun

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1:
            assert self.begun.wait(60)


class Hanging:
    """A disk on which every write hangs until ``over`` is set."""

    def __init__(self, monkeypatch):
        self.over, self.begun, self.writes = threading.Event(), threading.Event(), 0
        append = AppendFile.append

        def hangs(file, records):
            self.writes += 1
            self.begun.set()
            self.over.wait(100)
            append(file, records)

        self._monkeypatch = monkeypatch
        monkeypatch.setattr(AppendFile, "append", hangs)
        self._answers_within(0.2)

    def goes_on(self):
        """Ends the hang, and raises the time limits for a busy machine."""
        self._answers_within(60)
        self.over.set()

    def _answers_within(self, seconds):
        self._monkeypatch.setattr(RecordQueue, "SECONDS", seconds)
        self._monkeypatch.setattr(logger_collection, "BARRIER_SECONDS", seconds)


@KINDS
def test_a_disk_that_hangs_holds_no_step_up(tmp_path, monkeypatch, kind):
    disk, logger = Hanging(monkeypatch), kind(tmp_path / "logs")
    told = fit(logger, Until(disk.begun), ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, monitor="step"))
    first, second = told
    assert "not on disk after 0.2 s; checkpoints no longer wait for them" in first
    assert "16 rows are lost, of the steps 0 to 15: " in second
    assert "no answer within 0.2 s" in second
    assert disk.writes == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2

    # The abandoned thread finishes its write first; only then the new thread appends.
    disk.goes_on()
    assert fit(logger) == []
    assert steps_of(logger)[-16:] == list(range(16))


@KINDS
def test_what_waits_for_a_disk_that_hangs_is_limited(tmp_path, monkeypatch, kind):
    disk = Hanging(monkeypatch)
    logger = kind(tmp_path)
    monkeypatch.setattr(type(logger), "MOST_WAITING", 3 * 64 if kind is tensorboard_logger else 3)
    logger = kind(tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    assert disk.begun.wait(60)
    with pytest.warns(RuntimeWarning) as told:  # noqa: PT031 - what several calls tell in all
        for step in range(1, 16):
            logger.log_metrics({"loss": 0.0}, step)
        disk.goes_on()
        logger.barrier(0)
        logger.close()
        logger.trouble.sum_up()
    assert "the disk does not answer; training continues" in str(told[0].message)
    assert "13 rows are lost, of the steps 1 to 13: " in str(told[-1].message)
    assert steps_of(logger) == [0, 14, 15]


@KINDS
def test_what_is_to_be_written_is_there_when_a_process_ends_without_close(tmp_path, monkeypatch, kind):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    logger = kind(tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    for one in at_exit:
        one()
    assert steps_of(logger) == [0]
    gone = []
    monkeypatch.setattr(atexit, "unregister", gone.append)
    logger.close()
    assert gone == at_exit


def log_elsewhere(logger):
    logger.log_metrics({"loss": 0.0}, 1)
    logger.close()


@KINDS
def test_a_forked_process_writes_what_it_is_given(tmp_path, kind):
    logger = kind(tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    logger.save()  # starts the thread, which does not exist in a forked child
    child = multiprocessing.get_context("fork").Process(target=log_elsewhere, args=(logger,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    written = len(list(logger.folder.iterdir()))
    assert written == (2 if kind is tensorboard_logger else 1)
    if kind is not tensorboard_logger:
        assert steps_of(logger) == [0, 1]


class Says(Callback):
    """Logs a value that JSON lines cannot hold."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.logger.log_metrics({"a": "b"}, 3)


def test_a_mistake_in_the_thread_ends_training(tmp_path):
    with pytest.raises(TypeError, match="must be real number, not str"):
        fit(json_logger(tmp_path), Says())
    with pytest.raises(TypeError, match="must be real number, not str"):
        fit(JSONLinesLogger(tmp_path), Says())  # the error is raised at the end of the fit


def test_the_writer_of_tensorboard_and_the_logger_write_one_file_in_order(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    logger.experiment.add_scalar("loss", 1.0, 1)
    logger.log_metrics({"loss": 2.0}, 2)
    logger.experiment.flush()
    assert steps_of(logger) == [0, 1, 2]


def test_a_barrier_does_not_wait_for_what_comes_behind_it():
    queue = WriteQueue(lambda items: queue.put(items[0] + 1), most_at_once=1)  # never empty
    queue.put(0)
    assert queue.wait(60)
    assert queue.close(60)


def test_a_wait_ends_when_items_fail_and_goes_on_when_some_are_sent():
    answers, begun = [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]

    def send(items):
        begun[items[0]].set()
        assert answers[items[0]].wait(60)
        if items[0] < 2:
            raise ConnectionError("the server is gone")

    queue = WriteQueue(send, most_at_once=1)
    answers[0].set()
    queue.put(0)
    queue.put(1)
    assert not queue.wait_unless_failing()  # 1 is still being sent
    assert begun[1].wait(60)
    queue.put(2)
    assert not queue.wait_unless_failing()
    answers[1].set()
    answers[2].set()
    assert queue.wait(60)
    assert not queue.failing
    threading.Thread(target=lambda: begun[3].wait(60) and answers[3].set()).start()
    queue.put(3)
    assert queue.wait_unless_failing()  # it waits again
    assert answers[3].is_set()
    assert [failure.items for failure in queue.failures()] == [[0], [1]]
    assert queue.close(60)


def test_a_csv_file_that_is_asked_for_while_its_disk_hangs_is_told_once(tmp_path, monkeypatch):
    disk, logger = Hanging(monkeypatch), csv_logger(tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    assert disk.begun.wait(60)
    assert logger.state_dict()["rows"] == 1  # counts the waiting row without waiting for the disk
    with pytest.warns(
        RuntimeWarning, match=r"cannot write .*log: the disk has not answered within 0.2 s; training continues"
    ):
        logger.save()
    disk.goes_on()
    logger.barrier(0)
    logger.close()
    assert steps_of(logger) == [0]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_no_thread_is_left_outside_of_a_run_and_after_one(tmp_path, kind):
    def threads():
        return [one for one in threading.enumerate() if one.name == "fabricamp-write-queue"]

    before = threads()
    logger = kind(tmp_path)
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"x": 1.0}, 0)
    logger.save()
    assert threads() == before
    quiet_trainer(max_steps=1, logger=logger).fit(Classifier(), loader(4))
    assert threads() == before
    logger.log_metrics({"x": 2.0}, 1)
    logger.save()
    assert threads() == before
