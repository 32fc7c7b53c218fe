"""The worker's side of a failure: its traceback goes to the file in which the starter looks for it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["record_failure", "report_uncaught"]


def record_failure(error: BaseException) -> None:
    """Writes ``error`` down where torch's elastic agent looks for it; does nothing in a process that no agent started.

    To be called where the failure happens, before anything is given back: the earliest file names the rank that began it.
    ``torch.distributed.elastic``'s decorator ``record`` writes the same, but adds a frame and turns ``sys.exit(0)`` into a
    return.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
        return
    target = Path(path)
    first_time = getattr(error, "_first_recorded_ns", 0) or time.time_ns()
    error._first_recorded_ns = first_time  # type: ignore[attr-defined]
    detail = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(first_time // 1_000_000_000),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": detail}
    # In one piece: the agent may end this process at any moment, and does not read half a file.
    part = target.with_suffix(".part")
    part.write_text(json.dumps({"message": message}))
    os.utime(part, ns=(first_time, first_time))
    part.replace(target)


def report_uncaught() -> None:
    """Makes an exception that nobody catches go to the starter, which shows it once with its rank, and not to the terminal."""
    sys.excepthook = _to_the_starter


def _to_the_starter(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record_failure(error.with_traceback(trace))
