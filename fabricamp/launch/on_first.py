"""A call that rank 0 makes for all processes that run the script, while the others wait for what it returns.

A script may have Trainers with different ``devices``, such as a fit in two processes and a test in one.  The first Trainer that
needs several processes starts them, and from there on each of them runs the script.  A Trainer that asks for another number runs
on rank 0 alone (:func:`runs_on_first`): rank 0 makes its calls as a plain process would, and the others take over the results.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fabricamp.errors import ConfigError, DistributedError, FabricampError
from fabricamp.launch.failures import forget_failure, record_failure
from fabricamp.rng import capture_rng, restore_rng
from fabricamp.strategies.base import portable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from fabricamp.strategies.base import Environment

Value = TypeVar("Value")

FOLDER = "FABRICAMP_FOLDER"
"""Variable with the folder of the processes that fabricamp started, which is removed when they have ended."""

_ENDED = "rank 0 has ended"
_LONGEST_WAIT = 0.2
"""Seconds between two looks for rank 0's result."""

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_calls: Counter[str] = Counter()
_within_of = 0  # the id of the process that makes such a call now


def runs_on_first(environment: Environment | None, num_processes: int) -> bool:
    """Returns whether a Trainer for ``num_processes`` runs on rank 0 alone, as the script runs in another number of processes.

    Raises :class:`ConfigError` in a hook of a run in forked or spawned workers, which run no script.
    """
    if environment is None or num_processes == environment.local_world_size:
        return False
    if environment.name in ("fork", "spawn"):
        raise ConfigError(
            f"Trainer(devices={num_processes}) is made by a run in {environment.local_world_size} processes, which are all in this "
            f'run; make it before or after the run, or use devices="auto" or devices={environment.local_world_size}'
        )
    return environment.name == "script"


def is_on_first() -> bool:
    """Returns whether this process is rank 0 in a call that it makes for all."""
    return _within_of == os.getpid()


def call_on_first(action: Callable[[], Value], environment: Environment) -> Value:
    """Returns what ``action`` returns on rank 0, on every rank, with rank 0's RNG states; it has to pickle.

    An error on rank 0 is raised on every rank: an error of fabricamp with its class and message, ``SystemExit`` and
    ``KeyboardInterrupt`` as they are, any other one as a :class:`DistributedError` that quotes it.
    """
    forget_failure()
    target = Path(os.environ[FOLDER]) / f"call-{_place()}"
    if environment.rank == 0:
        return _make(action, target)
    content = _wait_for(target, environment)
    failure = content.get("failure")
    if failure is not None:
        raise failure
    restore_rng({**content["rng"], "cuda": []})
    return content["result"]  # type: ignore[no-any-return]


@functools.cache
def note_end_at_exit() -> None:
    """Makes this process, rank 0, tell the others when it ends: one that waits for a call of it would wait for ever."""
    atexit.register((Path(os.environ[FOLDER]) / _ENDED).touch)


def _make(action: Callable[[], Value], target: Path) -> Value:
    global _within_of  # noqa: PLW0603 - a call concerns the whole process
    _within_of = os.getpid()
    try:
        result = action()
    except BaseException as error:
        if isinstance(error, Exception):
            record_failure(error)  # before the others': this one is the cause
        _write({"failure": _as_sent(error)}, target)
        raise
    finally:
        _within_of = 0
    _write({"result": result, "rng": capture_rng()}, target)
    return result


def _as_sent(error: BaseException) -> BaseException:
    if isinstance(error, SystemExit):
        return SystemExit(error.code)
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    if isinstance(error, FabricampError):
        return portable(error)
    return DistributedError(f"rank 0 failed in a call that it made for all: {type(error).__name__}: {error}")


def _write(content: dict[str, Any], target: Path) -> None:
    part = target.with_suffix(".part")
    torch.save(content, part)
    part.rename(target)  # whoever sees it finds it complete


def _wait_for(target: Path, environment: Environment) -> dict[str, Any]:
    ended = target.with_name(_ENDED)
    pause = 0.01
    with _without_sigint():
        while not target.exists():
            if ended.exists() and not target.exists():
                raise DistributedError(
                    f"rank {environment.rank} waits for a call of a Trainer that runs on rank 0 alone, and rank 0 has ended "
                    "without making it; every process has to make the same calls"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)
    content: dict[str, Any] = torch.load(target, weights_only=False)  # in a folder that only this user can write to
    target.with_suffix(f".taken{environment.rank}").touch()
    if len(list(target.parent.glob(f"{target.name}.taken*"))) == environment.world_size - 1:
        target.unlink(missing_ok=True)
    return content


@contextlib.contextmanager
def _without_sigint() -> Iterator[None]:
    """A context in which Ctrl-C is left to rank 0, which ends its run in the usual way, and the others with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _place() -> str:
    """Returns a name for this call: the lines of the user's code that lead to it, and how often they have done so.

    Not a number that counts all calls: a script may make some of them only ``if trainer.is_global_zero``.
    """
    lines = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    place = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    _calls[place] += 1
    return f"{place}-{_calls[place]}"
