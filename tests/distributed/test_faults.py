"""A rank that raises, hangs, dies or waits in vain ends the whole job in time, and is named with its position and its stack."""

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
from fabricamp.watchdog.heartbeat import HeartbeatSource, _lives
from tests.distributed.ranks import side_by_side
from tests.inside import session
from tests.kill.attempts import attempt, import_everything
from tests.small import Classifier, data, loader, quiet_trainer

TIMEOUT = 3600.0
"""The strategy's timeout, so long that no test ends by it on a slow machine; :class:`Impatient` sets a short patience."""
SECONDS = 2.0
"""The watchdog's patience once each rank has reached the place where it hangs."""


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


@pytest.fixture(autouse=True)
def _slow_ranks(monkeypatch):
    """Raises limits for a slow machine: a rank that sends heartbeats is not taken for silent, and a report is completed."""
    monkeypatch.setattr(watch.Watchdog, "_silent_seconds", 100.0)
    monkeypatch.setattr(watch, "_REPORT_SECONDS", 100.0)


class Impatient(Callback):
    """Sets the watchdog's patience to seconds once each rank has reached the place where it hangs, so a slow start does not count.

    ``stands`` are ``(rank, place, doing, function)`` in the order in which the ranks reach these places.
    """

    def __init__(self, *stands):
        self.stands = stands

    def on_train_start(self, trainer, module):
        watchdog = session(trainer).watchdog
        source = HeartbeatSource(trainer.state, trainer.global_rank)
        store = trainer.strategy.store.clone()

        def look():
            for rank, *stand in self.stands:
                if rank == trainer.global_rank:
                    while not stands(source.take(0.0, stack=True), *stand):
                        time.sleep(0.05)
                    store.set(f"{rank} stands", "")
                store.wait([f"{rank} stands"])
            watchdog._patience = SECONDS
            watchdog._beat_seconds = 0.2
            watchdog._next_beat = 0.0
            self.after(watchdog, store, trainer.global_rank)

        threading.Thread(target=look, daemon=True).start()

    def after(self, watchdog, store, rank):
        """Called in a thread once all ranks hang."""


class LetsGo(Impatient):
    """Creates the file ``go`` after all ranks have waited for longer than the patience, and then raises the patience."""

    def __init__(self, go, *stands):
        super().__init__(*stands)
        self.go = go

    def after(self, watchdog, store, rank):
        time.sleep(3 * SECONDS)
        watchdog._patience = TIMEOUT
        store.set(f"{rank} is patient", "")
        store.wait(["0 is patient", "1 is patient"])
        self.go.touch()


def stands(pulse, place, doing, function):
    return place in pulse.position and pulse.activity == doing and f"in {function}\n" in pulse.stack


class Broken:
    """A data set with a sample that makes the rank that reads it fail."""

    def __init__(self, what):
        self._data = data(64)
        self._what = what

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        if index == 21:  # in rank 1's sixth batch of two
            self.trouble()
        return self._data[index]

    def trouble(self):
        if self._what == "loader":
            time.sleep(3600)
        if self._what == "worker":
            os.kill(os.getpid(), signal.SIGKILL)


class Faulty(Classifier):
    """Rank 1 fails in its sixth step."""

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
            "strategy": DDP(timeout=TIMEOUT),
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "start_method": "fork",
            **options,
        }
    )
    workers = {"num_workers": 1} if what == "worker" else {}
    training = DataLoader(Broken(what), batch_size=2, **workers)
    trainer.fit(Faulty(what), training, loader(16, 2))


def failure_of(what, **options):
    """Returns the message of the error that ``fit`` raises."""
    with pytest.raises(DistributedError) as caught:
        fit(what, **options)
    return str(caught.value)


def test_a_rank_that_raises():
    told = failure_of("raises")
    assert "rank 1 ended with exit code 1" in told
    assert told.count("ValueError: rank one is unwell") == 1


def a_rank_that_raises_beside_one_that_notices_nothing(_folder):
    watch._GRACE_SECONDS = 1.0  # the other rank would never end by itself
    told = failure_of("raises beside one that is busy")
    assert "rank 1 ended with exit code 1" in told
    assert "ValueError: rank one is unwell" in told


def test_a_rank_that_dies():
    told = failure_of("dies")
    assert "rank 1 was killed by SIGKILL" in told
    assert "what rank 0 left" in told  # the other rank's traceback


