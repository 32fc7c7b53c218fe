"""Holds the logging locks while this process forks a loader worker."""

from __future__ import annotations

import logging
import os

_registered = False
_held: list[logging.Handler] = []


def hold_logging_at_fork() -> None:
    """Makes this process fork only while no thread is writing a log line.

    A writing thread holds the lock of its stream.  Python gives a forked process new handler locks, but no new stream locks: a
    loader worker whose data set logs too would wait forever for a thread that it does not have.
    """
    global _registered  # noqa: PLW0603 - such a registration is for the life of the process
    if not _registered:
        _registered = True
        # In the child, logging itself replaces the handlers' locks.
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_held.clear)


def _hold() -> None:
    for handler in (*logging.getLogger().handlers, *logging.getLogger("fabricamp").handlers):
        handler.acquire()
        _held.append(handler)


def _let_go() -> None:
    while _held:
        _held.pop().release()
