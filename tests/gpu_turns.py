"""Makes tests that need much GPU memory run one at a time, across xdist's workers and across several runs.

A pytest plugin, loaded by tests/conftest.py, for tests marked ``gpu_memory(gib=...)``.  It uses a file lock, which the kernel
releases whenever the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch

__all__ = ["turn"]


@contextlib.contextmanager
def turn():
    """Returns a context that only one process of this user is in at a time; waits to enter it."""
    path = Path(tempfile.gettempdir(), f"fabricamp-gpu-turns-{os.getuid()}")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout's hook: waiting for the lock does not count
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("gpu_memory")
    if marker is None:
        return (yield)
    with turn():
        gib = marker.kwargs["gib"]
        # Checked here and not at collection, because the check initialises CUDA, and processes forked after it cannot use CUDA.
        if torch.cuda.is_available() and not has(gib):
            item.add_marker(pytest.mark.skip(reason=f"needs {gib} GiB of GPU memory"))
        try:
            return (yield)
        finally:
            give_back()


def has(gib):
    """Returns whether the current card has ``gib`` GiB of memory."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= gib * 2**30


def give_back():
    """Frees torch's cached memory, and the memory that the traceback of a failed test holds."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))
    gc.collect()
    torch.cuda.empty_cache()
