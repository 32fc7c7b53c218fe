"""A rank that raises, hangs, dies or waits in vain ends the whole job in time, and is named with its place and its stack."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.errors import CheckpointError, DistributedError
from fabricamp.strategies import DDP
from fabricamp.watchdog import watch
from tests.distributed.ranks import side_by_side
from tests.kill.attempts import attempt, import_everything
from tests.small import Classifier, data, loader, quiet_trainer

SECONDS = 6
"""The patience of a run in which a rank hangs."""
START_SECONDS = 16
"""That of a run whose workers start slowly, in which all else has to be faster."""
LONG = 60
"""That of a run whose end must not take it: a failure or a death is noticed."""
IN_TIME = 30


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


class Broken:
    """A data set whose 20th sample is trouble for the rank that reads it."""

    def __init__(self, what):
        self._data = data(64)
        self._what = what

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        if index == 21:  # rank 1's sixth batch of two
            self.trouble()
        return self._data[index]

    def trouble(self):
        if self._what == "loader":
            time.sleep(3600)
        if self._what == "worker":
            os.kill(os.getpid(), signal.SIGKILL)


class Faulty(Classifier):
    """Rank 1 does something wrong in its sixth step."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.global_rank == 1:
            self.trouble()
        if batch_idx == 5 and self.global_rank == 0 and self.what == "raises beside one that is busy":
            time.sleep(3600)
        return super().training_step(batch, batch_idx)

    def trouble(self):
        if self.what.startswith("raises"):
            raise ValueError("rank one is unwell")
        if self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "step":
            threading.Event().wait()

    def on_train_end(self):
        if self.what == "skips" and self.global_rank == 0:
            dist.barrier()

    def validation_step(self, batch, batch_idx):
        if self.what == "validation" and batch_idx == 2 and self.global_rank == 1:
            threading.Event().wait()
        super().validation_step(batch, batch_idx)


def fit(what, **options):
    trainer = quiet_trainer(
        **{
            "devices": 2,
            "strategy": DDP(timeout=SECONDS),
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "start_method": "fork",
            **options,
        }
    )
    workers = {"num_workers": 1} if what == "worker" else {}
    training = DataLoader(Broken(what), batch_size=2, **workers)
    trainer.fit(Faulty(what), training, loader(16, 2))


def failure_of(what, patience=SECONDS, **options):
    """What the caller of ``fit`` is told; in time."""
    began = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        fit(what, strategy=DDP(timeout=patience), **options)
    assert time.monotonic() - began < IN_TIME
    return str(caught.value)


def test_a_rank_that_raises():
    told = failure_of("raises", LONG)
    assert "rank 1 ended with exit code 1" in told
    assert told.count("ValueError: rank one is unwell") == 1


def a_rank_that_raises_beside_one_that_notices_nothing(_folder):
    watch._GRACE_SECONDS = 1.0  # the other one would never end by itself
    told = failure_of("raises beside one that is busy", LONG)
    assert "rank 1 ended with exit code 1" in told
    assert "ValueError: rank one is unwell" in told


def test_a_rank_that_dies():
    told = failure_of("dies", LONG)
    assert "rank 1 was killed by SIGKILL" in told
    assert "what rank 0 left" in told  # its peer's error


def test_a_loader_worker_that_dies():
    told = failure_of("worker", LONG)
    assert "rank 1 ended with exit code 1" in told
    # Or by its own words, where a batch from before was still to be taken from the worker.
    assert re.search(r"DataLoader worker .*(exited unexpectedly|killed by signal)", told), told


PLACES = {
    "loader": (
        r"rank 1: in fit at step 5 \(epoch 0, batch 5\), training_step or a hook around it, waiting for its loader, for \d+ s",
        "time.sleep(3600)",
    ),
    "validation": (
        r"rank 1: in fit at step 16 \(epoch 0, batch 16\), in validation batch 2, for \d+ s",
        "wait()",
    ),
}


def a_rank_that_hangs(_folder, what="loader"):
    place, line = PLACES[what]
    told = failure_of(what)
    assert "because of rank 1 as it seems" in told
    assert re.search(place, told), told
    assert re.search(r"rank 0: in fit at step \d+ .*, waiting for the other ranks, for \d+ s", told), told
    assert "DDP(timeout=3600)" in told
    stacks = told.partition("stack of rank ")[2]
    assert stacks.startswith("1:")
    assert line in stacks.partition("stack of rank 0:")[0]
    assert re.search(r"in (trouble|validation_step|__getitem__)", stacks)
    assert "stack of rank 0:" in told


