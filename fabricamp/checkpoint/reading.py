"""Reads a checkpoint: a file of fabricamp (any format), Lightning or apex, or a folder, verified and with current keys.

:func:`read_checkpoint` reads by itself.  :func:`read_once` and :func:`map_once` are for the ranks of one host, of which one reads a
file from the disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import stat
import zipfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import torch

from fabricamp._utils.types import StateDict
from fabricamp.checkpoint import object_files, storage
from fabricamp.checkpoint.archive import Archive, ArchiveFile
from fabricamp.checkpoint.checksum import CHECKSUM, SEALED, verify_zip
from fabricamp.checkpoint.foreign import translated
from fabricamp.checkpoint.formats import upgraded
from fabricamp.checkpoint.objects import GLOBALS, READING, ObjectRef, refusal, without_unpickling
from fabricamp.checkpoint.packing import allows_code, unpack_objects
from fabricamp.checkpoint.plain import structure
from fabricamp.errors import CheckpointError, CheckpointNotFoundError, CheckpointObjectsError, nearest

if TYPE_CHECKING:
    from fabricamp.strategies.host_ranks import HostRanks

_Path = str | os.PathLike[str]


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
    with _opened(path) as file, _os_errors(path):
        return _read_file(path, file, map_location, verify=verify, mapped=mapped, **options)


def read_once(path: str, host: HostRanks, *, weights_only: bool | None) -> StateDict:
    """Returns the verified content of the file at ``path`` on each rank of ``host``: the first one reads it and sends it.

    Each rank then has its own tensors and objects.  Raises as :func:`read_checkpoint`; what the first rank finds is raised on every
    rank.  A file that is no plain torch zip (of torch before 1.6) is read by each rank itself.
    """
    reading: list[tuple[IO[bytes], ArchiveFile]] = []
    with contextlib.ExitStack() as opened:

        def begin() -> tuple[dict[str, int], bool] | None:
            file = opened.enter_context(_opened(path))
            with _os_errors(path), _damage(path, file, weights_only=weights_only):
                archive_file = ArchiveFile(file) if zipfile.is_zipfile(file) else None
                if archive_file is None or not archive_file.is_plain:
                    return None
            reading.append((file, archive_file))
            return archive_file.sizes, archive_file.sealed

        def read(index: int, start: int, stop: int) -> None:
            file, archive_file = reading[0]
            with _os_errors(path), _damage(path, file, weights_only=weights_only):
                archive_file.read_into(memories[index], index, start, stop)

        begun = host.on_rank_zero(begin)
        if begun is None:
            return read_checkpoint(path, weights_only=weights_only)
        sizes, sealed = begun
        archive = Archive(sizes)
        memories = archive.memories
        host.fill(memories, read)
    with _damage(path, archive, weights_only=weights_only):
        state = load_closed(archive, "cpu", weights_only=weights_only)
    return _finished(path, state, sealed=sealed, weights_only=weights_only)


def map_once(path: str, host: HostRanks, *, weights_only: bool | None) -> StateDict:
    """Returns the content of the file at ``path``, memory-mapped, on each rank of ``host``; the first one verifies it.

    Raises as :func:`read_checkpoint`; what the first rank finds is raised on every rank.
    """

    def verify() -> tuple[int, ...]:
        with _opened(path) as file, _os_errors(path):
            with _damage(path, file, weights_only=weights_only):
                if zipfile.is_zipfile(file):
                    verify_zip(file)
            return storage.identity_of(os.fstat(file.fileno()))

    verified = host.on_rank_zero(verify)
    with _opened(path) as file, _os_errors(path):
        if storage.identity_of(os.fstat(file.fileno())) != verified:
            raise CheckpointError(f"{path} was replaced while it was read; start the run again")
        return _read_file(path, file, "cpu", verify=False, mapped=True, weights_only=weights_only)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    # Opening a pipe could block, and reading a device might never end.
    _refuse_no_file(path)
    with contextlib.ExitStack() as stack:
        with _os_errors(path):
            file = stack.enter_context(storage.open_for_reading(path))
        yield file


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Turns errors of the system into :class:`CheckpointError` with the path."""
    try:
        yield
    except CheckpointError:  # some are OSErrors too
        raise
    except FileNotFoundError:  # removed since the check
        raise CheckpointNotFoundError(_not_there(path), path) from None
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {storage.reason(error)}") from None


