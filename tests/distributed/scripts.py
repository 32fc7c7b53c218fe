"""Starts training scripts as a user does, from a shell: for tests of launching, Ctrl-C and exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["PATHS", "end", "finish", "start", "variables_for", "wait_for_line", "without_names"]

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "startup")])
"""PYTHONPATH of started interpreters: the package, and what makes their start short."""
_FOREIGN = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "SLURM_", "PYTEST_", "FABRICAMP_", "COV_")


def start(folder, *command, **variables):
    """Starts ``python`` with ``command`` in ``folder``, in a new session as in a terminal; returns the process."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=variables_for(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def variables_for(variables):
    """Returns the environment of a script: this process's without variables of tests and jobs, updated by ``variables``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    inherited |= {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", **variables}
    inherited.pop("PYTHONUNBUFFERED", None)  # the lines of two workers would mix
    return inherited


def finish(process, timeout=200):
    """Waits for the end of a process; returns its exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"{process.args} hangs:\n{out}\n{err}") from None
    return process.returncode, out, without_names(err)


def without_names(err):
    """Returns ``err`` without torch's warnings about host names, which it cannot look up without a name server (conftest.py)."""
    nothing = "The hostname of the client socket cannot be retrieved"
    return "".join(line for line in err.splitlines(keepends=True) if nothing not in line)


def end(process):
    """Kills a process and all its descendants: workers have their own sessions, and keep its pipes open."""
    if process.poll() is not None:
        return
    for pid in [*_descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid):
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def wait_for_line(path, number=1, timeout=200.0, process=None):
    """Waits until the file has ``number`` lines; fails at once if ``process``, which writes them, has ended."""
    deadline = time.monotonic() + timeout
    while not path.exists() or len(path.read_text().splitlines()) < number:
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{process.args} ended: {finish(process)}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{path.name} has no {number} lines after {timeout} s")
        time.sleep(0.02)
