"""The checksum footer of a checkpoint file: a digest of the zip's directory (name, size, checksum and offset of every member).

The footer is the zip's comment, the last bytes of the file: writing it needs no second pass over the data.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zipfile
from typing import IO, Any

CHECKSUM = "checksum"
"""The key of the digest, which covers everything else in a checkpoint except the tensors' values."""

SEALED = "sealed:"
"""Prefix of the digest in a file that also has a checksum footer; files of earlier versions have neither."""

_MARK = b"fabricamp:"
_LENGTH = len(_MARK) + 32
# Sizes in the zip format: the end record, and the two records before it in a zip with 64-bit sizes, as torch writes.
_END = 22
_END_64 = 56
_LOCATOR_64 = 20
_ENTRY = 512  # bytes; a directory entry is smaller


class ChecksumFile:
    """Forwards what ``torch.save`` writes, except the end of the zip; :meth:`seal` writes the end with the footer.

    It writes sequentially, without seeking: the file may be an upload.  ``members`` is the maximum number of zip members.
    """

    def __init__(self, file: IO[bytes], members: int) -> None:
        self._file = file
        self._keep = (members + 32) * _ENTRY
        self._held = bytearray()

    def write(self, data: Any) -> int:
        """Writes all bytes that cannot belong to the end of the zip; returns the length of ``data``."""
        if len(data) > self._keep:
            self._file.write(self._held)
            self._file.write(data[: -self._keep])
            self._held = bytearray(data[-self._keep :])
        else:
            self._held += data
            if len(self._held) > 2 * self._keep:
                self._file.write(self._held[: -self._keep])
                del self._held[: -self._keep]
        return len(data)

    def flush(self) -> None:
        """Does nothing: the end of the zip is not known yet."""

    def seal(self) -> None:
        """Writes the end of the zip, with the footer as its comment."""
        held = io.BytesIO(self._held)
        comment = _seal(held, len(self._held))
        self._file.write(bytes(self._held[:-2]) + len(comment).to_bytes(2, "little") + comment)


def is_sealed(file: IO[bytes]) -> bool:
    """Returns whether a zip has a checksum footer; raises ``zipfile.BadZipFile`` if the footer does not match the members."""
    size = file.seek(0, os.SEEK_END)
    if size < _END + _LENGTH:
        return False
    file.seek(size - _LENGTH)
    comment = file.read(_LENGTH)
    if not comment.startswith(_MARK):
        return False
    if comment != _seal(file, size - _LENGTH):
        raise zipfile.BadZipFile("its members are not those that were written")
    return True


def verify_zip(file: IO[bytes], *, data: bool = True) -> bool:
    """Returns whether a zip has a checksum footer; raises if the zip is damaged.

    The directory and the pickle are checked always; with ``data`` all members are read and checked.
    """
    with zipfile.ZipFile(file) as archive:
        check_members(archive)
        damaged = archive.testzip() if data else None
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    return is_sealed(file)


def check_members(archive: zipfile.ZipFile) -> None:
    """Raises ``zipfile.BadZipFile`` for duplicate members or another byte order: torch would misread them, or crash.

    Also raises for a pickle with a wrong checksum.  torch does not compare it, and would import and call whatever a damaged name
    in the pickle says.
    """
    names = archive.namelist()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise zipfile.BadZipFile(f"it has two members {twice!r}")
    for name in names:
        if name.endswith("/byteorder") and name.count("/") == 1:
            with archive.open(name) as member:
                order = member.read(20).decode("ascii", "replace")
            if order != sys.byteorder:
                raise zipfile.BadZipFile(f"its byte order is {order!r}, this machine's {sys.byteorder!r}")
        if name.endswith("/data.pkl") and name.count("/") == 1:
            archive.read(name)


def _seal(file: IO[bytes], size: int) -> bytes:
    """Returns the footer for a zip whose size without a comment is ``size`` bytes."""
    digest = hashlib.blake2b(_directory(file, size - _END), digest_size=16)
    return _MARK + digest.hexdigest().encode()


def _directory(file: IO[bytes], end: int) -> bytes:
    """Returns the bytes of the zip's directory; its end record begins at ``end``."""
    before = _END_64 + _LOCATOR_64
    file.seek(max(end - before, 0))
    records = file.read(min(end, before) + _END)
    if records[:4] == b"PK\x06\x06":  # the 64-bit end record
        stop = end - before
        size = int.from_bytes(records[40:48], "little")
    else:
        stop = end
        size = int.from_bytes(records[-_END:][12:16], "little")
    if not 0 <= size <= stop:
        raise zipfile.BadZipFile("its directory is cut off")
    file.seek(stop - size)
    return file.read(size)
