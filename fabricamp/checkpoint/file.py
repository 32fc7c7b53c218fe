"""The checkpoint file: one torch zip of plain values, written atomically; a kill at any moment leaves the old or the new file."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch

from fabricamp._utils.files import create, sync
from fabricamp._utils.types import StateDict
from fabricamp.checkpoint import object_files, storage
from fabricamp.checkpoint.background import on_host
from fabricamp.checkpoint.checksum import ChecksumFile, check_members, is_sealed
from fabricamp.checkpoint.foreign import translated
from fabricamp.checkpoint.formats import upgraded
from fabricamp.checkpoint.objects import GLOBALS, READING, ObjectRef, refusal, without_unpickling
from fabricamp.checkpoint.packing import unpack_objects
from fabricamp.checkpoint.plain import PRIVATE, structure, tensors_in
from fabricamp.checkpoint.storage import PARTIAL_SUFFIX
from fabricamp.errors import CheckpointError, CheckpointNotFoundError, CheckpointObjectsError, nearest

CHECKSUM = "checksum"
"""The key of the digest, which covers everything else in a checkpoint except the tensors' values."""

_SEALED = "sealed:"
"""Prefix of the digest in a file that also has a checksum footer (``checksum.py``); files of earlier versions have neither."""

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
        content = {**content, CHECKSUM: _SEALED + structure(content)}

    def fill(file: IO[bytes]) -> None:
        sealing = ChecksumFile(file, members)
        object_files.save(content, cast("IO[bytes]", sealing))  # torch.save calls only `write` and `flush`
        sealing.seal()

    _replace(storage.normalized(path), fill, private=bool(state.get(PRIVATE)))


def read_checkpoint(
    path: _Path | IO[bytes],
    map_location: object = "cpu",
    *,
    verify: bool = True,
    mapped: bool = False,
    weights_only: bool | None = None,
    keep_objects: bool = False,
) -> StateDict:
    """Returns the checkpoint at ``path`` with current keys: a file or folder of fabricamp (any format), Lightning or apex.

    ``path`` may also be an open file, or a BytesIO: a checkpoint that a program changed and saved into one is read too.
    ``map_location`` is ``torch.load``'s.  With ``verify`` the checksums of the whole file are compared first; without, damage
    inside tensors goes unnoticed.  With ``mapped`` a local file is memory-mapped: its tensors are read on first use.

    Runs no code from the file, unless ``weights_only`` is False: that allows its objects to be rebuilt, once the file is verified.
    Otherwise raises :class:`CheckpointObjectsError` for objects of types that the program has not allowed.  With ``keep_objects``,
    and without ``verify``, objects stay as they were written, and can be written again.  Raises :class:`CheckpointError` if the
    file is damaged or not a checkpoint, and its subclass :class:`CheckpointNotFoundError` if there is none.
    """
    keep_objects = keep_objects or not verify
    options: dict[str, Any] = {"weights_only": weights_only, "keep_objects": keep_objects}
    if not isinstance(path, str | os.PathLike):
        in_memory = isinstance(path, io.BytesIO)
        return _read_file(
            name_of_source(path), _seekable(path), map_location, verify=verify, may_be_changed=in_memory, **options
        )
    path = storage.normalized(path)
    if storage.is_folder(path):
        from fabricamp.checkpoint.folder import read_folder  # imports torch.distributed.checkpoint: one second

        return read_folder(path, map_location=map_location, verify=verify, **options)
    # Opening a pipe could block, and reading a device might never end.
    _refuse_no_file(path)
    try:
        with storage.open_for_reading(path) as file:
            return _read_file(path, file, map_location, verify=verify, mapped=mapped, **options)
    except CheckpointError:  # some are OSErrors too
        raise
    except FileNotFoundError as error:  # removed since the check
        raise CheckpointNotFoundError(_not_there(path), path) from error
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {_reason(error)}") from error


def name_of_source(source: _Path | IO[bytes]) -> str:
    """Returns what messages call a checkpoint that was given as a path or as an open file."""
    if isinstance(source, str | os.PathLike):
        return str(source)
    return str(getattr(source, "name", "")) or f"the {type(source).__name__}"


def _seekable(file: IO[bytes]) -> IO[bytes]:
    return file if file.seekable() else io.BytesIO(file.read())


def _read_file(
    path: str,
    file: IO[bytes],
    map_location: object,
    *,
    verify: bool,
    mapped: bool = False,
    may_be_changed: bool = False,
    weights_only: bool | None,
    keep_objects: bool,
) -> StateDict:
    sealed = False
    try:
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            sealed = _verify(file, data=verify)
        is_local = isinstance(file, io.BufferedReader) and file.name == path
        # Prefer a path to a file object: torch then reads in C++, without calls into Python.
        source = path if is_local else file
        state = load_closed(source, map_location, mapped=mapped and is_zip and is_local, weights_only=weights_only)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise _unreadable(path, file, error, weights_only=weights_only) from error
    if isinstance(state, dict):
        if may_be_changed and not sealed:  # a program (chemprop) may read a file, change it and save it into memory
            state.pop(CHECKSUM, None)
        if state.pop(object_files.KEY, None) is not None and sealed:
            # Opened by torch alone, as all types are allowed; the seal covers the pickle, and the digest closed objects.
            state.pop(CHECKSUM, None)
        _check_unchanged(state, path, sealed=sealed)
        try:
            state = upgraded(translated(state), path)
        except CheckpointError:
            raise
        except Exception as error:  # a file without a checksum may have any layout
            raise CheckpointError(
                f"{path} is damaged or not a checkpoint ({type(error).__name__}: {error!s:.300}); use an older one from the same "
                "folder"
            ) from error
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict | ObjectRef):
        held = f"a {type(state).__name__}"
        if isinstance(state, dict):
            held = f"a dict with the keys {', '.join(map(repr, state))}"
        raise CheckpointError(
            f"{path} is not a checkpoint of a Trainer: it holds {held:.500}, and no dict as 'state_dict'; load "
            "weights alone with module.load_state_dict(torch.load(path, weights_only=True))"
        )
    if not keep_objects:
        unpack_objects(state, path, weights_only=weights_only)
    return state


