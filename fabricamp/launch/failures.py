"""Finds the rank whose failure caused the others', and reports it."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.errors import CheckpointError, ConfigError, DistributedError, FabricampError
from fabricamp.launch.start import STARTED_BY

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


# ~~~ from launch.recording: The worker's side of a failure: writes the error to the file in which the starter looks for it.


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


TERMINATED = 128 + signal.SIGTERM
"""The exit code of a rank that saved after SIGTERM, or that was ended because of another rank."""

_FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


_NO_FAILURE = ("SystemExit: 0", "SystemExit: None", "SystemExit: ")

_ENDED = (-signal.SIGTERM, TERMINATED)


class Cause(NamedTuple):
    """The failure that caused the others; ``message`` and ``trace`` are the exception's, empty if the process recorded none."""

    rank: int
    exit_code: int
    message: str
    trace: str
    ended_with_it: list[int]
    witness: str = ""
    """Another rank's recorded traceback, if this rank recorded nothing."""

    def report(self) -> str:
        """Returns a report of a few lines and a traceback."""
        if self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
            hint = " (the system kills what takes too much memory)" if self.exit_code == -signal.SIGKILL else ""
        elif self.exit_code == 0:
            how, hint = "ended early with exit code 0, in the middle of its run", ""
        else:
            how, hint = f"ended with exit code {self.exit_code}", "" if self.trace else " and left no traceback"
        others = ", ".join(str(rank) for rank in self.ended_with_it)
        first = f"rank {self.rank} {how}{hint}" + (f"; with it ended rank {others}" if others else "")
        left = "\n".join(part for part in (self.trace, self.witness) if part)
        return f"\n{first}\n\n{left}" if left else f"\n{first}\n"

    @property
    def on_request(self) -> bool:
        """Whether all ranks ended on request, without an error."""
        return self.shell_code() == TERMINATED and not self.trace and not self.witness

    def shell_code(self) -> int:
        """Returns the exit code as a shell does, never 0: 1 if a rank left early with exit code 0."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code or 1


def find_cause(failures: Mapping[int, ProcessFailure], folder: Path) -> Cause | None:
    """Returns the failure that caused the others, or None if there is none; ``failures`` has all ranks that failed.

    First come ranks that were killed or called ``sys.exit``: neither happens because another rank is gone.  Then comes a rank that
    left mid-run with exit code 0, as reported by the ranks that missed it; then the rank whose exception was recorded first, since
    other ranks often only lost their peer.  Ranks that were ended (SIGTERM, or SIGKILL by a rank that gave up on a stopped one) are
    never the cause.
    """
    if not failures:
        return None
    files = sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    exited = [rank for rank, failure in failures.items() if failure.exitcode not in _ENDED]
    # Only failed ranks count: the script may have caught a recorded exception.
    written = [rank for rank in (int(file.parent.name) for file in files) if rank in failures]
    # Last come ranks that were ended by force, because of another rank.
    written.sort(key=lambda rank: failures[rank].exitcode == TERMINATED)
    left = [rank for rank in exited if failures[rank].exitcode > 0 and rank not in written]
    killed = [rank for rank in exited if -failures[rank].exitcode in _FATAL and rank not in _others(folder, "killed")]
    if not (killed or left) and (early := _early(files, folder, failures)) is not None:
        return Cause(early, 0, *_read(files, early), [one for one in exited if one != early], _witness(files, early))
    rank = (killed or left or written or exited or list(failures))[0]
    message, trace = _read(files, rank)
    code = failures[rank].exitcode
    if trace and code <= 0:
        # A rank may have been ended after its exception, before it could exit.  Its code is then the recorded one, or that given to
        # sys.exit; for other exceptions it is the code with which another rank of this script exited.
        others = (failures[other].exitcode for other in exited if failures[other].exitcode > 0)
        code = _code_on_record(files, rank) or _code_of_sys_exit(message) or next(others, 1)
    witness = "" if trace else _witness([file for file in files if int(file.parent.name) in written], rank)
    return Cause(rank, code, message, trace, [other for other in exited if other != rank], witness)


def as_error(cause: Cause) -> FabricampError:
    """Returns the error to raise in the starter: fabricamp's errors keep their class, others become :class:`DistributedError`.

    Its text begins with what happened: the worker's message if the error is fabricamp's, else how the worker ended.
    """
    for kind in (ConfigError, CheckpointError, DistributedError):
        if cause.message.startswith(f"{kind.__name__}: "):
            # The raised error already has the message, so the report leaves it out.
            rest = cause._replace(trace=cause.trace.removeprefix(cause.message).lstrip("\n"))
            return kind(f"{cause.message.removeprefix(f'{kind.__name__}: ')}\n(in a worker:)\n{rest.report()}")
    return DistributedError(cause.report().removeprefix("\n"))


def _early(files: list[Path], folder: Path, failures: Mapping[int, ProcessFailure]) -> int | None:
    """Returns the rank that left with exit code 0, from the first record, or from the ranks that missed a rank without a record."""
    if files and _content(files[0])["message"] in _NO_FAILURE:
        return int(files[0].parent.name)
    recorded = {int(file.parent.name) for file in files}
    return next((rank for rank in _others(folder, "before") if rank not in failures and rank not in recorded), None)


def _others(folder: Path, which: str) -> list[int]:
    """Returns the ranks that any record lists as ended "before" its rank, or as "killed" by it."""
    return [rank for file in sorted(folder.rglob(OTHERS)) for rank in json.loads(file.read_text())[which]]


def _code_of_sys_exit(message: str) -> int | None:
    """Returns the recorded code that was given to ``sys.exit``; None if the record is of another exception."""
    kind, _, given = message.partition(": ")
    if kind != "SystemExit":
        return None
    return int(given) & 0xFF if given.lstrip("-").isdigit() else 1


def _code_on_record(files: list[Path], rank: int) -> int | None:
    """Returns the exit code in the rank's own record, or None."""
    codes = [_content(file)["extraInfo"].get("exit_code") for file in files if file.parent.name == str(rank)]
    return codes[0] if codes else None


def _witness(files: list[Path], cause: int) -> str:
    """Returns the recorded traceback of the first rank other than ``cause``, with a heading; empty if there is none."""
    others = [int(file.parent.name) for file in files if file.parent.name != str(cause)]
    return f"what rank {others[0]} left:\n{_read(files, others[0])[1]}" if others else ""


def _read(files: list[Path], rank: int) -> tuple[str, str]:
    for file in files:
        if file.parent.name == str(rank):
            content = _content(file)
            return content["message"], content["extraInfo"]["py_callstack"]
    return "", ""


def _content(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())["message"]
    return content
