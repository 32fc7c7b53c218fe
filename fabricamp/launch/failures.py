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

__all__ = ["TERMINATED", "Cause", "as_error", "find_cause"]

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a rank that saved after SIGTERM, or that was ended because of another."""

_FATAL = tuple(
    getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE") if hasattr(signal, name)
)


_ENDED = (-signal.SIGTERM, TERMINATED)


class Cause(NamedTuple):
    """The failure that began it; ``message`` and ``trace`` are the exception's, empty where the process left none."""

    rank: int
    exit_code: int
    message: str
    trace: str
    ended_with_it: list[int]
    witness: str = ""
    """What another rank left, where this one left nothing."""

    def report(self) -> str:
        """Says in a few lines and a traceback what happened."""
        if self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
            hint = " (the system kills what takes too much memory)" if self.exit_code == -signal.SIGKILL else ""
        else:
            how, hint = f"ended with exit code {self.exit_code}", "" if self.trace else " and left no traceback"
        others = ", ".join(str(rank) for rank in self.ended_with_it)
        first = f"rank {self.rank} {how}{hint}" + (f"; with it ended rank {others}" if others else "")
        left = self.trace or self.witness
        return f"\n{first}\n\n{left}" if left else f"\n{first}\n"

    @property
    def on_request(self) -> bool:
        """Whether all ranks ended because they were asked to, and nothing went wrong."""
        return self.shell_code() == TERMINATED and not self.trace and not self.witness

    def shell_code(self) -> int:
        """The exit code as a shell gives it."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


def find_cause(failures: Mapping[int, ProcessFailure], folder: Path) -> Cause | None:
    """Returns the failure that began it, or None where there is none; ``failures`` has all ranks that failed.

    Nobody is killed, or calls ``sys.exit``, because another rank is gone: these come first.  Then the exception that was
    written down first, since the others often only lost their peer.  Ranks that were ended (SIGTERM) are no cause.
    """
    if not failures:
        return None
    killed = [rank for rank, failure in failures.items() if -failure.exitcode in _FATAL]
    files = sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    exited = [rank for rank, failure in failures.items() if failure.exitcode not in _ENDED]
    # The script may have caught what was written down.
    written = [rank for rank in (int(file.parent.name) for file in files) if rank in failures]
    written.sort(key=lambda rank: failures[rank].exitcode == TERMINATED)  # by force, because of another rank
    left = [rank for rank in exited if failures[rank].exitcode > 0 and rank not in written]
    rank = (killed or left or written or exited or list(failures))[0]
    message, trace = _read(files, rank)
    code = failures[rank].exitcode
    if trace and code <= 0:
        # After an exception a rank may have been ended before it could exit: another's code tells what the script makes of it.
        code = next((failures[other].exitcode for other in exited if failures[other].exitcode > 0), 1)
    witness = "" if trace else next((_witness(files, other) for other in written), "")
    return Cause(rank, code, message, trace, [other for other in exited if other != rank], witness)


def as_error(cause: Cause) -> FabricampError:
    """Returns what to raise in the starter: fabricamp's own errors as what they were, others as :class:`DistributedError`."""
    for kind in (ConfigError, CheckpointError, DistributedError):
        if cause.message.startswith(f"{kind.__name__}: "):
            return kind(f"{cause.message.removeprefix(f'{kind.__name__}: ')}\n(in a worker:)\n{cause.report()}")
    return DistributedError(cause.report())


def _witness(files: list[Path], rank: int) -> str:
    return f"what rank {rank} left:\n{_read(files, rank)[1]}"


def _read(files: list[Path], rank: int) -> tuple[str, str]:
    for file in files:
        if file.parent.name == str(rank):
            content = json.loads(file.read_text())["message"]
            return content["message"], content["extraInfo"]["py_callstack"]
    return "", ""
