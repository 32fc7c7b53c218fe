"""Runs a job on several forked ranks and kills one of them at a chosen time; forking makes an attempt take half a second.

from tests.kill.attempts import Kill, attempt
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fabricamp import Callback
from tests.distributed.ranks import variables_of
from tests.small import Classifier, loader, quiet_trainer

__all__ = ["WORLD_SIZE", "Armed", "Attempt", "Kill", "attempt", "draw", "import_everything"]

WORLD_SIZE = 2
# Limits for hanging attempts only; no other attempt reaches them.
_SECONDS = 200.0
_ALONE_SECONDS = 100.0

# Python functions that make a system call on a file.
_OPERATIONS = {"open", "write", "flush", "fsync", "close", "replace", "rename", "link", "symlink", "unlink", "mkdir"}
_OPERATIONS |= {"flock", "sendfile", "copy_file_range", "truncate"}

# The phase of a killed rank, by the innermost of these functions on its stack.
_PHASES = {
    "rotate": "rotating",
    "make_room": "rotating",
    "_save": "saving",
    "save_checkpoint": "saving",
    "resolve_checkpoint": "restarting",
    "_load": "restarting",
    "_restore": "restarting",
    "_validate": "validating",
}


@dataclass(frozen=True)
class Kill:
    """The rank to kill with SIGKILL, and the time of the kill.

    ``kind`` "file": before the rank's n-th creation, renaming or removal of a file in the folder; "operation": before its n-th
    system call on a file; "call": at its n-th Python call; "time": after n seconds of training.
    """

    rank: int
    kind: str
    when: float


@dataclass(frozen=True)
class Attempt:
    """The result of an attempt: exit codes, the phase of the killed rank ("" without a kill), tracebacks of the others."""

    codes: list[int]
    phase: str
    failures: str

    @property
    def finished(self) -> bool:
        return not any(self.codes)


def draw(generator, spans):
    """Returns a random kill; ``spans`` are the counts of each kind and rank in a run without a kill."""
    rank, kind = generator.choice([(0, "file"), (0, "operation"), (0, "call"), (1, "call"), (0, "time"), (1, "time")])
    span = spans[rank][kind]
    return Kill(rank, kind, generator.uniform(0, span) if kind == "time" else generator.randint(1, span))


def import_everything(folder):
    """Runs the imports of the first use, so that processes forked afterwards have them."""
    options = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": folder}
    quiet_trainer(**options).fit(Classifier(), loader(8), loader(8), ckpt_path="auto")
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters()).step()


def attempt(job, folder, kill=None, world_size=WORLD_SIZE):
    """Runs ``job(armed)`` on every rank; ``armed`` is the callback that arms the kill, or without a kill counts events."""
    context = multiprocessing.get_context("fork")
    all_here = context.Barrier(world_size)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("attempt-*"):
        file.unlink()
    processes = [
        context.Process(
            target=_work,
            args=(job, folder, rank, variables_of(rank, world_size, store.port), kill, all_here),
            name=f"rank{rank}",
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes, folder, kill)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    phases = [file.read_text() for file in folder.glob("attempt-phase-*")]
    by_time = kill is not None and kill.kind == "time" and processes[kill.rank].exitcode == -signal.SIGKILL
    return Attempt(
        [process.exitcode for process in processes],
        phases[0] if phases else "at any moment" if by_time else "",
        "\n".join(file.read_text() for file in folder.glob("attempt-failure-*")),
    )


def _work(job, folder, rank, variables, kill, all_here):
    logging.root.handlers.clear()  # removes pytest's handlers, so that a rank logs to its stderr
    os.environ.update(variables)
    os.setpgrp()
    torch.set_num_threads(1)
    stacks = (folder / f"attempt-stacks-{rank}").open("w")
    faulthandler.dump_traceback_later(_ALONE_SECONDS - 2, file=stacks, repeat=True)
    try:
        all_here.wait(_SECONDS)
        job(Armed(folder, rank, kill if kill is not None and kill.rank == rank else None))
        dist.destroy_process_group() if dist.is_initialized() else None
    except SystemExit:
        raise
    except BaseException:
        (folder / f"attempt-failure-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _wait(processes, folder, kill):
    """Waits for all processes; after one is killed, the others have to end by themselves."""
    began = time.monotonic()
    deadline = began + _SECONDS
    waiting = {process.sentinel: process for process in processes}
    timed = kill is not None and kill.kind == "time"
    while waiting:
        if timed and (folder / f"attempt-armed-{kill.rank}").exists():
            time.sleep(kill.when)
            processes[kill.rank].kill()
            timed = False
        ended = multiprocessing.connection.wait(
            waiting, timeout=0.002 if timed else max(deadline - time.monotonic(), 0)
        )
        for sentinel in ended:
            waiting.pop(sentinel).join()
            deadline = min(deadline, time.monotonic() + _ALONE_SECONDS)
        if not ended and not timed:
            stacks = "\n".join(f"{file.name}:\n{file.read_text()}" for file in folder.glob("attempt-stacks-*"))
            raise AssertionError(f"{[process.name for process in waiting.values()]} hang after {kill}\n{stacks}")
        if time.monotonic() > deadline:
            raise AssertionError(f"the attempt hangs before {kill}")


class Armed(Callback):
    """Arms the kill when training starts ("file": at once), or counts the events at which a kill is possible."""

    def __init__(self, folder, rank, kill):
        self._folder = folder
        self._rank = rank
        self._kill = kill
        self._counts = {"file": 0, "operation": 0, "call": 0}
        self._began = 0.0
        if kill is None or kill.kind == "file":
            # CPython's audit events "open", "os.rename", "os.remove", "os.link"; an audit hook cannot be removed.
            sys.addaudithook(self._on_file)

    def on_fit_start(self, trainer, module):
        self._began = time.monotonic()
        if self._kill is None or self._kill.kind in ("call", "operation"):
            sys.setprofile(self._on_call)
        (self._folder / f"attempt-armed-{self._rank}").touch()

    def on_fit_end(self, trainer, module):
        sys.setprofile(None)
        seconds = (time.monotonic() - self._began) / 2  # half, because counting doubles the time
        (self._folder / f"attempt-counts-{self._rank}").write_text(json.dumps({**self._counts, "time": seconds}))

    def _on_file(self, event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir"):
            names = [str(name) for name in arguments[:2]]
            if any(str(self._folder) in name and "attempt-" not in name for name in names):
                self._count("file")

    def _on_call(self, _frame, event, argument):
        if event == "call":
            self._count("call")
        elif event == "c_call" and argument.__name__ in _OPERATIONS:
            self._count("operation")

    def _count(self, kind):
        self._counts[kind] += 1
        if self._kill is not None and self._kill.kind == kind and self._counts[kind] == self._kill.when:
            sys.setprofile(None)
            self._kill = None
            (self._folder / f"attempt-phase-{self._rank}").write_text(_phase(sys._getframe()))
            os.kill(os.getpid(), signal.SIGKILL)


def _phase(frame):
    while frame is not None:
        if frame.f_code.co_name in _PHASES:
            return _PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return "training"
