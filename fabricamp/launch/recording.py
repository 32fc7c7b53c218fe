"""The worker's side of a failure: what happened goes to the file in which the starter looks for it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from fabricamp.launch.starter import STARTED_BY

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["record_end", "record_failure", "report_uncaught"]


def record_failure(error: BaseException) -> None:
    """Writes ``error`` down where torch's elastic agent looks for it; does nothing in a process that no agent started.

    To be called where the failure happens, before anything is given back: the earliest file names the rank that began it.
    ``torch.distributed.elastic``'s decorator ``record`` writes the same, but adds a frame and turns ``sys.exit(0)`` into a
    return.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
        return
    first_time = getattr(error, "_first_recorded_ns", 0) or time.time_ns()
    error._first_recorded_ns = first_time  # type: ignore[attr-defined]
    _write(Path(path), f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), first_time)


def record_end(message: str, stack: str) -> None:
    """Writes down why this process is about to end by force, and says so where no starter of ours shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        _write(Path(path), message, f"{stack}\n{message}\n", time.time_ns())
    if not path or STARTED_BY not in os.environ:
        # Past Python's stream, whose lock the main thread may hold.
        os.write(2, f"{stack}\n{message}\n".encode(errors="replace"))


def _write(target: Path, message: str, trace: str, nanoseconds: int) -> None:
    """In one piece: the agent may end this process at any moment, and does not read half a file."""
    detail = {"py_callstack": trace, "timestamp": str(nanoseconds // 1_000_000_000)}
    part = target.with_suffix(".part")
    # A full disk may be what is to be told: the exception itself must come through.
    with contextlib.suppress(OSError):
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": detail}}))
        os.utime(part, ns=(nanoseconds, nanoseconds))
        part.replace(target)


def report_uncaught() -> None:
    """Makes an exception that nobody catches go to the starter, which shows it once with its rank, and not to the terminal."""
    sys.excepthook = _to_the_starter


def _to_the_starter(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record_failure(error.with_traceback(trace))