def test_a_loader_worker_that_dies():
    told = failure_of("worker")
    assert "rank 1 ended with exit code 1" in told
    # The message differs if an earlier batch of the worker was still waiting to be read.
    assert re.search(r"DataLoader worker .*(exited unexpectedly|killed by signal)", told), told


IN_A_STEP = Impatient((1, "at step 5", "elsewhere", "trouble"), (0, "at step 5", "waiting", "backward"))
IN_ITS_LOADER = Impatient((1, "at step 5", "data", "trouble"), (0, "at step 5", "waiting", "backward"))
IN_VALIDATION = Impatient(
    (1, "in validation batch 2", "elsewhere", "validation_step"), (0, "at step 16", "waiting", "ended_early")
)
AT_DIFFERENT_PLACES = Impatient(
    (0, "at step 32", "waiting", "on_train_end"), (1, "at step 32", "waiting", "ended_early")
)
WHILE_SAVING = Impatient((0, "at step 16", "saving", "write_checkpoint"), (1, "at step 16", "waiting", "broadcast"))

PLACES = {
    "loader": (
        r"rank 1: in fit at step 5 \(epoch 0, batch 5\), training_step or a hook around it, waiting for its loader, for \d+ s",
        "time.sleep(3600)",
        IN_ITS_LOADER,
    ),
    "validation": (
        r"rank 1: in fit at step 16 \(epoch 0, batch 16\), in validation batch 2, for \d+ s",
        "wait()",
        IN_VALIDATION,
    ),
}


def a_rank_that_hangs(_folder, what="loader"):
    place, line, impatient = PLACES[what]
    told = failure_of(what, callbacks=[impatient])
    assert "probably because of rank 1" in told
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
    told = failure_of("skips", callbacks=[AT_DIFFERENT_PLACES])
    assert "they wait for each other at different places: one has skipped an exchange" in told
    for rank, function in ((0, "in on_train_end"), (1, "in ended_early")):
        assert re.search(rf"rank {rank}: in fit at step 32 .*, waiting for the other ranks, for \d+ s", told), told
        assert function in told.partition(f"stack of rank {rank}:")[2].partition("stack of rank")[0]


class SlowDisk(Callback):
    """A disk that takes ``seconds`` for each flush."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_start(self, trainer, module):
        flush = os.fsync
        os.fsync = lambda file: (time.sleep(self.seconds), flush(file))


def a_disk_that_hangs_while_saving(folder):
    options = {"enable_checkpointing": True, "default_root_dir": folder}
    told = failure_of("", callbacks=[SlowDisk(3600), WHILE_SAVING], **options)
    assert "probably because of rank 0" in told
    assert re.search(r"rank 0: in fit at step 16 .*, writing a checkpoint, for \d+ s", told), told
    assert "write_checkpoint" in told


def a_disk_that_is_slow(folder):
    fit("", callbacks=[SlowDisk(0.5)], enable_checkpointing=True, default_root_dir=folder)


class FullDisk(Callback):
    """Limits files to a few bytes while step 4 is saved, as on a full disk."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if trainer.global_step == 4:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    def on_exception(self, trainer, module, exception):
        # The error file for the starter is on another disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def a_disk_that_is_full(folder):
    checkpoint = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2)
    with pytest.raises(CheckpointError, match="cannot write checkpoint .*step=4.ckpt: File too large"):
        fit("", callbacks=[checkpoint, FullDisk()], enable_checkpointing=True)
    (file,) = (folder / "checkpoints").iterdir()
    assert torch.load(file, weights_only=True)["global_step"] == 2


def without_a_starter(folder, what, *callbacks):
    """Runs ranks without a starter that ends them, as when srun does not end a job at its first failure."""

    def job(_armed):
        fit(what, devices="auto", callbacks=[*callbacks])

    return attempt(job, folder)


def said_in(folder, job):
    """Returns the result of the attempt, and its ranks' stderr."""
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


