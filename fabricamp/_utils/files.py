"""Creates, replaces and syncs files; private files are readable by their owner only, from creation on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO


def keep_standard_descriptors() -> None:
    """Opens the null device as stdin, stdout and stderr where they are closed, as in a service.

    The next file would get the number, and a checkpoint then has the warnings in it that libraries write to stderr by number.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one


def mode_of(*, private: bool) -> int:
    """Returns the permissions to create a file with, before the process's umask."""
    return 0o600 if private else 0o666


def create(path: Path, *, private: bool = False) -> IO[bytes]:
    """Creates the file ``path`` and returns it open for writing; raises ``FileExistsError`` if it exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode_of(private=private)), "wb")


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replaces the file ``path`` by one that holds ``text``, atomically."""
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.unlink(missing_ok=True)
    with create(unfinished, private=private) as file:
        file.write(text.encode())
    unfinished.replace(path)


def sync(path: Path) -> None:
    """Waits until the file or folder is written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no fsync, and need none
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
