"""Ctrl-C and the signals with which schedulers end a job, turned into requests to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from fabricamp.watchdog.stop import StopAgreement

__all__ = ["interrupts"]

_in_run = False
_children_leave = False


@contextlib.contextmanager
def interrupts(agreement: StopAgreement) -> Iterator[None]:
    """Within it signals ask to stop: the first Ctrl-C (the second raises KeyboardInterrupt at once), SIGTERM, SIGUSR1 in SLURM.

    Does nothing outside the main thread; leaves a signal alone that is ignored (a job in the background of a shell), and
    SIGTERM and SIGUSR1 where somebody handles them already.  Enter it before data loaders start their workers: those that are
    forked then outlive the signals that reach the whole process group.
    """
    global _in_run  # noqa: PLW0603 - what happens after a fork is decided for the process
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _handlers(agreement)
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _leave_group_after_fork()
    outer, _in_run = _in_run, True
    try:
        yield
    finally:
        _in_run = outer
        # A rank that has saved exits; the starter, which sees that, must not cut the others short with a second SIGTERM.
        leaving = agreement.reason in ("SIGTERM", "SIGUSR1")
        for number, previous in before.items():
            signal.signal(number, signal.SIG_IGN if leaving and number != signal.SIGINT else previous)


def _handlers(agreement: StopAgreement) -> dict[int, _Handler]:
    handlers: dict[int, _Handler] = {}
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        handlers[signal.SIGINT] = _on_interrupt(agreement)
    names = ["SIGTERM", "SIGUSR1"] if "SLURM_JOB_ID" in os.environ else ["SIGTERM"]
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            handlers[number] = _on_signal(agreement, name)
    return handlers


def _on_interrupt(agreement: StopAgreement) -> _Handler:
    owner = os.getpid()
    seen = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if os.getpid() != owner:
            return
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        agreement.request("interrupted")

    return handle


def _on_signal(agreement: StopAgreement, name: str) -> _Handler:
    owner = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            agreement.request(name)
        elif name == "SIGTERM":
            # A forked child is ended by it as if nobody handled it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def _leave_group_after_fork() -> None:
    """Loader workers leave the process group: starters send it SIGTERM as a whole, and a run cannot end well without its data."""
    global _children_leave  # noqa: PLW0603 - such a registration is for the life of the process
    if not _children_leave and hasattr(os, "register_at_fork"):
        _children_leave = True
        os.register_at_fork(after_in_child=_leave_group)


def _leave_group() -> None:
    if _in_run:
        os.setpgid(0, 0)


if TYPE_CHECKING:
    from collections.abc import Callable

    _Handler = Callable[[int, FrameType | None], None]
