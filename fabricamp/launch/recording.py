"""The worker's side of a failure: what happened goes to the file in which the starter looks for it."""

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
"""What a worker knows of the others, beside its error file, which torch's agent may write again."""


BEFORE = "before that: "
"""How the note of an error begins that says what became of other ranks, where that is why this one failed."""

_EXPLAINED: dict[type[BaseException], int] = {}
_last_code = 1


@contextlib.contextmanager
def explained_without_traceback(codes: Mapping[type[BaseException], int]) -> Iterator[None]:
    """Within it errors of these classes end the process without a traceback, and with these exit codes.

    They are written down so from the first moment: the process may be ended by its starter before it comes to its own words.
    """
    before = dict(_EXPLAINED)
    _EXPLAINED.update(codes)
    try:
        yield
    finally:
        _EXPLAINED.clear()
        _EXPLAINED.update(before)


def record_failure(error: BaseException, *, in_a_run: bool = False) -> None:
    """Writes ``error`` down where torch's elastic agent looks for it, and notes the exit code that it leads to.

    In a process that no agent started, nothing is written.  ``in_a_run`` of several ranks an exit with code 0 is a failure too.
    To be called where the failure happens, before anything is given back: the earliest file names the rank that began it.
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
    # Of others the script may make any code.
    code = _last_code if isinstance(error, tuple(_EXPLAINED)) else None
    _write(Path(path), f"{type(error).__name__}: {error}", told(error), first_time, code)


def exit_code_on_record() -> int:
    """Returns what a process exits with because of the error that was recorded last; 1 where there is none."""
    return _last_code


def told(error: BaseException) -> str:
    """Returns what happened and the way there: the sentence that says it comes first.

    Python's traceback ends with the sentence.  It stays as it is where the error is the user's, and no other rank's end led to it.
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
    """Writes down which ranks had ended before this one failed, and which it has to kill."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _put(Path(path).with_name(OTHERS), {"before": list(before), "killed": list(killed)}, time.time_ns())


def record_end(message: str, stack: str, before: Sequence[int] = (), killed: Sequence[int] = ()) -> None:
    """Writes down why this process is about to end by force, and says so where no starter of fabricamp's shows it.

    ``before`` are the ranks because of which it ends, ``killed`` those that it kills.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        _write(Path(path), message, f"{message}\n{stack}\n", time.time_ns())
        record_others(before=before, killed=killed)
    if not path or STARTED_BY not in os.environ:
        # Past Python's stream, whose lock the main thread may hold.
        os.write(2, f"{message}\n{stack}\n".encode(errors="replace"))


def _write(target: Path, message: str, trace: str, nanoseconds: int, exit_code: int | None = None) -> None:
    detail: dict[str, Any] = {"py_callstack": trace, "timestamp": str(nanoseconds // 1_000_000_000)}
    if exit_code is not None:
        detail["exit_code"] = exit_code
    _put(target, {"message": {"message": message, "extraInfo": detail}}, nanoseconds)


def _put(target: Path, content: dict[str, Any], nanoseconds: int) -> None:
    """In one piece: the agent may end this process at any moment, and does not read half a file."""
    part = target.with_suffix(".part")
    # A full disk may be what is to be told: the exception itself must come through.
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(content))
        os.utime(part, ns=(nanoseconds, nanoseconds))
        part.replace(target)


def report_uncaught(*, to_the_starter: bool) -> None:
    """Decides how an exception is shown that nobody catches: once with its rank by a starter of fabricamp's, else here.

    Here the sentence of a fabricamp error comes first, unless somebody else decides already how exceptions are shown.
    """
    if to_the_starter:
        sys.excepthook = _to_the_starter
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = _sentence_first


def _to_the_starter(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record_failure(error.with_traceback(trace))


def _sentence_first(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(told(error.with_traceback(trace)))
