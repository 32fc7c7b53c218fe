"""A file to which whole records are appended: a disk that refuses half of one leaves none of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fabricamp.files import mode_of, sync


class GrowingFile:
    """The file at ``path``, of which the first ``size`` bytes were written here.  Raises ``OSError`` with the path."""

    def __init__(self, path: Path, size: int = 0, *, private: bool = False) -> None:
        self.path = path
        self.size = size
        self.private = private
        self._is_new = True

    def cut_to_lines(self) -> None:
        """Takes the file as it is, but for what stands behind its last end of a line: a killed run left it unfinished."""
        self.size = self.path.read_bytes().rfind(b"\n") + 1
        os.truncate(self.path, self.size)

    def append(self, records: bytes) -> None:
        """Puts ``records`` behind what is there: all of them or none."""
        if self.size == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | (0 if self.size else os.O_CREAT), mode_of(private=self.private))
        try:
            if os.fstat(descriptor).st_size < self.size:
                raise FileNotFoundError(errno.ENOENT, "what was written is gone", str(self.path))
            self._write(descriptor, records)
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, records: bytes) -> None:
        try:
            os.ftruncate(descriptor, self.size)  # a killed run may have left half a record
            left = memoryview(records)
            while left:
                left = left[os.pwrite(descriptor, left, self.size + len(records) - len(left)) :]
        except OSError as error:
            os.ftruncate(descriptor, self.size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size += len(records)

    def sync(self) -> None:
        """Waits until the disk has what was appended, and the file's name with it."""
        if self.size == 0:
            return
        sync(self.path)
        if self._is_new:
            sync(self.path.parent)
            self._is_new = False
