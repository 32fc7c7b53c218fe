"""Lets no process that a test forks outlive the process of the test.

from tests.distributed.orphans import end_with

pytest-timeout ends a test that hangs together with its process.  A process that it has forked would keep the pipe to xdist open:
the run would wait for the dead worker forever, and would not name the test.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with"]

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with(parent):
    """Makes Linux kill this process when ``parent``, the process that forked it, ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)
