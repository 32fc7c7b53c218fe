"""How the process of a rank ends: its threads of torch.distributed have ended before Python's interpreter does."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from fabricamp.launch import exit_code_on_record
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

# An exchange that a failed rank had begun ends once the others come to it, or are gone too.
_LEAVE_SECONDS = 5.0
_FLUSH_SECONDS = 1.0

_leavers: dict[int, _Leaver] = {}
"""The one of this process, by its process id: a forked child has none of its parent's threads to end."""


def leave_at_exit(strategy: Strategy) -> None:
    """Leaves the process group of a run that failed when the interpreter ends, as long as that is whole.

    A run that came to its end has left its group.  A failed one keeps it, since leaving would wait for ranks that may be anywhere.
    Gloo's threads let go of a tensor shortly after its exchange, and need Python's lock for it.  While the interpreter ends,
    Python (before 3.14) ends a thread that asks for the lock, and C++ calls std::terminate where that thread is in a destructor:
    the process died by SIGABRT ("terminate called without an active exception") instead of exiting with its own code.
    """
    if strategy.world_size == 1:
        return
    if os.getpid() not in _leavers:
        _leavers[os.getpid()] = _Leaver()
    _leavers[os.getpid()].strategy = weakref.ref(strategy)


class _Leaver:
    """A thread that waits for the end of the process, and then leaves the groups.

    It is started here since Python starts no thread any more once the interpreter ends; and a thread does it, so that the main one
    need not wait for longer than a few seconds.
    """

    def __init__(self) -> None:
        self.strategy: Callable[[], Strategy | None] = lambda: None
        self._owner = os.getpid()
        self._ending = threading.Event()
        self._over = threading.Event()
        self._left = False
        threading.Thread(target=self._run, name="fabricamp-leaver", daemon=True).start()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        code = _exit_code()
        self._ending.set()
        self._over.wait(_LEAVE_SECONDS)
        if not self._left:
            # The other ranks leave an exchange open.  Its thread would ask for the lock whenever they come to it.
            _flush()
            exit_now(code)

    def _run(self) -> None:
        self._ending.wait()
        try:
            self._leave()
            self._left = True
        finally:
            self._over.set()

    def _leave(self) -> None:
        _forget_frames(getattr(sys, "last_value", None))
        gc.collect()
        strategy = self.strategy()
        if strategy is not None:
            strategy.teardown()
        if dist.is_initialized():  # somebody else has made it
            dist.destroy_process_group()


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of what the functions that ``error`` came through were working with, the group among it: it has been shown."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def exit_now(code: int) -> NoReturn:
    """Ends the process beside threads that may never come to their end; nothing that waits for one of them is run."""
    for child in multiprocessing.active_children():
        child.kill()
    # The main thread may be stuck with the lock of a stream.
    flusher = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # where the interpreter ends
        flusher.start()
        flusher.join(_FLUSH_SECONDS)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exit_code() -> int:
    """What this process was about to exit with: Python tells a function at its end of no ``sys.exit``, so the record has to."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1 if error is not None else exit_code_on_record()
