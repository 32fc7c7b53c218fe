"""What a worker knows of the process that started it, and how it ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

STARTED_BY = "FABRICAMP_STARTED_BY"
"""Set in workers that fabricamp started itself, to the start method."""

STARTER = "FABRICAMP_STARTER"
"""The process id of their starter."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with_starter() -> None:
    """Makes the system kill this worker when its starter is killed, where it can: nobody would be left to end it."""
    if not sys.platform.startswith("linux") or STARTER not in os.environ:
        return
    if os.getppid() == int(os.environ[STARTER]):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(os.environ[STARTER]):
            os.kill(os.getpid(), signal.SIGKILL)
