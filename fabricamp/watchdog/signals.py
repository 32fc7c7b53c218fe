"""Turns Ctrl-C and the signals by which schedulers end a job into requests to stop."""

from __future__ import annotations

import _thread
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


class HeededSignals:
    """The signals that a run takes for requests, as the watchdog's thread sees and simulates them; none outside of a run."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._reader: int | None = None

    @contextlib.contextmanager
    def heed(self, reasons: dict[int, str], *, at_once: bool) -> Iterator[None]:
        """Heeds the signals of ``reasons`` (number -> reason) in this block; with ``at_once`` Python writes each into a pipe."""
        self._reasons = reasons
        if not at_once:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)

    def arrived(self) -> list[str]:
        """Returns the reasons of new signals, whose handlers may still wait for the main thread to return from compiled code."""
        reader = self._reader
        if reader is not None:
            with contextlib.suppress(BlockingIOError):  # raised if no signal has arrived
                return [self._reasons[number] for number in os.read(reader, 64) if number in self._reasons]
        return []

    def simulate(self) -> None:
        """Lets the main thread run the handler of a signal as if that had arrived."""
        if self._reasons:
            _thread.interrupt_main(signal.Signals(next(iter(self._reasons))))


@contextlib.contextmanager
def interrupts(agreement: StopAgreement) -> Iterator[None]:
    """Turns signals into stop requests in this block: the first Ctrl-C, SIGTERM, and job signals.

    The second Ctrl-C raises KeyboardInterrupt at once.  Job signals are SIGUSR1 and SIGUSR2 in SLURM, and the signal by which
    submitit announces a preemption.

    Before the first batch each signal raises KeyboardInterrupt, once the agreement is guarded: a download or an import has no other
    point to stop at.  The previous handlers are always restored.

    Does nothing outside the main thread.  Skips ignored signals (a background job of a shell), and signals that already have a
    handler (except submitit's, see :func:`hand_on`).  Enter it before data loaders start their workers: workers forked inside the
    block leave the process group, and so survive signals sent to the whole group.
    """
    global _in_run  # noqa: PLW0603 - what happens after a fork is decided for the process
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reasons = _reasons()
    before = {number: signal.getsignal(number) for number in reasons}
    for number, reason in reasons.items():
        signal.signal(number, (_on_interrupt if number == signal.SIGINT else _on_signal)(agreement, reason))
    _leave_group_after_fork()
    outer = _in_run
    _in_run = True
    try:
        with agreement.signals.heed(reasons, at_once=agreement.shared):
            yield
    finally:
        _in_run = outer
        for number, previous in before.items():
            signal.signal(number, previous)


def _reasons() -> dict[int, str]:
    """Returns the signals to heed, by number, and the reason that each is for a stop."""
    reasons: dict[int, str] = {}
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        reasons[signal.SIGINT] = "interrupted"
    preempting = _submitits_signal()
    requeuing = _REQUEUING if "SLURM_JOB_ID" in os.environ else ()
    for number in {signal.SIGTERM, *requeuing, *preempting}:
        if signal.getsignal(number) is signal.SIG_DFL or number in preempting:
            reasons[number] = number.name
    return reasons


def _on_interrupt(agreement: StopAgreement, reason: str) -> _Handler:
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
        _ask(agreement, reason)

    return handle


def _on_signal(agreement: StopAgreement, reason: str) -> _Handler:
    owner = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            _ask(agreement, reason)
        elif number == signal.SIGTERM:
            # A forked child inherits this handler; SIGTERM must end the child as if there were none.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def _ask(agreement: StopAgreement, reason: str) -> None:
    agreement.request(reason)
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