def load_closed(source: str | IO[bytes], map_location: Any, *, mapped: bool = False, weights_only: bool | None) -> Any:
    """Returns what ``torch.save`` has written; objects that :func:`pack_objects` has pickled are not unpickled.

    ``weights_only`` False allows code to rebuild other objects, which are in the files of other trainers.
    """

    def load(*, weights_only: bool) -> Any:
        if not isinstance(source, str):
            source.seek(0)
        return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mapped)

    if object_files.has_objects(source):
        return object_files.load_closed(source, map_location, mapped=mapped)
    try:
        return load(weights_only=True)
    except pickle.UnpicklingError:
        if not isinstance(source, str):
            source.seek(0)
        with READING:  # another thread's read may have allowed these names in torch's global set
            found = set(_unsafe_globals(source))
        if found and found <= GLOBALS:  # version 0.2.0
            with without_unpickling():
                return load(weights_only=True)
        if weights_only is not False:
            raise
    return load(weights_only=False)


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
            f"cannot write checkpoint {target}: {_reason(error)}; an earlier one there is unchanged. "
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
            _verify(written)
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
            _verify(written)
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


def _check_unchanged(state: StateDict, path: str, *, sealed: bool) -> None:
    written = state.pop(CHECKSUM, None)
    if written is None:
        return
    try:
        digest = structure(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    expected = _SEALED + digest if sealed else digest
    if written != expected:
        raise CheckpointError(
            f"{path} was changed after it was written: keys, values, shapes or members differ. Use another one; or, if you changed "
            f"it on purpose, remove its key {CHECKSUM!r} (torch.load, del, torch.save)"
        )


def _verify(file: IO[bytes], *, data: bool = True) -> bool:
    """Returns whether a zip has a checksum footer; raises if the zip is damaged.

    The directory and the pickle are checked always; with ``data`` all members are read and checked.
    """
    with zipfile.ZipFile(file) as archive:
        check_members(archive)
        damaged = archive.testzip() if data else None
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    return is_sealed(file)


def _refuse_no_file(path: str) -> None:
    """Raises :class:`CheckpointNotFoundError` if there is nothing at ``path``, and CheckpointError if it is not a file."""
    if storage.is_remote(path):
        if not storage.exists(path):
            raise CheckpointNotFoundError(_not_there(path), path)
        return
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - beside lstat
    except FileNotFoundError as error:
        if os.path.lexists(path):
            why = f"{path} is a link to {os.readlink(path)}, which is not there"  # noqa: PTH115 - the same
        else:
            why = _not_there(path)
        raise CheckpointNotFoundError(why, path) from error
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {_reason(error)}") from error
    if stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{path} is a folder without {storage.STATE}; give a folder with this file, or a file named like 'epoch=3.ckpt'"
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is a pipe, a socket or a device, not a file; give a file")


def _not_there(path: str) -> str:
    try:
        siblings = storage.files_in(storage.parent(path), ".ckpt")
    except OSError:
        siblings = []  # the folder is not there, or may not be listed
    names = [sibling.rpartition("/")[2] for sibling in siblings]
    hint = nearest(path.rpartition("/")[2], names) or storage.nearby_checkpoints(path)
    return f"there is no checkpoint {path}{hint}"


def _unreadable(path: str, file: IO[bytes], error: Exception, *, weights_only: bool | None) -> CheckpointError:
    """Returns the error for a file that could not be loaded: what is wrong, and what to do."""
    file.seek(0)
    # A zip that is damaged was not unpickled, whatever it holds.
    is_damaged = isinstance(error, zipfile.BadZipFile)
    asks_for_code = not is_damaged and (weights_only is False or isinstance(error, pickle.UnpicklingError))
    unsafe = [name for name in _unsafe_globals(file) if name not in GLOBALS] if asks_for_code else []
    if unsafe and weights_only is False:
        return CheckpointObjectsError(
            f"{path} holds objects ({', '.join(unsafe):.500}) that cannot be rebuilt here ({type(error).__name__}: "
            f"{error!s:.300}); import or define their classes as when they were saved"
        )
    if unsafe:
        return refusal(path, unsafe)
    message = f"{str(error).partition('. ')[0]:.200}"
    file.seek(0)
    if not file.read(2).startswith((b"PK", b"\x80")):  # those of a zip file or a pickle, as torch.save writes them
        why = "its first bytes are not those of a checkpoint"
    elif " " in message and "weights_only" not in message:
        why = message
    else:  # one word says too little; a message about weights_only advises loading untrusted files
        why = type(error).__name__
    return CheckpointError(f"{path} is damaged or not a checkpoint ({why}); use an older one from the same folder")


def _unsafe_globals(source: str | IO[bytes]) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except Exception:  # noqa: BLE001 - it parses the same damaged pickle; the caller then reports damage
        return []


def _reason(error: BaseException) -> str:
    """Returns the operating system's reason if there is one: torch wraps it in an error of its own zip writer."""
    for candidate in (error, error.__cause__, error.__context__):
        if isinstance(candidate, OSError) and candidate.strerror:
            return candidate.strerror
    return str(error).partition("\n")[0][:300]
