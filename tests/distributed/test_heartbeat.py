"""Diagnosis from the heartbeats of all ranks: which rank holds up the run, and which rank reports it."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp.state import RunningStage, RunState, Scope, TrainerFn
from fabricamp.watchdog.hang_diagnosis import judge
from fabricamp.watchdog.heartbeat import Heartbeat, HeartbeatSource, _host
from fabricamp.watchdog.watch import patience
from tests.small import Classifier, loader, quiet_trainer

STACK = 'before\n  File "/home/me/train.py", line {}, in step\n    x()\n  File "/lib/torch/distributed/c.py", line 1, in wait\n'


def pulse(rank, doing, *, line=1, **options):
    return Heartbeat(
        **{
            "rank": rank,
            "beat": 3,
            "idle": 20.0,
            "position": f"place {rank}",
            "epoch": 0,
            "batch": 0,
            "activity": doing,
            "host": _host(),
            "pid": os.getpid(),
            "stack": STACK.format(line),
            **options,
        }
    )


def gone():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize(
    ("doings", "silent", "rank", "reporter"),
    [
        (["waiting", "data", "elsewhere"], set(), 1, 1),
        (["waiting", "elsewhere", "saving"], set(), 1, 1),
        (["saving", "waiting", "waiting"], set(), 0, 0),
        (["waiting", "data", "elsewhere"], {2}, 2, 0),  # a silent rank cannot report
        (["data", "waiting", "waiting"], {0}, 0, 1),
        (["waiting", "ended", "waiting"], set(), 1, 0),
        (["ended", "ended", "waiting"], set(), 0, 2),
    ],
)
def test_who_is_named_and_who_reports(doings, silent, rank, reporter):
    diagnosis = judge([pulse(one, doing) for one, doing in enumerate(doings)], silent, 15.0)
    assert (diagnosis.rank, diagnosis.reporter) == (rank, reporter)
    first, *others = diagnosis.text.splitlines()
    assert first == f"no rank has made progress for 15 s, probably because of rank {rank}:"
    assert others[0].startswith(f"  rank {rank}")
    assert all(f"place {one}" in diagnosis.text for one in range(3))
    assert diagnosis.stack.startswith("stack of rank ")


@pytest.mark.parametrize("doing", ["elsewhere", "data", "saving"])
def test_a_rank_alone_with_its_work_holds_up_nobody(doing):
    assert judge([pulse(0, doing), pulse(1, "ended")], set(), 15.0) is None
    assert judge([pulse(0, "ended"), pulse(1, "ended")], set(), 15.0) is None
    assert judge([pulse(0, "waiting"), pulse(1, "waiting")], {0, 1}, 15.0) is None  # no rank is left to report it


def test_where_all_wait_the_odd_one_out_is_named():
    same = judge([pulse(rank, "waiting") for rank in range(3)], set(), 15.0)
    assert "all wait at the same place" in same.text
    odd = judge([pulse(rank, "waiting", line=7 if rank == 2 else 1) for rank in range(3)], set(), 15.0)
    assert (odd.rank, odd.reporter) == (2, 2)
    assert "one has skipped an exchange, or makes an extra one (probably rank 2)" in odd.text
    either = judge([pulse(rank, "waiting", line=rank) for rank in range(2)], set(), 15.0)
    assert "(the stacks show where each waits)" in either.text


def test_a_silent_rank_is_described():
    here = judge([pulse(0, "waiting"), pulse(1, "elsewhere", pid=gone())], {1}, 15.0).text
    assert "rank 1 gives no sign of life (its process is gone); last seen place 1" in here
    alive = judge([pulse(0, "waiting"), pulse(1, "elsewhere")], {1}, 15.0).text
    assert (
        "rank 1 gives no sign of life (its process is gone, its machine cannot be reached, or something holds" in alive
    )


def test_only_a_process_that_is_certainly_dead_is_gone():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert pulse(0, "waiting", pid=child).gone  # a zombie that nobody has waited for
    os.waitpid(child, 0)
    assert pulse(0, "waiting", pid=child).gone
    assert not pulse(0, "ended", pid=child).gone
    assert not pulse(0, "waiting", pid=child, host="elsewhere").gone
    assert not pulse(0, "waiting", pid=1).gone  # a process of another user
    assert not pulse(0, "waiting").gone


def test_many_ranks_are_not_all_listed():
    diagnosis = judge([pulse(rank, "data" if rank == 700 else "waiting") for rank in range(1000)], set(), 15.0)
    assert diagnosis.text.splitlines()[1].startswith("  rank 700")
    assert len(diagnosis.text.splitlines()) < 20
    assert diagnosis.stack.count("stack of rank") <= 4


def test_any_counter_that_moves_is_progress():
    state = RunState()
    source = HeartbeatSource(state, 3)
    assert source.idle(100.0) == 0
    assert source.idle(107.0) == 7
    now = 107.0
    for name, value in {
        "fn": TrainerFn.FITTING,
        "stage": RunningStage.TRAINING,
        "scope": Scope.TRAIN_STEP,
        "epoch": 1,
        "global_step": 1,
        "batch_idx": 1,
        "batches_done": 1,
        "evaluated": 0,
    }.items():
        setattr(state, name, value)
        now += 5
        assert source.idle(now) == 0, name
    taken = source.take(now + 2, stack=False)
    assert (taken.rank, taken.idle, taken.stack) == (3, 2, "")
    assert taken.position == "in fit at step 1 (epoch 1, batch 1), in validation batch 0"
    assert source.take(now, stack=False).beat == taken.beat + 1
    assert Heartbeat.decode(taken.encode().encode()) == taken
    assert source.take(now, stack=True, ended=True).ended


def doing_while(hang, **options):
    """Returns the activity that a watching thread sees while the main thread hangs in ``hang``."""
    began, go_on = threading.Event(), threading.Event()
    seen = []

    def look(source):
        began.wait(100)
        seen.append(source.take(0.0, stack=True))
        go_on.set()

    def stand():
        began.set()
        go_on.wait(100)

    thread = threading.Thread(target=look, args=[HeartbeatSource(RunState(), 0)])
    thread.start()
    hang(stand)
    thread.join()
    return seen[0]


def test_what_a_rank_is_doing_is_told_by_its_stack(tmp_path, monkeypatch):
    class Net(Classifier):
        stand = staticmethod(lambda: None)

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.stand()
            return super().training_step(batch, batch_idx)

    class Rows(list):
        stand = staticmethod(lambda: None)

        def __getitem__(self, index):
            self.stand()
            return super().__getitem__(index)

    def in_step(stand):
        module = Net()
        module.stand = stand
        quiet_trainer(max_epochs=1).fit(module, loader())

    def in_loader(stand):
        rows = Rows(list(loader(8).dataset))
        rows.stand = stand
        quiet_trainer(max_epochs=1).fit(Net(), DataLoader(rows, batch_size=2))

    def in_save(stand):
        flush = os.fsync
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda file: (stand(), flush(file)))
            quiet_trainer(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path).fit(Net(), loader(8))

    assert doing_while(in_step).activity == "elsewhere"
    assert doing_while(in_loader).activity == "data"
    saving = doing_while(in_save)
    assert saving.activity == "saving"
    assert "write_checkpoint" in saving.stack


def test_a_run_is_given_up_so_early_that_it_ends_within_its_timeout():
    assert [patience(seconds) for seconds in (8, 20, 40, 600)] == [6, 15, 30, 590]


def test_the_thread_reads_what_the_loop_writes():
    """No function of the watchdog runs in a step, so it costs the loop nothing."""
    called = []

    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                sys.setprofile(lambda frame, *_: called.append(frame.f_code.co_filename))
            if batch_idx == 4:
                sys.setprofile(None)
            return super().training_step(batch, batch_idx)

    try:
        quiet_trainer(max_epochs=1).fit(Net(), loader())
    finally:
        sys.setprofile(None)
    assert any("fabricamp/engine/update" in name for name in called)
    assert not [name for name in called if "fabricamp/watchdog" in name]


class Gate(torch.utils.data.Dataset):
    """A data set with a worker that waits for a byte in a pipe at its start and before each sample."""

    def __init__(self):
        self.gate = os.pipe()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.read(self.gate[0], 1)
        return torch.ones(1)

    def start(self, _worker):
        os.read(self.gate[0], 1)

    def open(self, times):
        os.write(self.gate[1], b"." * times)


def watched(source, doing):
    """Returns the first heartbeat with this activity; fails after a minute."""
    deadline = time.monotonic() + 60
    while (found := source.take(0.0, stack=True)).activity != doing:
        assert time.monotonic() < deadline, found.stack
        time.sleep(0.01)
    return found


def test_a_first_batch_of_workers_is_told_from_a_later_one():
    gate = Gate()
    loader = DataLoader(gate, num_workers=1, worker_init_fn=gate.start, prefetch_factor=1)
    took = []
    source = HeartbeatSource(RunState(), 0)
    seen = []

    def look():
        try:
            seen.append(watched(source, "starting"))
            gate.open(2)  # the worker starts and returns the first sample
            seen.append(watched(source, "data"))
        finally:
            gate.open(20)

    looking = threading.Thread(target=look)
    looking.start()
    took.extend(loader)
    looking.join()
    assert len(took) == 8
    first, later = seen
    assert first.starts
    assert "waiting for the first batch of its loader, whose workers start" in first.describe(silent=False)
    assert not later.starts
    assert "waiting for its loader" in later.describe(silent=False)
