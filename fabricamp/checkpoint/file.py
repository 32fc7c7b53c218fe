"""Writes the checkpoint file: one torch zip of plain values, atomically; a kill at any moment leaves the old or the new file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

from fabricamp._utils.files import create, sync
from fabricamp._utils.types import StateDict
from fabricamp.checkpoint import object_files, storage
from fabricamp.checkpoint.background import on_host
from fabricamp.checkpoint.checksum import CHECKSUM, SEALED, ChecksumFile, verify_zip
from fabricamp.checkpoint.plain import PRIVATE, structure, tensors_in
from fabricamp.checkpoint.storage import PARTIAL_SUFFIX
from fabricamp.errors import CheckpointError

ATTEMPTS = 5
"""Number of attempts to write a checkpoint while another process keeps removing its folder."""

_Path = str | os.PathLike[str]
Value = TypeVar("Value")


def write_checkpoint(path: _Path, state: StateDict) -> None:
    """Writes ``state`` to a temporary file beside ``path``, flushes it to disk, verifies it, and renames it to ``path``.

    ``path`` may be a URL that fsspec opens.  If ``state["private"]`` is true, only the owner can read a local file.  Raises
    :class:`CheckpointError` if ``state`` holds a value that ``weights_only=True`` could not load, or if writing fails; the previous
    file at ``path`` is then untouched.
    """
    # A program may write what torch.load returned: the keys that belong to that file are made anew.
    state = {key: value for key, value in object_files.without_key(state).items() if key != CHECKSUM}
    members = len(tensors_in(state, stored="shards" in state))
    content = on_host(state)
    if "state_dict" in state:
        content = {**content, CHECKSUM: SEALED + structure(content)}

    def fill(file: IO[bytes]) -> None:
        sealing = ChecksumFile(file, members)
        object_files.save(content, cast("IO[bytes]", sealing))  # torch.save calls only `write` and `flush`
        sealing.seal()

    _replace(storage.normalized(path), fill, private=bool(state.get(PRIVATE)))


def copy_checkpoint(source: _Path, target: _Path) -> None:
    """Makes ``target`` a hard link to ``source`` where the file system supports hard links, else a verified copy.

    Later writes to one name do not affect the other: checkpoints are replaced, never modified.
    """
    old = storage.normalized(source)
    new = storage.normalized(target)
    if storage.is_folder(old):
        from fabricamp.checkpoint.folder import copy_folder

        copy_folder(Path(old), Path(new))
        return
    if not (storage.is_remote(old) or storage.is_remote(new)):
        with contextlib.suppress(OSError):
            _replace_by_link(Path(new), lambda name: os.link(old, name, follow_symlinks=True))
            return
    _replace(new, lambda file: storage.copy_bytes(old, file), private=_is_private(old))


def link_checkpoint(source: _Path, target: _Path) -> None:
    """Makes ``target`` a symbolic link to ``source``, relative so the folder can be moved; a copy if links are refused."""
    old = storage.normalized(source)
    new = storage.normalized(target)
    if not (storage.is_remote(old) or storage.is_remote(new)):
        relative = os.path.relpath(old, storage.parent(new))
        with contextlib.suppress(OSError):
            _replace_by_link(Path(new), lambda name: name.symlink_to(relative))
            return
    copy_checkpoint(old, new)


def _is_private(path: str) -> bool:
    if storage.is_remote(path) or not Path(path).exists():
        return False
    readable_by_others = stat.S_IRGRP | stat.S_IROTH
    return not Path(path).stat().st_mode & readable_by_others


def _replace(target: str, fill: Callable[[IO[bytes]], None], *, private: bool) -> None:
    """Replaces ``target`` by the file that ``fill`` writes."""
    try:
        if storage.is_remote(target):
            _replace_remote_file(target, fill)
        else:
            retry_if_folder_is_removed(lambda: _replace_local_file(Path(target), fill, private=private))
    except Exception as error:  # a remote file system may raise any exception type
        raise CheckpointError(
            f"cannot write checkpoint {target}: {storage.reason(error)}; an earlier one there is unchanged. "
            "Free space or choose another folder (ModelCheckpoint(dirpath=...))"
        ) from error


def retry_if_folder_is_removed(write: Callable[[], Value]) -> Value:
    """Returns ``write()``, which creates the folder that it writes into; retries if that folder is removed meanwhile."""
    for _ in range(ATTEMPTS - 1):
        # Path.mkdir(exist_ok=True) raises FileExistsError if the folder is removed during the call.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return write()
    return write()


def _replace_local_file(target: Path, fill: Callable[[IO[bytes]], None], *, private: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    with _partial_file(target.parent, private=private) as (name, file):
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        with name.open("rb") as written:
            verify_zip(written)
        name.replace(target)
    sync(target.parent)


def _replace_remote_file(target: str, fill: Callable[[IO[bytes]], None]) -> None:
    filesystem, remote_path = storage.filesystem_of(target)
    folder = storage.parent(remote_path)
    name = f"{folder}/{storage.partial_name()}"
    filesystem.makedirs(folder, exist_ok=True)
    try:
        with filesystem.open(name, "wb") as file:
            fill(file)
        with filesystem.open(name, "rb") as written:
            verify_zip(written)
        filesystem.mv(name, remote_path)
    finally:
        # The partial file exists only after a failure; removing it is safe, because its random name belongs to this write alone.
        if filesystem.exists(name):
            filesystem.rm_file(name)


def _replace_by_link(target: Path, make: Callable[[Path], None]) -> None:
    """Replaces ``target`` by the directory entry (hard or symbolic link) that ``make`` creates."""
    name = target.parent / storage.partial_name()
    try:
        make(name)
        name.replace(target)
    finally:
        # The temporary name remains if `replace` failed, or did nothing because both names are hard links to the same file.
        name.unlink(missing_ok=True)
    sync(target.parent)


@contextlib.contextmanager
def _partial_file(folder: Path, *, private: bool = False) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yields a new file in ``folder``, locked while its writer lives; afterwards its name has been renamed or is removed."""
    while True:
        name = folder / storage.partial_name()
        with create(name, private=private) as file:
            try:
                with contextlib.suppress(OSError):  # without file locks no other run removes the file either
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue  # another run removed the file as abandoned before it was locked
                yield name, file
            finally:
                name.unlink(missing_ok=True)
        return


def _remove_abandoned(folder: Path) -> None:
    """Removes partial files that nobody holds a lock on: their writers were killed."""
    for name in folder.glob(f".*{PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError), name.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.unlink()
