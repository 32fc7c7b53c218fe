"""The failures of ranks: each worker records its own in a file, and the starter finds the one that caused the others.

First the worker's side, with what is shown of an uncaught exception; then the starter's, from :class:`Cause` on.
"""

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

from fabricamp import errors
from fabricamp._utils.first_rank import STARTED_BY
from fabricamp.errors import DistributedError, FabricampError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from fabricamp._utils.types import StateDict

OTHERS = "others.json"
"""File with what a worker knows about other ranks; separate from its error file, which torch's agent may overwrite."""

PEER_FAILURE_NOTE = "before that: "
"""Prefix of an error's note about other ranks whose end caused this rank's failure."""

_FAMILY = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, FabricampError)]

_EXPLAINED: dict[type[BaseException], int] = {}
"""Exit codes of errors that are shown without a traceback."""
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
    _write(Path(path), f"{type(error).__name__}: {error}", error_text(error), first_time, code)


def forget_failure() -> None:
    """Removes this process's record: the script has caught the error, and goes on."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).unlink(missing_ok=True)


def exit_code_on_record() -> int:
    """Returns the exit code that belongs to the error recorded last; 1 if there is none."""
    return _last_code


def error_text(error: BaseException) -> str:
    """Returns the error's text and traceback; the message of a fabricamp error comes before the traceback.

    Python's traceback ends with the message.  That order stays for errors of the user's code, unless another rank caused them.
    """
    if isinstance(error, tuple(_EXPLAINED)):
        return f"{type(error).__name__}: {error}\n"
    text = "".join(traceback.format_exception(error))
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(PEER_FAILURE_NOTE)]
    if notes:
        return f"{notes[0].removeprefix(PEER_FAILURE_NOTE)}; then this rank failed:\n\n{text}"
    if not isinstance(error, FabricampError):
        return text
    frames = text.removesuffix("".join(traceback.format_exception_only(error)))
    message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return f"{message}\n\n{frames}"


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return next((code for error_class, code in _EXPLAINED.items() if isinstance(error, error_class)), 1)


def record_others(*, before: Sequence[int] = (), killed: Sequence[int] = ()) -> None:
    """Records which ranks had ended before this one failed, and which ranks it has to kill."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _write_json(Path(path).with_name(OTHERS), {"before": list(before), "killed": list(killed)}, time.time_ns())


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
    _write_json(target, {"message": {"message": message, "extraInfo": detail}}, nanoseconds)


def _write_json(target: Path, content: StateDict, nanoseconds: int) -> None:
    """Writes a JSON file atomically: the agent may end this process at any moment, and must not read half a file.

    The starter sorts the files by their time of modification, ``nanoseconds``.
    """
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
        sys.excepthook = _record_for_starter
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_message_first


