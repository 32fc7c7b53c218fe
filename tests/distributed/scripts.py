"""Starts training scripts as a user does, from a shell: for tests of launching, Ctrl-C and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["finish", "start", "wait_for_line"]

ROOT = Path(__file__).parents[2]
_FOREIGN = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "SLURM_", "PYTEST_", "FABRICAMP_", "COV_")


def start(folder, *command, **variables):
    """A process in ``folder``: ``command`` after ``python``; in a session of its own, as a terminal gives it one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    inherited |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    inherited.pop("PYTHONUNBUFFERED", None)  # the lines of two workers would mix
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=60):
    """Exit code, standard output and standard error of a process that ends."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args} hangs:\n{out}\n{err}") from None
    return process.returncode, out, err


def wait_for_line(path, number=1, timeout=60.0):
    """Waits until the file has so many lines."""
    deadline = time.monotonic() + timeout
    while not path.exists() or len(path.read_text().splitlines()) < number:
        if time.monotonic() > deadline:
            raise AssertionError(f"{path.name} has no {number} lines after {timeout} s")
        time.sleep(0.02)
