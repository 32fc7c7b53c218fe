"""The launcher's choice of how further processes are started: by running the script again, by fork, or by spawn.

After that comes what this process is: whether its script can run again, and whether somebody waits for its result; last, the end of
a worker together with its starter, the process that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Literal

import torch

from fabricamp._utils.first_rank import STARTED_BY
from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError

STARTER = "FABRICAMP_STARTER"
"""Variable with the process id of the starter."""

StartMethod = Literal["script", "spawn", "fork"]

_METHODS: dict[str, StartMethod] = {"script": "script", "spawn": "spawn", "fork": "fork"}

# The directory at import: scripts usually change it later, and relative paths in their command line refer to this one.
_STARTED_IN = Path.cwd()

_ran_in = 0  # the id of the process in which a Trainer has run


def note_run() -> None:
    """Notes that a Trainer runs in this process, or in workers that it forks or spawns."""
    global _ran_in  # noqa: PLW0603 - what matters is the whole process
    _ran_in = os.getpid()


def has_run() -> bool:
    """Returns whether a Trainer has run in this process before: a script that runs again would repeat that."""
    return _ran_in == os.getpid()


def choose_start_method(requested: str | None = None) -> StartMethod:
    """Returns how to start the other processes: as ``Trainer(start_method=)`` asks, or a suitable method (None, "auto").

    "script" runs the script again; "fork" is for notebooks and pytest (which cannot be run again), and for a script in which a
    Trainer has run before; "spawn" is for ``python -c``, stdin and an interactive interpreter.
    """
    in_script_worker = os.environ.get(STARTED_BY) == "script"
    if requested is None or requested == "auto":
        if in_notebook() or _under_pytest():
            return "fork"
        if not script_can_rerun():
            return "spawn"
        if (in_script_worker or has_run()) and not torch.cuda.is_initialized():
            return "fork"  # what has run is not repeated
        return "spawn" if in_script_worker else "script"
    method = _METHODS[check_choice("start_method", requested, ("auto", *_METHODS))]
    if method == "script" and in_script_worker:
        raise ConfigError(
            "start_method='script' would run the script again in processes of a Trainer that runs it already, with other devices; "
            "use start_method='fork' or 'spawn' for a Trainer with more than one device that is not the script's first"
        )
    if method == "script" and not script_can_rerun():
        raise ConfigError(
            "start_method='script' runs the script again in each process, and this process runs none (python -c, stdin, notebook "
            "or interactive); put the code into a file, or use start_method='spawn' or 'fork'"
        )
    if method == "fork":
        check_fork()
    return method


def check_fork() -> None:
    """Raises :class:`ConfigError` if CUDA is initialised: a forked process could not use it."""
    if torch.cuda.is_initialized():
        raise ConfigError(
            "processes cannot be forked once CUDA is initialised here, because they could not use it; in a notebook: "
            "restart the kernel and touch no GPU (no .cuda(), no torch.cuda call) before fit; in a program: "
            "start_method='spawn'"
        )


def script_can_rerun() -> bool:
    """Returns whether this process runs a script, module or console command that can be started again by its command line."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or "<nothing>"
    from_a_file = not file.startswith("<") and sys.argv[0] not in ("", "-", "-c")
    is_child = multiprocessing.parent_process() is not None
    return from_a_file and bool(sys.executable) and not sys.flags.interactive and not is_child


def in_call() -> bool:
    """Returns whether this is a worker that a call forked or spawned; that call returns the result."""
    return os.environ.get(STARTED_BY) in ("fork", "spawn")


def interactive() -> bool:
    """Returns whether a prompt, a test or a caller waits for this process's result; such a process should not exit."""
    return in_call() or hasattr(sys, "ps1") or bool(sys.flags.interactive) or in_notebook() or _under_pytest()


def rerun_command() -> tuple[list[str], Path]:
    """Returns the command line of this process as a list (interpreter flags, ``-m``, arguments), and its start directory."""
    return [sys.executable, *sys.orig_argv[1:]], _STARTED_IN


def in_notebook() -> bool:
    """Returns whether an IPython kernel or shell runs this; imports nothing to find out."""
    package = sys.modules.get("IPython")
    return package is not None and package.get_ipython() is not None


def _under_pytest() -> bool:
    """Returns whether pytest runs this; scripts that a test starts inherit the variable, but not the module."""
    return "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules


_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with_starter() -> None:
    """Makes Linux kill this worker when its starter dies, because nobody else would end it; does nothing on other systems."""
    if not sys.platform.startswith("linux") or STARTER not in os.environ:
        return
    if os.getppid() == int(os.environ[STARTER]):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(os.environ[STARTER]):  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)
