"""Files on the disk for good, and new ones that only their owner may read from their first byte on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO


def mode_of(*, private: bool) -> int:
    """The permissions that a new file is made with; the process's umask takes from them."""
    return 0o600 if private else 0o666


def create(path: Path, *, private: bool = False) -> IO[bytes]:
    """Returns the file at ``path``, made for writing; raises ``FileExistsError`` where there is one."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode_of(private=private)), "wb")


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Puts a file that holds ``text`` in the place of what stands at ``path``."""
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.unlink(missing_ok=True)
    with create(unfinished, private=private) as file:
        file.write(text.encode())
    unfinished.replace(path)


def sync(path: Path) -> None:
    """Waits until the disk has the file or the folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot, and need not
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
