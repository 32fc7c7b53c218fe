"""What is locked while this process forks a loader worker."""

from __future__ import annotations

import logging
import os

_registered = False
_held: list[logging.Handler] = []


def hold_logging_at_fork() -> None:
    """From here on this process forks only while no thread is writing a line of a log.

    A thread that writes holds the lock of its stream.  Python gives a forked process new locks of handlers, but not of streams: a
    loader worker whose data set logs, too, would wait for ever for a thread that it does not have.
    """
    global _registered  # noqa: PLW0603 - such a registration is for the life of the process
    if not _registered:
        _registered = True
        # In the child logging itself gives the handlers new locks.
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_held.clear)


def _hold() -> None:
    for handler in (*logging.getLogger().handlers, *logging.getLogger("fabricamp").handlers):
        handler.acquire()
        _held.append(handler)


def _let_go() -> None:
    while _held:
        _held.pop().release()
