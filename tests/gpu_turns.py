"""Tests that need much of a GPU's memory take turns, across xdist's workers and concurrent test runs.

A plugin of pytest, loaded by tests/conftest.py, for tests marked ``gpu_memory(gib=...)``.  The turn is a lock on a file, which the
kernel releases when the process ends in any way.
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
    """Waits until no other process of this user has the turn; a context that holds it."""
    path = Path(tempfile.gettempdir(), f"fabricamp-gpu-turns-{os.getuid()}")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout's: waiting is no hang
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("gpu_memory")
    if marker is None:
        return (yield)
    with turn():
        gib = marker.kwargs["gib"]
        # Checked here and not at collection: the check initialises CUDA, and processes forked after it could not use CUDA.
        if torch.cuda.is_available() and not has(gib):
            item.add_marker(pytest.mark.skip(reason=f"needs {gib} GiB of GPU memory"))
        try:
            return (yield)
        finally:
            give_back()


def has(gib):
    """Returns whether the current card has ``gib`` GiB."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= gib * 2**30


def give_back():
    """Frees the GPU memory that torch caches and that the traceback of a failed test holds."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))
    gc.collect()
    torch.cuda.empty_cache()
