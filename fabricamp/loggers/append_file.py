"""A file to which complete records are appended: if the disk refuses a part of a record, no part is kept."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from fabricamp._utils.files import mode_of, sync


class SharedFileError(OSError):
    """Another process has written to the file."""


class AppendFile:
    """Appends to the file at ``path``, after its ``size`` valid bytes; cuts off other bytes.  Raises ``OSError`` with the path.

    The file is compared with what this process left before each write: by its size, which network file systems tell correctly, too.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path = path
        self.size = 0
        self.private = private
        self._size_on_disk = 0  # the bytes after ``size`` are cut off by the next write
        self._exists = False  # whether the file is there, as far as is known
        self._is_half_written = False  # whether a part of a record may be there, which could not be cut off
        self._may_have_other_names = False
        self._is_new = True  # whether the file's name may not be on disk yet

    def adopt(self) -> bool:
        """Adopts the file up to its last end of a line, and returns whether there is one; changes nothing on the disk.

        A line that a killed run left unfinished is cut off by the first write.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return False
        self._exists = True
        self._may_have_other_names = True
        self._size_on_disk = len(content)
        self.size = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        return True

    def read(self) -> bytes:
        """Returns the valid bytes."""
        content = self.path.read_bytes()
        self._check(len(content))
        return content[: self.size]

    def append(self, records: bytes) -> None:
        """Appends ``records``: all of them or none.  Raises :class:`SharedFileError` if another process has written to the file."""
        if self.size == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._may_have_other_names:
            self._take_from_other_names()
        descriptor = self._open()
        try:
            self._check(os.fstat(descriptor).st_size)
            self._write(descriptor, records)
        finally:
            os.close(descriptor)

    def replace(self, content: bytes) -> None:
        """Replaces the file by a new one with ``content``."""
        new = AppendFile(self.path.with_name(f".{self.path.name}.partial"), private=self.private)
        new.path.unlink(missing_ok=True)
        try:
            new.append(content)
            sync(new.path)
            new.path.replace(self.path)
        finally:
            new.path.unlink(missing_ok=True)
        self.size = new.size
        self._size_on_disk = new.size
        self._is_new = True

    def _take_from_other_names(self) -> None:
        """Puts a copy in the place of an adopted file that is a link, or has hard links: what these lead to stays as it is."""
        status = self.path.lstat()
        if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
            self.replace(self.read())
        self._may_have_other_names = False

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_NOFOLLOW
        if (
            self.size == 0
        ):  # if a file with records is gone, it is not created anew: the caller has to know that they are lost
            flags |= os.O_CREAT
        if not self._exists:
            flags |= os.O_EXCL
        try:
            descriptor = os.open(self.path, flags, mode_of(private=self.private))
        except FileExistsError as error:
            raise SharedFileError(error.errno, "another process has made this file", str(self.path)) from error
        self._exists = True
        return descriptor

    def _check(self, size_on_disk: int) -> None:
        if size_on_disk < self.size:
            raise FileNotFoundError(errno.ENOENT, "what was written is gone", str(self.path))
        if size_on_disk != self._size_on_disk and not self._is_half_written:
            raise SharedFileError(errno.EBUSY, "another process writes to this file", str(self.path))

    def _write(self, descriptor: int, records: bytes) -> None:
        self._is_half_written = True
        try:
            os.ftruncate(descriptor, self.size)
            offset = self.size
            unwritten = memoryview(records)
            while unwritten:  # a write may take only a part
                count = os.pwrite(descriptor, unwritten, offset)
                offset += count
                unwritten = unwritten[count:]
        except OSError as error:
            os.ftruncate(descriptor, self.size)
            self._size_on_disk = self.size
            self._is_half_written = False
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size += len(records)
        self._size_on_disk = self.size
        self._is_half_written = False

    def sync(self) -> None:
        """Waits until the appended records and the file's name are on disk."""
        if self.size == 0:
            return
        sync(self.path)
        if self._is_new:
            sync(self.path.parent)
            self._is_new = False