def _record_for_starter(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record_failure(error.with_traceback(trace))


def _show_message_first(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if sys.stderr is not None:
        sys.stderr.write(error_text(error.with_traceback(trace)))


TERMINATED = 128 + signal.SIGTERM
"""The exit code of a rank that saved after SIGTERM, or that was ended because of another rank."""

_FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that kill a process at once: from outside, or for its own fault."""
_EXIT_0 = ("SystemExit: 0", "SystemExit: None", "SystemExit: ")
"""The recorded messages of ``sys.exit`` with code 0."""
_ENDED = (-signal.SIGTERM, TERMINATED)
"""Exit codes of ranks that were ended because of another rank."""


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
            if self.exit_code == -signal.SIGKILL:
                how += " (the system kills what takes too much memory)"
        elif self.exit_code == 0:
            how = "ended early with exit code 0, in the middle of its run"
        else:
            how = f"ended with exit code {self.exit_code}"
            if not self.trace:
                how += " and left no traceback"
        first_line = f"rank {self.rank} {how}"
        if self.ended_with_it:
            first_line += f"; with it ended rank {', '.join(map(str, self.ended_with_it))}"
        tracebacks = "\n".join(part for part in (self.trace, self.witness) if part)
        return f"\n{first_line}\n\n{tracebacks}" if tracebacks else f"\n{first_line}\n"

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
    recorded = [rank for rank in (int(file.parent.name) for file in files) if rank in failures]
    # Last come ranks that were ended by force, because of another rank.
    recorded.sort(key=lambda rank: failures[rank].exitcode == TERMINATED)
    called_exit = [rank for rank in exited if failures[rank].exitcode > 0 and rank not in recorded]
    killed_by_ranks = _others(folder, "killed")
    killed = [rank for rank in exited if -failures[rank].exitcode in _FATAL and rank not in killed_by_ranks]
    if not (killed or called_exit):
        early = _ended_early(files, folder, failures)
        if early is not None:
            message, trace = _read(files, early)
            return Cause(early, 0, message, trace, [rank for rank in exited if rank != early], _witness(files, early))
    rank = (killed or called_exit or recorded or exited or list(failures))[0]
    message, trace = _read(files, rank)
    code = failures[rank].exitcode
    if trace and code <= 0:
        # A rank may have been ended after its exception, before it could exit.  Its code is then the recorded one, or that given to
        # sys.exit; for other exceptions it is the code with which another rank of this script exited.
        others = (failures[other].exitcode for other in exited if failures[other].exitcode > 0)
        code = _code_on_record(files, rank) or _code_of_sys_exit(message) or next(others, 1)
    witness = ""
    if not trace:
        witness = _witness([file for file in files if int(file.parent.name) in recorded], rank)
    return Cause(rank, code, message, trace, [other for other in exited if other != rank], witness)


def as_error(cause: Cause) -> FabricampError:
    """Returns the error to raise in the starter: fabricamp's errors keep their class, others become :class:`DistributedError`.

    Its text begins with what happened: the worker's message if the error is fabricamp's, else how the worker ended.
    """
    for error_class in _FAMILY:
        prefix = f"{error_class.__name__}: "
        if cause.message.startswith(prefix):
            # The raised error already has the message, so the report leaves it out.
            without_message = cause._replace(trace=cause.trace.removeprefix(cause.message).lstrip("\n"))
            message = cause.message.removeprefix(prefix)
            return error_class(f"{message}\n(in a worker:)\n{without_message.report()}")
    return DistributedError(cause.report().removeprefix("\n"))


def _ended_early(files: list[Path], folder: Path, failures: Mapping[int, ProcessFailure]) -> int | None:
    """Returns the rank that left with exit code 0, from the first record, or from the ranks that missed a rank without a record."""
    if files and _content(files[0])["message"] in _EXIT_0:
        return int(files[0].parent.name)
    recorded = {int(file.parent.name) for file in files}
    return next((rank for rank in _others(folder, "before") if rank not in failures and rank not in recorded), None)


def _others(folder: Path, which: str) -> list[int]:
    """Returns the ranks that any record lists as ended "before" its rank, or as "killed" by it."""
    return [rank for file in sorted(folder.rglob(OTHERS)) for rank in json.loads(file.read_text())[which]]


def _code_of_sys_exit(message: str) -> int | None:
    """Returns the recorded code that was given to ``sys.exit``; None if the record is of another exception."""
    error_class, _, code = message.partition(": ")
    if error_class != "SystemExit":
        return None
    return int(code) & 0xFF if code.lstrip("-").isdigit() else 1


def _code_on_record(files: list[Path], rank: int) -> int | None:
    """Returns the exit code in the rank's own record, or None."""
    codes = [_content(file)["extraInfo"].get("exit_code") for file in files if file.parent.name == str(rank)]
    return codes[0] if codes else None


def _witness(files: list[Path], cause: int) -> str:
    """Returns the recorded traceback of the first rank other than ``cause``, with a heading; empty if there is none."""
    others = [int(file.parent.name) for file in files if file.parent.name != str(cause)]
    if not others:
        return ""
    _, trace = _read(files, others[0])
    return f"what rank {others[0]} left:\n{trace}"


def _read(files: list[Path], rank: int) -> tuple[str, str]:
    """Returns message and traceback that the rank has recorded; empty ones if it has recorded none."""
    for file in files:
        if file.parent.name == str(rank):
            content = _content(file)
            return content["message"], content["extraInfo"]["py_callstack"]
    return "", ""


def _content(file: Path) -> dict[str, Any]:
    content: StateDict = json.loads(file.read_text())["message"]
    return content
