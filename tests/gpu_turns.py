"""Tests that need much of a GPU's memory take turns, in whichever of xdist's workers or of several runs they are.

A plugin of pytest, which tests/conftest.py loads, for what is marked ``gpu_memory(gib=...)``.  The turn is a lock on a file, which
the kernel opens again when its process ends, however it does.
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
    """Waits until no other process of this user is between its begin and its end."""
    path = Path(tempfile.gettempdir(), f"fabricamp-gpu-turns-{os.getuid()}")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout's: who waits for its turn does not hang
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("gpu_memory")
    if marker is None:
        return (yield)
    with turn():
        gib = marker.kwargs["gib"]
        # Asked here, not where tests are collected: the question initialises CUDA, and what was forked then could not use it.
        if torch.cuda.is_available() and not has(gib):
            item.add_marker(pytest.mark.skip(reason=f"needs {gib} GiB of GPU memory"))
        try:
            return (yield)
        finally:
            give_back()


def has(gib):
    """Whether the current card is that large."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= gib * 2**30


def give_back():
    """Returns to the card what torch keeps of it, and what the traceback of a failed test holds."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))
    gc.collect()
    torch.cuda.empty_cache()
