"""Which rank's failure began it, and how that is told."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, NamedTuple

from fabricamp.errors import CheckpointError, ConfigError, DistributedError, FabricampError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["Cause", "as_error", "find_cause"]

_FATAL = tuple(
    getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE") if hasattr(signal, name)
)


class Cause(NamedTuple):
    """The failure that began it; ``message`` and ``trace`` are the exception's, empty where the process left none."""

    rank: int
    exit_code: int
    message: str
    trace: str
    ended_with_it: list[int]

    def report(self) -> str:
        """Says in a few lines and a traceback what happened."""
        if self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
            hint = " (the system kills what takes too much memory)" if self.exit_code == -signal.SIGKILL else ""
        else:
            how, hint = f"ended with exit code {self.exit_code}", "" if self.trace else " and left no traceback"
        others = ", ".join(str(rank) for rank in self.ended_with_it)
        first = f"rank {self.rank} {how}{hint}" + (f"; with it ended rank {others}" if others else "")
        return f"\n{first}\n\n{self.trace}" if self.trace else f"\n{first}\n"

    def shell_code(self) -> int:
        """The exit code as a shell gives it."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


def find_cause(failures: Mapping[int, ProcessFailure], folder: Path, *, all_known: bool) -> Cause | None:
    """Returns the failure that began it, or None where there is none; ``all_known``: ``failures`` has all ranks that failed.

    Nobody is killed, or calls ``sys.exit``, because another rank is gone: these come first.  Then the exception that was
    written down first, since the others often only lost their peer.  Ranks that the agent ended (SIGTERM) are no cause.
    """
    if not failures:
        return None
    killed = [rank for rank, failure in failures.items() if -failure.exitcode in _FATAL]
    files = sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    exited = [rank for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM]
    written = [int(file.parent.name) for file in files]
    if all_known:
        # The script may have caught what was written down.
        written = [rank for rank in written if rank in failures]
    left = [rank for rank, failure in failures.items() if failure.exitcode > 0 and rank not in written]
    rank = (killed or left or written or exited or list(failures))[0]
    message, trace = _read(files, rank)
    code = failures[rank].exitcode if rank in failures else 1
    if trace and code <= 0:
        # After an exception a rank may have been ended before it could exit: another's code tells what the script makes of it.
        code = next((failure.exitcode for failure in failures.values() if failure.exitcode > 0), 1)
    return Cause(rank, code, message, trace, [other for other in exited if other != rank])


def as_error(cause: Cause) -> FabricampError:
    """Returns what to raise in the starter: fabricamp's own errors as what they were, others as :class:`DistributedError`."""
    for kind in (ConfigError, CheckpointError, DistributedError):
        if cause.message.startswith(f"{kind.__name__}: "):
            return kind(f"{cause.message.removeprefix(f'{kind.__name__}: ')}\n(in a worker:)\n{cause.report()}")
    return DistributedError(cause.report())


def _read(files: list[Path], rank: int) -> tuple[str, str]:
    for file in files:
        if file.parent.name == str(rank):
            content = json.loads(file.read_text())["message"]
            return content["message"], content["extraInfo"]["py_callstack"]
    return "", ""
