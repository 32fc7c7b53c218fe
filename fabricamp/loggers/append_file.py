"""A file to which complete records are appended: if the disk refuses a part of a record, no part is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fabricamp._utils.files import mode_of, sync


class AppendFile:
    """Appends to the file at ``path``, after its ``size`` valid bytes; cuts off other bytes.  Raises ``OSError`` with the path."""

    def __init__(self, path: Path, size: int = 0, *, private: bool = False) -> None:
        self.path = path
        self.size = size
        self.private = private
        self._is_new = True  # whether the file's name may not be on disk yet

    def cut_to_lines(self) -> None:
        """Adopts the existing file up to its last end of a line; cuts off a line that a killed run left unfinished."""
        self.size = self.path.read_bytes().rfind(b"\n") + 1
        os.truncate(self.path, self.size)

    def append(self, records: bytes) -> None:
        """Appends ``records``: all of them or none."""
        if self.size == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        # If a file with records is gone, it is not created anew: the caller has to know that the records are lost.
        flags = os.O_WRONLY if self.size else os.O_WRONLY | os.O_CREAT
        descriptor = os.open(self.path, flags, mode_of(private=self.private))
        try:
            if os.fstat(descriptor).st_size < self.size:
                raise FileNotFoundError(errno.ENOENT, "what was written is gone", str(self.path))
            self._write(descriptor, records)
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, records: bytes) -> None:
        try:
            os.ftruncate(descriptor, self.size)  # a killed run may have left half a record
            offset = self.size
            unwritten = memoryview(records)
            while unwritten:  # a write may take only a part
                count = os.pwrite(descriptor, unwritten, offset)
                offset += count
                unwritten = unwritten[count:]
        except OSError as error:
            os.ftruncate(descriptor, self.size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size += len(records)

    def sync(self) -> None:
        """Waits until the appended records and the file's name are on disk."""
        if self.size == 0:
            return
        sync(self.path)
        if self._is_new:
            sync(self.path.parent)
            self._is_new = False
