"""Runs a script in a process forked from this one, where everything is imported: an eighth of the time of a new interpreter.

from tests.distributed.forked import start_forked

For tests of a script in one process, of starters of ranks, which may be new interpreters, and of ranks with
``start_method="fork"``: signals, exit codes and output.  Tests of how Python finds what it runs, and of what is imported first,
need a new interpreter (tests/distributed/scripts.py).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import rich

from fabricamp.launch import start
from tests.distributed.orphans import end_with
from tests.distributed.scripts import variables_for

if multiprocessing.parent_process() is None:
    import torch._dynamo  # noqa: F401  every forked process would import it, for seconds; a spawned one has no use for it

__all__ = ["start_forked"]

# Where pytest makes the folders of tests, as in pytest's own TempPathFactory.
_FOLDERS = str(Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()).resolve() / "pytest-of-")


def start_forked(folder, *command, streams=None, **variables):
    """Starts a script like ``scripts.start``, in a forked process; ``command`` is the script or "-m" and a module, and arguments.

    ``streams`` are descriptors for stdout and stderr; None creates pipes, which ``communicate`` reads.
    """
    return Forked(folder, command, variables_for(variables), streams)


class Forked:
    """A forked process with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, folder, command, variables, streams):
        self.args = command
        pipes = [] if streams else [os.pipe() for _ in range(2)]
        self._read = [os.fdopen(read, "rb", buffering=0) for read, _ in pipes]
        self._said = [b"", b""]
        writes = streams or [write for _, write in pipes]
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_work, args=(folder, command, variables, writes, sum(pipes, ()), os.getpid())
        )
        self._process.start()
        self.pid = self._process.pid
        for _, write in pipes:
            os.close(write)

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def communicate(self, timeout):
        """Waits until this process and its workers have closed the pipes, then until it ends; returns the output as texts."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as waiting:
            for number, read in enumerate(self._read):
                if not read.closed:
                    waiting.register(read, selectors.EVENT_READ, number)
            while waiting.get_map():
                ready = waiting.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in ready:
                    part = key.fileobj.read(1 << 16)
                    self._said[key.data] += part
                    if not part:
                        waiting.unregister(key.fileobj)
                        key.fileobj.close()
        self._process.join(max(deadline - time.monotonic(), 0))
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return [text.decode() for text in self._said]


def _work(folder, command, variables, streams, inherited, parent):
    end_with(parent)
    gc.freeze()  # this process must not collect garbage of earlier tests
    _become_its_own(folder, variables, streams)
    for descriptor in inherited:
        os.close(descriptor)
    sys.orig_argv[1:] = command
    sys.path.insert(0, str(folder))
    ended = None
    try:
        if command[0] == "-m":
            sys.argv[:] = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = command
            runpy.run_path(str(command[0]), run_name="__main__")
    except BaseException as error:
        ended = error
    # Ends as an interpreter does; multiprocessing does the rest, also for the exit code of a SystemExit.
    if ended is not None and not isinstance(ended, SystemExit):
        sys.excepthook(type(ended), ended, ended.__traceback__)
    atexit._run_exitfuncs()
    if sys.stdout is not None:
        sys.stdout.flush()
    if isinstance(ended, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1 if isinstance(ended, Exception) else ended.code if ended else 0)


def _become_its_own(folder, variables, streams):
    """Sets session, folder, variables, streams and signals as a shell does, and removes everything of pytest."""
    os.setsid()
    multiprocessing.process._parent_process = None  # a shell starts no child of multiprocessing
    multiprocessing.process.ORIGINAL_DIR = str(folder)  # where spawned processes look for the script
    start._STARTED_IN = folder
    faulthandler.cancel_dump_traceback_later()
    atexit._clear()
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    rich.reconfigure()  # rich's console was configured for pytest's output
    _forget_modules_of_tests()


def _forget_modules_of_tests():
    """Removes the modules that earlier tests imported from their own folders: this process may have others of the same name."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(_FOLDERS):
            del sys.modules[name]
