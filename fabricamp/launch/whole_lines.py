"""Streams of a forked rank of a notebook, whose kernel makes an output of each write: ``print`` writes a line and its end apart."""

from __future__ import annotations

import io
import threading
from typing import TextIO


class WholeLines(io.TextIOBase):
    """Writes text into ``stream`` a line at a time, the rest when it is flushed.

    >>> import sys
    >>> print("a", "line", file=WholeLines(sys.stdout))
    a line
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""  # a line without its end
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Returns the number of characters, as other streams do."""
        with self._lock:
            whole, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self._stream.write(whole + end)
        return len(text)

    def flush(self) -> None:
        """Writes a line that has no end yet, as bars and questions are."""
        with self._lock:
            if self._begun:
                self._stream.write(self._begun)
                self._begun = ""
            self._stream.flush()

    def fileno(self) -> int:
        """Returns that of the stream."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Returns True."""
        return True
