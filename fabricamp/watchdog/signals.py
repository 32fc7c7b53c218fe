"""Ctrl-C and the signals with which schedulers end a job, turned into requests to stop."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from fabricamp.state import REQUEUES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from fabricamp.watchdog.stop import StopAgreement

_REQUEUING = tuple(signal.Signals[name] for name in REQUEUES)
_in_run = False
_children_leave = False


@contextlib.contextmanager
def interrupts(agreement: StopAgreement) -> Iterator[None]:
    """Within it signals ask to stop: the first Ctrl-C (the second raises KeyboardInterrupt at once), SIGTERM, and those of jobs.

    Of jobs are SIGUSR1 and SIGUSR2 in SLURM, and the one by which submitit tells of a preemption.

    As long as the agreement is ``opening`` each of them raises KeyboardInterrupt, once it is guarded: a download or an import has
    no other place to stop at.  The handlers that were there before are given back in any case.

    Does nothing outside the main thread; leaves a signal alone that is ignored (a job in the background of a shell), and
    the others where somebody handles them already, but for submitit's, which :func:`hand_on` serves.  Enter it before data loaders
    start their workers: those that are forked then outlive the signals that reach the whole process group.
    """
    global _in_run  # noqa: PLW0603 - what happens after a fork is decided for the process
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _handlers(agreement)
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    agreement.handled = {one: "interrupted" if one == signal.SIGINT else signal.Signals(one).name for one in handlers}
    _leave_group_after_fork()
    outer, _in_run = _in_run, True
    try:
        with _heard_at_once(agreement):
            yield
    finally:
        _in_run = outer
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def _heard_at_once(agreement: StopAgreement) -> Iterator[None]:
    """Lets the thread beside the main one hear of a signal while that is in compiled code, where no handler is called."""
    if not agreement.shared:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    agreement.ears = reader
    try:
        yield
    finally:
        agreement.ears = None
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def exit_code(reason: str) -> int:
    """What a process ends with that was interrupted: as a shell counts, SIGUSR1 and SIGUSR2 as SIGTERM."""
    return 128 + (signal.SIGINT if reason == "interrupted" else signal.SIGTERM)


def hand_on(reason: str) -> bool:
    """Calls submitit's own handler for the signal that has cut a run; returns False where there is none.

    On rank 0 it asks for a requeue and raises ``SystemExit``, on others it returns.
    """
    number = signal.Signals[reason]
    handler = signal.getsignal(number)
    if number not in _submitits_signal() or not callable(handler):
        return False
    handler(number, None)
    return True


def ignore_at_exit() -> None:
    """Lets the process come to its end undisturbed: a starter that sees the first rank exit sends the others a second SIGTERM."""
    for number in (signal.SIGTERM, *_REQUEUING):
        if signal.getsignal(number) is signal.SIG_DFL:
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _handlers(agreement: StopAgreement) -> dict[int, _Handler]:
    handlers: dict[int, _Handler] = {}
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        handlers[signal.SIGINT] = _on_interrupt(agreement)
    preempting = _submitits_signal()
    for one in {signal.SIGTERM, *(_REQUEUING if "SLURM_JOB_ID" in os.environ else ()), *preempting}:
        if signal.getsignal(one) is signal.SIG_DFL or one in preempting:
            handlers[one] = _on_signal(agreement, one.name)
    return handlers


def _submitits_signal() -> list[signal.Signals]:
    """By what submitit tells its jobs of a preemption; none where it did not start this process."""
    name = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"
    known = "SUBMITIT_EXECUTOR" in os.environ and name in REQUEUES
    return [signal.Signals[name]] if known else []


def _on_interrupt(agreement: StopAgreement) -> _Handler:
    owner = os.getpid()
    seen = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if os.getpid() != owner:
            return
        seen += 1
        if seen > 1 and (agreement.leaving or not agreement.abandoned):
            raise KeyboardInterrupt
        _ask(agreement, "interrupted")

    return handle


def _ask(agreement: StopAgreement, name: str) -> None:
    if not agreement.abandoned:
        agreement.request(name)
    if agreement.opening:
        agreement.abandon()
    agreement.raise_once()


def _on_signal(agreement: StopAgreement, name: str) -> _Handler:
    owner = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            _ask(agreement, name)
        elif name == "SIGTERM":
            # A forked child is ended by it as if nobody handled it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def _leave_group_after_fork() -> None:
    """Loader workers leave the process group: starters send it SIGTERM as a whole, and a run cannot end well without its data."""
    global _children_leave  # noqa: PLW0603 - such a registration is for the life of the process
    if not _children_leave:
        _children_leave = True
        os.register_at_fork(after_in_child=_leave_group)


def _leave_group() -> None:
    if _in_run:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)  # its signals are not its parent's


if TYPE_CHECKING:
    from collections.abc import Callable

    _Handler = Callable[[int, FrameType | None], None]
