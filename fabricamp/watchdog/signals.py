"""Turns Ctrl-C and the signals by which schedulers end a job into requests to stop."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from fabricamp.state import REQUEUES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from fabricamp.watchdog.stop import StopAgreement

    _Handler = Callable[[int, FrameType | None], None]

_REQUEUING = tuple(signal.Signals[name] for name in REQUEUES)
_in_run = False
_children_leave = False


@contextlib.contextmanager
def interrupts(agreement: StopAgreement) -> Iterator[None]:
    """Turns signals into stop requests in this block: the first Ctrl-C, SIGTERM, and job signals.

    The second Ctrl-C raises KeyboardInterrupt at once.  Job signals are SIGUSR1 and SIGUSR2 in SLURM, and the signal by which
    submitit announces a preemption.

    While the agreement is ``opening``, each signal raises KeyboardInterrupt, once the agreement is guarded: a download or an import
    has no other point to stop at.  The previous handlers are always restored.

    Does nothing outside the main thread.  Skips ignored signals (a background job of a shell), and signals that already have a
    handler (except submitit's, see :func:`hand_on`).  Enter it before data loaders start their workers: workers forked inside the
    block leave the process group, and so survive signals sent to the whole group.
    """
    global _in_run  # noqa: PLW0603 - what happens after a fork is decided for the process
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _handlers(agreement)
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    reasons = {number: signal.Signals(number).name for number in handlers}
    if signal.SIGINT in handlers:
        reasons[signal.SIGINT] = "interrupted"
    agreement.handled = reasons
    _leave_group_after_fork()
    outer = _in_run
    _in_run = True
    try:
        with _signals_at_once(agreement):
            yield
    finally:
        _in_run = outer
        for number, previous in before.items():
            signal.signal(number, previous)


def _handlers(agreement: StopAgreement) -> dict[int, _Handler]:
    handlers: dict[int, _Handler] = {}
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        handlers[signal.SIGINT] = _on_interrupt(agreement)
    preempting = _submitits_signal()
    requeuing = _REQUEUING if "SLURM_JOB_ID" in os.environ else ()
    for number in {signal.SIGTERM, *requeuing, *preempting}:
        if signal.getsignal(number) is signal.SIG_DFL or number in preempting:
            handlers[number] = _on_signal(agreement, number.name)
    return handlers


def _on_interrupt(agreement: StopAgreement) -> _Handler:
    owner = os.getpid()
    seen = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if os.getpid() != owner:
            return
        seen += 1
        # An abandoned run raises by itself, once.
        if seen > 1 and (agreement.leaving or not agreement.abandoned):
            raise KeyboardInterrupt
        _ask(agreement, "interrupted")

    return handle


def _on_signal(agreement: StopAgreement, name: str) -> _Handler:
    owner = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            _ask(agreement, name)
        elif name == "SIGTERM":
            # A forked child inherits this handler; SIGTERM must end the child as if there were none.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def _ask(agreement: StopAgreement, name: str) -> None:
    if not agreement.abandoned:
        agreement.request(name)
    if agreement.opening:
        agreement.abandon()
    agreement.raise_once()


def _leave_group_after_fork() -> None:
    """Makes loader workers leave the process group: starters send SIGTERM to the whole group, and a run needs data to end well."""
    global _children_leave  # noqa: PLW0603 - such a registration is for the life of the process
    if not _children_leave:
        _children_leave = True
        os.register_at_fork(after_in_child=_leave_group)


def _leave_group() -> None:
    if _in_run:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)  # the child's signals must not wake the parent's watchdog


@contextlib.contextmanager
def _signals_at_once(agreement: StopAgreement) -> Iterator[None]:
    """Lets the watchdog thread see a signal while the main thread is in compiled code, where Python runs no handlers."""
    if not agreement.shared:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    agreement.signal_fd = reader
    try:
        yield
    finally:
        agreement.signal_fd = None
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def exit_code(reason: str) -> int:
    """Returns the exit code of an interrupted process: 128 + the signal, as in a shell; SIGUSR1 and SIGUSR2 count as SIGTERM."""
    return 128 + (signal.SIGINT if reason == "interrupted" else signal.SIGTERM)


def hand_on(reason: str) -> bool:
    """Calls submitit's own handler for the signal that interrupted a run; returns False if there is none.

    On rank 0 submitit's handler requests a requeue and raises ``SystemExit``; on other ranks it returns.
    """
    number = signal.Signals[reason]
    handler = signal.getsignal(number)
    if number not in _submitits_signal() or not callable(handler):
        return False
    handler(number, None)
    return True


def _submitits_signal() -> list[signal.Signals]:
    """Returns the signal by which submitit announces a preemption, in a list; empty if submitit did not start this process."""
    name = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"
    if "SUBMITIT_EXECUTOR" in os.environ and name in REQUEUES:
        return [signal.Signals[name]]
    return []


def ignore_at_exit() -> None:
    """Ignores termination signals at exit: a starter that sees the first rank exit sends the other ranks a second SIGTERM."""
    for number in (signal.SIGTERM, *_REQUEUING):
        if signal.getsignal(number) is signal.SIG_DFL:
            atexit.register(signal.signal, number, signal.SIG_IGN)