@pytest.mark.slow
def test_a_rank_that_hangs_in_validation():
    a_rank_that_hangs(None, "validation")


def a_rank_that_leaves_out_an_exchange(_folder):
    told = failure_of("skips")
    assert "they wait for each other at different places: one has left out an exchange" in told
    for rank, function in ((0, "in on_train_end"), (1, "in ended_early")):
        assert re.search(rf"rank {rank}: in fit at step 32 .*, waiting for the other ranks, for \d+ s", told), told
        assert function in told.partition(f"stack of rank {rank}:")[2].partition("stack of rank")[0]


class SlowDisk(Callback):
    """A disk that does not come to its end."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_start(self, trainer, module):
        flush = os.fsync
        os.fsync = lambda file: (time.sleep(self.seconds), flush(file))


def a_disk_that_hangs_while_saving(folder):
    options = {"enable_checkpointing": True, "default_root_dir": folder}
    told = failure_of("", callbacks=[SlowDisk(3600)], **options)
    assert "because of rank 0 as it seems" in told
    assert re.search(r"rank 0: in fit at step 16 .*, writing a checkpoint, for \d+ s", told), told
    assert "write_checkpoint" in told


def a_disk_that_is_slow(folder):
    fit("", callbacks=[SlowDisk(0.5)], enable_checkpointing=True, default_root_dir=folder)


class FullDisk(Callback):
    """While step 4 is saved no file may be larger than a few bytes, as on a disk without space."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if trainer.global_step == 4:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
            # What the starter reads is on another disk.
            threading.Timer(1.0, resource.setrlimit, [resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2]).start()

    def on_exception(self, trainer, module, exception):
        time.sleep(1.2)


def a_disk_that_is_full(folder):
    checkpoint = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2)
    with pytest.raises(CheckpointError, match="cannot write checkpoint .*step=4.ckpt: File too large"):
        fit("", callbacks=[checkpoint, FullDisk()], enable_checkpointing=True)
    (file,) = (folder / "checkpoints").iterdir()
    assert torch.load(file, weights_only=True)["global_step"] == 2


def without_a_starter(folder, what):
    """Ranks that nobody watches over, as where srun does not end a job with its first failure."""

    def job(_armed):
        fit(what, devices="auto")

    began = time.monotonic()
    ended = attempt(job, folder)
    assert time.monotonic() - began < IN_TIME
    return ended


def said_in(folder, job):
    """The attempt, and what its ranks say."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "attempt's words").open("w+") as words:
        before = os.dup(2)
        os.dup2(words.fileno(), 2)
        try:
            ended = job(folder / "attempt")
        finally:
            os.dup2(before, 2)
        words.seek(0)
        return ended, words.read()


def ranks_without_a_starter_end_by_themselves(folder, report_seconds=60.0):
    """Rank 0 is ended by its watchdog, or by what its exchange says of a peer that is gone, where that is faster."""
    watch._REPORT_SECONDS = report_seconds
    ended, said = said_in(folder, lambda inner: without_a_starter(inner, "loader"))
    assert ended.codes == [143, 1]
    assert said.count("because of rank 1 as it seems") == 1
    assert "rank 1: in fit at step 5" in said
    assert "in __getitem__" in said


@pytest.mark.slow
def test_ranks_without_a_starter_end_by_themselves_after_their_report(tmp_path):
    side_by_side(partial(ranks_without_a_starter_end_by_themselves, tmp_path, 1.0))


@pytest.mark.slow
def test_a_failure_ends_ranks_without_a_starter_too(tmp_path, capfd):
    assert without_a_starter(tmp_path / "busy", "raises beside one that is busy").codes == [143, 1]
    said = capfd.readouterr().err
    assert "rank 0 is ended in fit at step 5" in said
    assert "rank 1 failed in fit at step 5 (epoch 0, batch 5), training_step or a hook around it: ValueError" in said
    assert "stack of rank 0:" in said


class Dies(Callback):
    """Rank 1 is killed, while rank 0 waits for nothing that would notice it."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()


def a_rank_that_dies_beside_one_that_notices_nothing(folder):
    watch._GRACE_SECONDS = 1.0  # the other one would never end by itself

    def job(_armed):
        fit("", devices="auto", callbacks=[Dies()], strategy=DDP(timeout=20))

    ended, said = said_in(folder, partial(attempt, job))
    assert ended.codes == [143, -signal.SIGKILL]
    assert "rank 0 is ended in fit at step 5" in said
    assert re.search(r"rank 1 has died; last seen in fit at step \d", said)


