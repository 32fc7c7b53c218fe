"""The launcher: starts the ranks of this machine, by running the script again or calling a function, and waits for them.

First the starter's side, then a worker's that calls a function; last, the locks of logging while a process forks loader workers.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from fabricamp.errors import ConfigError
from fabricamp.launch.agent import END_SIGNALS, run_agent
from fabricamp.launch.failures import as_error, find_cause, report_uncaught
from fabricamp.launch.start import check_fork, end_with_starter, in_notebook, note_run, rerun_command
from fabricamp.launch.whole_lines import WholeLines
from fabricamp.messages import LOGGER, is_terminal, level
from fabricamp.rng import capture_rng, restore_rng

_FORK_SECONDS = 60
"""How long a forked rank waits until all are forked."""


def run_script(num_processes: int) -> NoReturn:
    """Runs this process's script again in ``num_processes`` workers and exits with their code.

    The workers have the same command line, directory, environment and terminal.  If one fails, the others are ended
    and the traceback of the failed worker is shown.
    """
    command, directory = rerun_command()
    # The agent substitutes ${local_rank} in arguments; a doubled dollar stands for a literal one.
    arguments = tuple(word.replace("$", "$$") for word in command[1:])
    with contextlib.chdir(directory), tempfile.TemporaryDirectory(prefix="fabricamp-") as name:
        folder = Path(name)
        outcome = run_agent(num_processes, command[0], arguments, "script", folder)
        cause = find_cause(outcome.failures, folder)
    if cause is None:
        sys.exit(0)
    if outcome.interrupts and not cause.trace:
        sys.exit(128 + signal.SIGINT)
    if not cause.on_request and sys.stderr is not None:
        sys.stderr.write(cause.report())
    sys.exit(cause.shell_code())


def run_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_processes: int,
    start_method: Literal["fork", "spawn"] = "fork",
) -> Any:
    """Runs ``function(*args)`` in ``num_processes`` workers and returns rank 0's result.

    A failure is raised here, with its rank and traceback: fabricamp's own errors keep their class, others become
    :class:`DistributedError`.  If nobody catches it, its message is shown before its traceback, unless the script has its own
    ``sys.excepthook``.  The result has to pickle; with "spawn" also function and arguments.
    """
    if start_method == "spawn":
        _check_not_being_imported()
    note_run()
    with _placeholder_file_hidden(), tempfile.TemporaryDirectory(prefix="fabricamp-") as name:
        folder = Path(name)
        if start_method == "fork":
            check_fork()
        job = _Job(function, args, capture_rng(), level())
        inherited = None
        if start_method == "fork":
            inherited = job._replace(all_here=multiprocessing.get_context("fork").Barrier(num_processes))
        else:
            # Saved to a file: tensors passed to a spawned process are shared memory, and all ranks would train the same weights.
            _save_job(job, folder)
        outcome = run_agent(num_processes, _work, (folder, inherited), start_method, folder)
        cause = find_cause(outcome.failures, folder)
        if cause is None:
            result = folder / "result"
            if not result.exists():
                sys.exit(0)  # rank 0's function called sys.exit(0)
            return torch.load(result, weights_only=False)
    if outcome.interrupts and not cause.trace:
        raise KeyboardInterrupt
    if cause.on_request:
        sys.exit(cause.shell_code())
    report_uncaught(to_the_starter=False)
    raise as_error(cause)


def _check_not_being_imported() -> None:
    """Raises :class:`ConfigError` in a spawned process that is still importing its script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "start_method='spawn' imports the script in each process that it starts, and this call would start others there; put "
            "what the script runs below `if __name__ == '__main__':`, or use start_method='script'"
        )


@contextlib.contextmanager
def _placeholder_file_hidden() -> Iterator[None]:
    """Hides the main module's file name "<stdin>" in this block: spawned processes would look for a file of that name."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or not file.startswith("<"):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class _Job(NamedTuple):
    """The job of the workers."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rng: dict[str, Any]
    """The starter's RNG states: a spawned worker has different ones, and Python reseeds after a fork."""
    level: int
    """The starter's log level: a spawned worker does not inherit the logging configuration."""
    all_here: Any = None
    """With fork, a barrier of all ranks; else None."""


def _work(folder: Path, job: _Job | None) -> None:
    """Runs the job (a spawned worker's is in ``folder``) in a worker; rank 0 saves the result in ``folder``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in END_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    # Leave the terminal's process group: Ctrl-C then reaches only the starter, which passes it on once.
    os.setpgrp()
    end_with_starter()
    if job is None:
        job = _load_job(folder)
        LOGGER.setLevel(job.level)
    else:
        # A rank must not collect the starter's garbage: stores and groups would wait for threads that were not forked.
        gc.freeze()
        # OpenMP's threads do not survive a fork: a parallel region would wait for them forever.
        torch.set_num_threads(1)
        if "IPython" in sys.modules:
            import rich

            # A notebook drops rich output of a forked kernel, but shows printed text.
            rich.reconfigure(force_jupyter=False)
        if in_notebook() and not is_terminal(sys.stdout):
            sys.stdout = WholeLines(sys.stdout)
            sys.stderr = WholeLines(sys.stderr)
        # No rank starts before all are forked: a rank forked while a starter thread serves an earlier rank would inherit that
        # thread's locks, locked forever.
        job.all_here.wait(_FORK_SECONDS)
    restore_rng(job.rng)
    try:
        result = job.function(*job.args)
    except KeyboardInterrupt:
        # torch.multiprocessing would report success without a result, for which the agent waits forever.
        sys.exit(128 + signal.SIGINT)
    if os.environ["RANK"] == "0":
        torch.save(result, folder / "result")


def _save_job(job: _Job, folder: Path) -> None:
    try:
        torch.save(job[:4], folder / "job")
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"start_method='spawn' cannot send its work to other processes ({error}); define classes and functions at the top of "
            f"a file that can be imported (no lambdas), or use start_method='fork'"
        ) from error


def _load_job(folder: Path) -> _Job:
    try:
        return _Job(*torch.load(folder / "job", weights_only=False))
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a spawned process cannot find what is defined in this session ({error}); put the classes and functions "
            f"into a file that can be imported, or use start_method='fork'"
        ) from error


_registered = False
_locked: list[logging.Handler] = []


def hold_logging_at_fork() -> None:
    """Makes this process fork only while no thread is writing a log line.

    A writing thread holds the lock of its stream.  Python gives a forked process new handler locks, but no new stream locks: a
    loader worker whose data set logs too would wait forever for a thread that it does not have.
    """
    global _registered  # noqa: PLW0603 - such a registration is for the life of the process
    if not _registered:
        _registered = True
        # In the child, logging itself replaces the handlers' locks.
        os.register_at_fork(before=_lock, after_in_parent=_unlock, after_in_child=_locked.clear)


def _lock() -> None:
    for handler in (*logging.getLogger().handlers, *logging.getLogger("fabricamp").handlers):
        handler.acquire()
        _locked.append(handler)


def _unlock() -> None:
    while _locked:
        _locked.pop().release()