@contextlib.contextmanager
def _damage(path: str, source: IO[bytes] | Archive, *, weights_only: bool | None) -> Iterator[None]:
    """Turns errors of what ``source`` holds into :class:`CheckpointError`."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        file = source.without_tensors() if isinstance(source, Archive) else source
        # The message has the reason; code of the program's classes, which only weights_only=False runs, keeps its traceback.
        raise _unreadable(path, file, error, weights_only=weights_only) from (error if weights_only is False else None)


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
    keep_objects: bool = False,
) -> StateDict:
    with _damage(path, file, weights_only=weights_only):
        is_zip = zipfile.is_zipfile(file)
        archive = None
        if is_zip and verify and not mapped:
            archive_file = ArchiveFile(file)
            sealed = archive_file.sealed
            archive = archive_file.read() if archive_file.is_plain else None
        if archive is None:
            sealed = is_zip and verify_zip(file, data=verify)
        is_local = isinstance(file, io.BufferedReader) and file.name == path
        # Prefer a path to a file object: torch then reads in C++, without calls into Python.
        source = archive or (path if is_local else file)
        state = load_closed(source, map_location, mapped=mapped and is_zip and is_local, weights_only=weights_only)
    return _finished(
        path,
        state,
        sealed=sealed,
        may_be_changed=may_be_changed,
        weights_only=weights_only,
        keep_objects=keep_objects,
    )


def _finished(
    path: str,
    state: Any,
    *,
    sealed: bool,
    may_be_changed: bool = False,
    weights_only: bool | None,
    keep_objects: bool = False,
) -> StateDict:
    """Returns what a file holds with current keys; raises :class:`CheckpointError` if it was changed, or is no checkpoint."""
    if isinstance(state, dict):
        if may_be_changed and not sealed:  # a program (chemprop) may read a file, change it and save it into memory
            state.pop(CHECKSUM, None)
        if state.pop(object_files.KEY, None) is not None and sealed:
            # Opened by torch alone, as all types are allowed; the seal covers the pickle, and the digest closed objects.
            state.pop(CHECKSUM, None)
        _check_unchanged(state, path, sealed=sealed)
        try:
            state = upgraded(translated(state, path), path)
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001 - a file without a checksum may have any layout
            raise CheckpointError(
                f"{path} is damaged or not a checkpoint ({type(error).__name__}: {error!s:.300}); use an older one from the same "
                "folder"
            ) from None
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


def load_closed(
    source: str | IO[bytes] | Archive, map_location: Any, *, mapped: bool = False, weights_only: bool | None
) -> Any:
    """Returns what ``torch.save`` has written; objects that :func:`pack_objects` has pickled are not unpickled.

    ``weights_only`` False allows code to rebuild other objects, which are in the files of other trainers.
    """

    def load(*, weights_only: bool) -> Any:
        if isinstance(source, Archive):
            return source.load(map_location, weights_only=weights_only)
        if not isinstance(source, str):
            source.seek(0)
        return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mapped)

    if object_files.has_objects(source):
        return object_files.load_closed(source, map_location, mapped=mapped)
    try:
        return load(weights_only=True)
    except pickle.UnpicklingError:
        with READING:  # another thread's read may have allowed these names in torch's global set
            found = set(_unsafe_globals(source))
        if found and found <= GLOBALS:  # version 0.2.0
            with without_unpickling():
                return load(weights_only=True)
        if not allows_code(weights_only):
            raise
    return load(weights_only=False)


def _check_unchanged(state: StateDict, path: str, *, sealed: bool) -> None:
    written = state.pop(CHECKSUM, None)
    if written is None:
        return
    try:
        digest = structure(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    expected = SEALED + digest if sealed else digest
    if written != expected:
        raise CheckpointError(
            f"{path} was changed after it was written: keys, values, shapes or members differ. Use another one; or, if you changed "
            f"it on purpose, remove its key {CHECKSUM!r} (torch.load, del, torch.save)"
        )


def _refuse_no_file(path: str) -> None:
    """Raises :class:`CheckpointNotFoundError` if there is nothing at ``path``, and CheckpointError if it is not a file."""
    if storage.is_remote(path):
        if not storage.exists(path):
            raise CheckpointNotFoundError(_not_there(path), path)
        return
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - beside lstat
    except FileNotFoundError:
        if os.path.lexists(path):
            why = f"{path} is a link to {os.readlink(path)}, which is not there"  # noqa: PTH115 - the same
        else:
            why = _not_there(path)
        raise CheckpointNotFoundError(why, path) from None
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {storage.reason(error)}") from None
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


def _unsafe_globals(source: str | IO[bytes] | Archive) -> list[str]:
    if isinstance(source, Archive):
        source = source.without_tensors()
    if not isinstance(source, str):
        source.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except Exception:  # noqa: BLE001 - it parses the same damaged pickle; the caller then reports damage
        return []
