"""What a worker knows about its starter, the process that started it; ends the worker together with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

STARTED_BY = "FABRICAMP_STARTED_BY"
"""Variable with the start method, set in workers that fabricamp started itself."""

STARTER = "FABRICAMP_STARTER"
"""Variable with the process id of the starter."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with_starter() -> None:
    """Makes Linux kill this worker when its starter dies, because nobody else would end it; does nothing on other systems."""
    if not sys.platform.startswith("linux") or STARTER not in os.environ:
        return
    if os.getppid() == int(os.environ[STARTER]):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(os.environ[STARTER]):
            os.kill(os.getpid(), signal.SIGKILL)
