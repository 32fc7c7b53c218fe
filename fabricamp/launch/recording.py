"""The worker's side of a failure: writes the error to the file in which the starter looks for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fabricamp.errors import FabricampError
from fabricamp.launch.starter import STARTED_BY

OTHERS = "others.json"
"""File with what a worker knows about other ranks; separate from its error file, which torch's agent may overwrite."""


BEFORE = "before that: "
"""Prefix of an error's note about other ranks whose end caused this rank's failure."""

_EXPLAINED: dict[type[BaseException], int] = {}
_last_code = 1


@contextlib.contextmanager
def explained_without_traceback(codes: Mapping[type[BaseException], int]) -> Iterator[None]:
    """Makes errors of these classes end the process without a traceback and with these exit codes, within this block.

    :func:`record_failure` records them in this form at once: the starter may end the process before it prints its own message.
    """
    before = dict(_EXPLAINED)
    _EXPLAINED.update(codes)
    try:
        yield
    finally:
        _EXPLAINED.clear()
        _EXPLAINED.update(before)


def record_failure(error: BaseException, *, in_a_run: bool = False) -> None:
    """Writes ``error`` to the file that torch's elastic agent reads, and notes the resulting exit code.

    Writes nothing in a process that no agent started.  ``in_a_run``: within a run of several ranks exit code 0 is a failure too.
    Call it where the failure happens, before any cleanup: the earliest file names the rank that failed first.
    ``torch.distributed.elastic``'s decorator ``record`` writes the same, but adds a frame and turns ``sys.exit(0)`` into a
    return.
    """
    global _last_code  # noqa: PLW0603 - a process ends once
    _last_code = _exit_code_of(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, SystemExit) and not error.code and not in_a_run:
        return
    first_time = getattr(error, "_first_recorded_ns", 0) or time.time_ns()
    error._first_recorded_ns = first_time  # type: ignore[attr-defined]
    # For other errors the script may choose any exit code.
    code = _last_code if isinstance(error, tuple(_EXPLAINED)) else None
    _write(Path(path), f"{type(error).__name__}: {error}", told(error), first_time, code)


def exit_code_on_record() -> int:
    """Returns the exit code that belongs to the error recorded last; 1 if there is none."""
    return _last_code


def told(error: BaseException) -> str:
    """Returns the error's text and traceback; the message of a fabricamp error comes before the traceback.

    Python's traceback ends with the message.  That order stays for errors of the user's code, unless another rank caused them.
    """
    if isinstance(error, tuple(_EXPLAINED)):
        return f"{type(error).__name__}: {error}\n"
    text = "".join(traceback.format_exception(error))
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(BEFORE)]
    if notes:
        return f"{notes[0].removeprefix(BEFORE)}; then this rank failed:\n\n{text}"
    if not isinstance(error, FabricampError):
        return text
    way = text.removesuffix("".join(traceback.format_exception_only(error)))
    sentence = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return f"{sentence}\n\n{way}"


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return next((code for kind, code in _EXPLAINED.items() if isinstance(error, kind)), 1)


def record_others(*, before: Sequence[int] = (), killed: Sequence[int] = ()) -> None:
    """Records which ranks had ended before this one failed, and which ranks it has to kill."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _put(Path(path).with_name(OTHERS), {"before": list(before), "killed": list(killed)}, time.time_ns())


def record_end(message: str, stack: str, before: Sequence[int] = (), killed: Sequence[int] = ()) -> None:
    """Records why this process is about to end by force; prints it too, unless a fabricamp starter will show the record.

    ``before`` are the ranks because of which it ends, ``killed`` the ranks that it kills.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        _write(Path(path), message, f"{message}\n{stack}\n", time.time_ns())
        record_others(before=before, killed=killed)
    if not path or STARTED_BY not in os.environ:
        # Bypass Python's stream: the main thread may hold its lock.
        os.write(2, f"{message}\n{stack}\n".encode(errors="replace"))


def _write(target: Path, message: str, trace: str, nanoseconds: int, exit_code: int | None = None) -> None:
    detail: dict[str, Any] = {"py_callstack": trace, "timestamp": str(nanoseconds // 1_000_000_000)}
    if exit_code is not None:
        detail["exit_code"] = exit_code
    _put(target, {"message": {"message": message, "extraInfo": detail}}, nanoseconds)


def _put(target: Path, content: dict[str, Any], nanoseconds: int) -> None:
    """Writes a JSON file atomically: the agent may end this process at any moment, and must not read half a file."""
    part = target.with_suffix(".part")
    # The failure to record may be a full disk: writing must not hide that exception.
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(content))
        os.utime(part, ns=(nanoseconds, nanoseconds))
        part.replace(target)


def report_uncaught(*, to_the_starter: bool) -> None:
    """Sets how an uncaught exception is shown: by a fabricamp starter, once and with its rank, or by this process.

    In this process the message of a fabricamp error comes first, unless another ``sys.excepthook`` is already installed.
    """
    if to_the_starter:
        sys.excepthook = _to_the_starter
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = _sentence_first


def _to_the_starter(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record_failure(error.with_traceback(trace))


def _sentence_first(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(told(error.with_traceback(trace)))