class Deaf(Callback):
    """Rank 1's thread is gone, and its main one stands still for some seconds: as if its interpreter were stuck."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_start(self, trainer, module):
        if trainer.global_rank == 1:
            trainer._runner.session.watchdog._look = lambda _store: threading.Event().wait()
            threading.Timer(self.seconds, os._exit, [9]).start()


@pytest.mark.slow
def test_a_rank_without_a_sign_of_life_is_named_by_another(tmp_path, capfd):
    def job(_armed):
        fit("step", devices="auto", callbacks=[Deaf(SECONDS + 2)])

    assert attempt(job, tmp_path).codes == [1, 9]
    said = capfd.readouterr().err
    assert "because of rank 1 as it seems" in said
    assert re.search(
        r"rank 1 gives no sign of life \(.*holds its interpreter's lock\); last seen in fit at step \d", said
    )
    assert "stack of rank 0:" in said


def sigterm_while_a_rank_is_gone_ends_the_others_soon(folder):
    watch.ANSWER_SECONDS = watch._GRACE_SECONDS = 1.0

    class Stuck(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5 and self.global_rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait()
            return super().training_step(batch, batch_idx)

    def job(_armed):
        trainer = quiet_trainer(devices="auto", strategy=DDP(timeout=600), max_epochs=2, callbacks=[Deaf(4)])
        trainer.fit(Stuck(), loader(64, 2))

    began = time.monotonic()
    ended, said = said_in(folder, partial(attempt, job))
    assert ended.codes == [143, 9]
    assert time.monotonic() - began < IN_TIME
    assert "rank 0 is ended in fit at step 5" in said
    assert "no answer from rank 1" in said


def start_slowly(seconds, _worker):
    """What a worker of rank 1 does before its first sample."""
    if os.environ["RANK"] == "1":
        time.sleep(seconds)


def fit_with_slow_starts(seconds, **options):
    trainer = quiet_trainer(devices=2, max_epochs=1, num_sanity_val_steps=0, start_method="fork", **options)
    start = partial(start_slowly, seconds)
    training = DataLoader(data(64), batch_size=2, num_workers=1, worker_init_fn=start)
    trainer.fit(Classifier(), training, DataLoader(data(16), batch_size=2, num_workers=1, worker_init_fn=start))


def a_worker_that_starts_slowly_is_no_hang(_folder):
    """Longer than the patience, and than an exchange would wait."""
    fit_with_slow_starts(1.5 * START_SECONDS, strategy=DDP(timeout=START_SECONDS))


def a_worker_that_never_starts(_folder):
    watch._START_SECONDS = SECONDS
    with pytest.raises(DistributedError) as caught:
        fit_with_slow_starts(3600, strategy=DDP(timeout=SECONDS))
    told = str(caught.value)
    assert "because of rank 1 as it seems" in told
    assert re.search(r"rank 1: .*, waiting for the first batch of its loader, whose workers start, for \d+ s", told), (
        told
    )
    assert re.search(r"rank 0: .*, waiting for the other ranks, for \d+ s", told), told
    assert "_try_get_data" in told.partition("stack of rank 1:")[2]


WAITS = [
    a_worker_that_starts_slowly_is_no_hang,
    a_worker_that_never_starts,
    a_rank_that_raises_beside_one_that_notices_nothing,
    a_rank_that_hangs,
    a_rank_that_leaves_out_an_exchange,
    a_disk_that_hangs_while_saving,
    a_disk_that_is_slow,
    a_disk_that_is_full,
    ranks_without_a_starter_end_by_themselves,
    a_rank_that_dies_beside_one_that_notices_nothing,
    sigterm_while_a_rank_is_gone_ends_the_others_soon,
]


def test_those_that_wait(tmp_path):
    """Side by side: most of them wait until somebody's patience is at its end."""
    side_by_side(*(partial(one, tmp_path / one.__name__) for one in WAITS))


class JumpingClock(Callback):
    """The clock of the machine is set, a year forth and a year back."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        year = 365 * 86400.0
        now = time.monotonic() + 1.7e9 + (year if batch_idx % 2 else -year)
        time.time, time.time_ns = lambda: now, lambda: int(now * 1e9)


def test_a_clock_that_jumps_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    checkpoint = ModelCheckpoint(tmp_path, every="30 min", save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=3, max_time={"minutes": 30}, callbacks=[JumpingClock(), checkpoint], enable_checkpointing=True
    )
    trainer.fit(Classifier(), loader(64, 2))
    assert trainer.global_step == 96
    assert list(tmp_path.rglob("*.ckpt")) == []
    fit("", callbacks=[JumpingClock()], start_method="fork", max_epochs=1)  # in two processes that watch each other
