"""Ends a rank's process safely: after the threads of torch.distributed, and after the other ranks' requests to its store."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from fabricamp._utils.last_word import end_by_sigint
from fabricamp.launch import exit_code_on_record, interactive
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

# A collective that a failed rank had begun ends once the other ranks join it, or are gone too.
_LEAVE_SECONDS = 5.0
_FLUSH_SECONDS = 1.0
# How long a process that hosts the store waits at most for the other ranks.
_HOST_SECONDS = 10.0
_LOOK_SECONDS = 0.01

_leavers: dict[int, _Leaver] = {}
"""The leaver of this process, keyed by process id: a forked child has none of its parent's threads to end."""

_hosted: dict[int, Callable[[], bool]] = {}
"""Whether other ranks use the store that this process hosts, keyed by process id: a forked child hosts none."""

_sees_interrupts = False


def leave_at_exit(strategy: Strategy) -> None:
    """Leaves the process group of a failed run at interpreter exit, before the interpreter starts to shut down.

    A run that completed has already left its group.  A failed run keeps it, because leaving could wait for ranks that are anywhere.
    Gloo's threads release a tensor shortly after its exchange, and need the GIL for that.  During interpreter shutdown Python
    (before 3.14) ends a thread that asks for the GIL, and C++ calls std::terminate if that thread is in a destructor: without this
    function the process dies by SIGABRT ("terminate called without an active exception") instead of exiting with its own code.
    """
    if strategy.world_size == 1:
        return
    if os.getpid() not in _leavers:
        _leavers[os.getpid()] = _Leaver()
    _leavers[os.getpid()].strategy = weakref.ref(strategy)


def host_at_exit(in_use: Callable[[], bool]) -> None:
    """Makes this process end only when ``in_use`` returns False, or after some seconds; replaces what an earlier run gave."""
    if not _hosted:
        atexit.register(_wait_until_unused)
    _hosted[os.getpid()] = in_use


def _wait_until_unused() -> None:
    in_use = _hosted.get(os.getpid(), bool)
    deadline = time.monotonic() + _HOST_SECONDS
    while in_use() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def end_by_sigint_at_exit() -> None:
    """Makes the process end by SIGINT if an uncaught KeyboardInterrupt ends it, whatever its exit functions run.

    torch's own import modules with namedtuples (``torch._dynamo``'s one has tabulate, if that is installed).  What an interactive
    interpreter caught earlier does not count.
    """
    global _sees_interrupts  # noqa: PLW0603 - an exit function is for the life of the process
    if not _sees_interrupts:
        _sees_interrupts = True
        atexit.register(_if_interrupted)


def _if_interrupted() -> None:
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not interactive():
        end_by_sigint()


class _Leaver:
    """A thread that waits for the end of the process, and then leaves the process groups.

    The thread starts early because Python starts no threads once the interpreter ends.  Leaving runs in a thread so the main
    thread waits for only a few seconds.
    """

    def __init__(self) -> None:
        self.strategy: Callable[[], Strategy | None] = lambda: None
        self._owner = os.getpid()
        self._ending = threading.Event()
        self._over = threading.Event()
        self._left = False
        thread = threading.Thread(target=self._run, name="fabricamp-leaver", daemon=True)
        with contextlib.suppress(RuntimeError):  # if no thread can be started, the process ends without leaving
            thread.start()
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        code = _exit_code()
        self._ending.set()
        self._over.wait(_LEAVE_SECONDS)
        if not self._left:
            # The other ranks have not joined a collective.  Its thread would ask for the GIL whenever they do.
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
        if dist.is_initialized():  # the group was not created by the strategy
            dist.destroy_process_group()


def _forget_frames(error: BaseException | None) -> None:
    """Clears the local variables in the traceback of ``error``, the process group among them; the traceback was already shown."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def exit_now(code: int) -> NoReturn:
    """Ends the process although threads may never end; runs no cleanup that could wait for one of them."""
    for child in multiprocessing.active_children():
        child.kill()
    # Flush in a thread: the main thread may be stuck while it holds the lock of a stream.
    flusher = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # raised during interpreter shutdown
        flusher.start()
        flusher.join(_FLUSH_SECONDS)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none at all, gone, or closed
            stream.flush()


def _exit_code() -> int:
    """Returns the exit code this process was ending with; from the record, since atexit functions cannot see ``sys.exit``."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1 if error is not None else exit_code_on_record()
