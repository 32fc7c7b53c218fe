"""Writes what is logged as lines of JSON."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fabricamp.loggers.growing_file import GrowingFile
from fabricamp.loggers.row_file import LOCK, STEP, RowFileLogger
from fabricamp.loggers.run_folder import writes
from fabricamp.loggers.trouble import reason_of


class JSONLinesLogger(RowFileLogger):
    """Logs to ``save_dir/name/version_N/metrics.jsonl``: an object per call, with ``step`` and ``time`` (seconds since 1970).

    What JSON has no number for is a string, "nan" or "inf", which ``float`` reads.  Lines are written every
    ``flush_logs_every_n_steps`` steps, before a checkpoint takes its place, and at the end; a run that goes on from a checkpoint
    takes back the lines behind it.  Lines that the disk refuses wait in memory.

    Args:
        save_dir: the folder of all runs.
        name: the folder of this experiment's runs in it.
        version: the number or name of this run; None is the next free number.
        prefix: stands before each metric's name.
        flush_logs_every_n_steps: how many steps wait in memory.

    Example:
        >>> logger = JSONLinesLogger("runs", name="digits")
    """

    FILE = "metrics.jsonl"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "fabricamp_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._begun = False
        self._digest = 0  # of what the file holds
        self._count = 0
        self._ends: list[int] = []  # the lowest and the highest step of these lines

    def state_dict(self) -> dict[str, Any]:
        """How many bytes there are, in the file and in memory, and their digest."""
        if not writes():
            return {}
        with LOCK:
            self._begin()
            waiting = _text(self._rows)
            return {"bytes": self._file.size + len(waiting), "digest": zlib.crc32(waiting, self._digest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drops the lines behind those of ``state_dict``, where the file begins with them: they will come again."""
        if not state_dict or not writes():
            return
        with LOCK:
            self._begin()
            size = state_dict["bytes"]
            if self._file.size <= size or zlib.crc32(self.metrics_file.read_bytes()[:size]) != state_dict["digest"]:
                return
            os.truncate(self.metrics_file, size)
            self._begun = False

    def close(self) -> None:
        """Writes the rest."""
        super().close()
        self._begun = False

    def _row(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        return {STEP: step, "time": round(time.time(), 3), **metrics}

    def _begin(self) -> None:
        """Looks into the file, once; a last line that a killed run left unfinished does not count."""
        if self._begun:
            return
        self._file, self._digest, self._count, self._ends = GrowingFile(self.metrics_file), 0, 0, []
        if self.metrics_file.exists():
            self._file.cut_to_lines()
            content = self.metrics_file.read_bytes()
            self._digest = zlib.crc32(content)
            self._note([json.loads(line) for line in content.splitlines()])
        self._begun = True

    def _write(self) -> None:
        rows = list(self._rows)
        if not rows:
            return
        self._begin()
        text = _text(rows)
        try:
            self._file.append(text)
        except FileNotFoundError as error:
            if not self._file.size:
                raise
            # Somebody removed it: what was in it is lost, what comes goes into a new one.
            self.trouble.tell(reason_of(error))
            self.trouble.lose(self._count, self._ends)
            self._begun = False
            self._write()
            return
        self._digest = zlib.crc32(text, self._digest)
        self._note(rows)
        del self._rows[: len(rows)]

    def _note(self, rows: Sequence[Mapping[str, float]]) -> None:
        steps = [*self._ends, *(int(row[STEP]) for row in rows)]
        self._count, self._ends = self._count + len(rows), [min(steps), max(steps)] if steps else []


def _text(rows: list[dict[str, float]]) -> bytes:
    return b"".join(json.dumps(_strict(row), allow_nan=False).encode() + b"\n" for row in rows)


def _strict(row: Mapping[str, float]) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else str(float(value)) for name, value in row.items()}