def ranks_without_a_starter_end_by_themselves(folder, report_seconds=100.0):
    """Rank 0 is ended by its watchdog, or by the error of its exchange with the dead rank if that comes first."""
    watch._REPORT_SECONDS = report_seconds
    ended, said = said_in(folder, lambda inner: without_a_starter(inner, "loader", IN_ITS_LOADER))
    assert ended.codes == [143, 1]
    assert said.count("probably because of rank 1") == 1
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
    """Rank 1 is killed while rank 0 is in no collective that would notice it."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()


def a_rank_that_dies_beside_one_that_notices_nothing(folder):
    watch._GRACE_SECONDS = 1.0  # the other rank would never end by itself

    def job(_armed):
        fit("", devices="auto", callbacks=[Dies()])

    ended, said = said_in(folder, partial(attempt, job))
    assert ended.codes == [143, -signal.SIGKILL]
    assert "rank 0 is ended in fit at step 5" in said
    assert re.search(r"rank 1 has died; last seen in fit at step \d", said)


class Deaf(Callback):
    """Stops rank 1's watchdog thread, and its main thread until rank 0 has ended, as if its interpreter was stuck."""

    def on_train_start(self, trainer, module):
        pids = trainer.strategy.all_gather_object(os.getpid())
        if trainer.global_rank == 1:
            gone = threading.Event()

            def look(_store):
                gone.set()
                while _lives(pids[0]):
                    time.sleep(0.05)
                os._exit(9)

            session(trainer).watchdog._poll = look
            gone.wait()


@pytest.mark.slow
def test_a_rank_without_a_sign_of_life_is_named_by_another(tmp_path, capfd):
    def job(_armed):
        watch.Watchdog._silent_seconds = 1.0
        fit("step", devices="auto", callbacks=[Deaf(), IN_A_STEP])

    assert attempt(job, tmp_path).codes == [1, 9]
    said = capfd.readouterr().err
    assert "probably because of rank 1" in said
    assert re.search(
        r"rank 1 gives no sign of life \(.*holds its interpreter's lock\); last seen in fit at step \d", said
    )
    assert "stack of rank 0:" in said


def sigterm_while_a_rank_is_gone_ends_the_others_soon(folder):
    watch._GRACE_SECONDS = 1.0

    class Stuck(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5 and self.global_rank == 0:
                watch.ANSWER_SECONDS = 1.0
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait()
            return super().training_step(batch, batch_idx)

    def job(_armed):
        trainer = quiet_trainer(devices="auto", strategy=DDP(timeout=TIMEOUT), max_epochs=2, callbacks=[Deaf()])
        trainer.fit(Stuck(), loader(64, 2))

    ended, said = said_in(folder, partial(attempt, job))
    assert ended.codes == [143, 9]
    assert "rank 0 is ended in fit at step 5" in said
    assert "no answer from rank 1" in said


def start_slowly(go, _worker):
    """Delays a worker of rank 1 before its first sample, until ``go`` exists or the rank has ended."""
    rank = os.getppid()
    while os.environ["RANK"] == "1" and not go.exists() and os.getppid() == rank:
        time.sleep(0.05)


STARTING = (1, "", "starting", "_try_get_data"), (0, "", "waiting", "_meet")


def fit_with_slow_starts(go, callback):
    trainer = quiet_trainer(
        devices=2,
        max_epochs=1,
        num_sanity_val_steps=0,
        start_method="fork",
        strategy=DDP(timeout=TIMEOUT),
        callbacks=[callback],
    )
    start = partial(start_slowly, go)
    training = DataLoader(data(64), batch_size=2, num_workers=1, worker_init_fn=start)
    trainer.fit(Classifier(), training, DataLoader(data(16), batch_size=2, num_workers=1, worker_init_fn=start))


def a_worker_that_starts_slowly_is_no_hang(folder):
    """The worker takes longer than the patience."""
    folder.mkdir()
    go = folder / "go"
    fit_with_slow_starts(go, LetsGo(go, *STARTING))
    assert go.exists()


def a_worker_that_never_starts(folder):
    watch._START_SECONDS = SECONDS
    with pytest.raises(DistributedError) as caught:
        fit_with_slow_starts(folder / "never", Impatient(*STARTING))
    told = str(caught.value)
    assert "probably because of rank 1" in told
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
    """Runs the tests concurrently, because most of them wait until the patience is over."""
    side_by_side(*(partial(one, tmp_path / one.__name__) for one in WAITS))


class JumpingClock(Callback):
    """Sets the machine's clock a year forward and back."""

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
    fit("", callbacks=[JumpingClock()], start_method="fork", max_epochs=1)  # with watchdogs in two processes
