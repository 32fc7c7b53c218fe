"""Starts threads, and says what to do where the system starts none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from fabricamp.errors import NoThreadError

THREAD_LIMITS: Final = (
    "raise its limit of processes, which counts threads (ulimit -u, a container's pids.max), or of memory (ulimit -v)"
)


def start_thread(target: Callable[..., object], *args: Any, name: str, what: str, otherwise: str) -> threading.Thread:
    """Returns a running daemon thread that calls ``target(*args)``.

    Raises:
        NoThreadError: the system starts none; the message says ``what`` needs it, and what to do ``otherwise``.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise NoThreadError(
            f"{what} needs a thread, and the system starts none ({error}): {THREAD_LIMITS}, or {otherwise}"
        ) from error
    return thread
