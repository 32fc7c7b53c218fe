"""The worker's side of a failure: what happened goes to the file in which the starter looks for it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fabricamp.launch.starter import STARTED_BY

OTHERS = "others.json"
"""What a worker knows of the others, beside its error file, which torch's agent may write again."""


def record_failure(error: BaseException, *, in_a_run: bool = False) -> None:
    """Writes ``error`` down where torch's elastic agent looks for it; does nothing in a process that no agent started.

    ``in_a_run`` of several ranks an exit with code 0 is a failure too.
    To be called where the failure happens, before anything is given back: the earliest file names the rank that began it.
    ``torch.distributed.elastic``'s decorator ``record`` writes the same, but adds a frame and turns ``sys.exit(0)`` into a
    return.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, SystemExit) and not error.code and not in_a_run:
        return
    first_time = getattr(error, "_first_recorded_ns", 0) or time.time_ns()
    error._first_recorded_ns = first_time  # type: ignore[attr-defined]
    _write(Path(path), f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), first_time)


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
        _write(Path(path), message, f"{stack}\n{message}\n", time.time_ns())
        record_others(before=before, killed=killed)
    if not path or STARTED_BY not in os.environ:
        # Past Python's stream, whose lock the main thread may hold.
        os.write(2, f"{stack}\n{message}\n".encode(errors="replace"))


def _write(target: Path, message: str, trace: str, nanoseconds: int) -> None:
    detail = {"py_callstack": trace, "timestamp": str(nanoseconds // 1_000_000_000)}
    _put(target, {"message": {"message": message, "extraInfo": detail}}, nanoseconds)


def _put(target: Path, content: dict[str, Any], nanoseconds: int) -> None:
    """In one piece: the agent may end this process at any moment, and does not read half a file."""
    part = target.with_suffix(".part")
    # A full disk may be what is to be told: the exception itself must come through.
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(content))
        os.utime(part, ns=(nanoseconds, nanoseconds))
        part.replace(target)


def report_uncaught() -> None:
    """Makes an exception that nobody catches go to the starter, which shows it once with its rank, and not to the terminal."""
    sys.excepthook = _to_the_starter


def _to_the_starter(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record_failure(error.with_traceback(trace))
