"""The checkpoint file: one torch zip of plain values, written so that a kill at any moment leaves the old file or the new one."""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import fcntl
import os
import pickle
import secrets
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fabricamp.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "PARTIAL_SUFFIX",
    "check_content",
    "copy_checkpoint",
    "link_checkpoint",
    "plain",
    "read_checkpoint",
    "write_checkpoint",
]

PARTIAL_SUFFIX = ".ckpt.partial"
"""How the (hidden) name of a file ends that is still being written, or was when its writer was killed."""

_VALUES = frozenset(
    {bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout},
)
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})
_SEQUENCES = frozenset({list, tuple, set})
_TENSORS = frozenset({Tensor, nn.Parameter})

_Path = str | os.PathLike[str]


def write_checkpoint(path: _Path, state: dict[str, Any]) -> None:
    """Writes ``state`` to ``path``: beside it, flushed to disk and verified, and only then in its place.

    Raises :class:`CheckpointError` where ``state`` holds what ``weights_only=True`` could not load, and where the disk refuses;
    what stood at ``path`` before is then untouched.
    """
    check_content(state)

    def fill(file: IO[bytes]) -> None:
        torch.save(state, file)

    _place(Path(path), fill)


def read_checkpoint(path: _Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Returns what the file at ``path`` holds, fabricamp's or Lightning's; runs no code that the file brings.

    ``map_location`` is ``torch.load``'s.  Raises :class:`CheckpointError` for a file that is missing, damaged (its checksums are
    compared first), or something else than a checkpoint.
    """
    file = Path(path)
    _check_there(file)
    try:
        if zipfile.is_zipfile(file):
            _verify(file)
        state = torch.load(file, map_location=map_location, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {file}: {_reason(error)}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(_why_unreadable(file, error)) from error
    if not isinstance(state, dict) or "state_dict" not in state:
        held = (
            f"a dict with the keys {', '.join(map(repr, state))}"
            if isinstance(state, dict)
            else f"a {type(state).__name__}"
        )
        raise CheckpointError(
            f"{file} is no checkpoint of a Trainer: it holds {held:.500}, and no 'state_dict'; "
            "weights alone are loaded with module.load_state_dict(torch.load(path, weights_only=True))"
        )
    return state


def check_content(value: object, name: str = "checkpoint") -> None:
    """Raises :class:`CheckpointError` with key path and type of what ``torch.load(weights_only=True)`` could not load."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(name, value)]
    while waiting:
        path, item = waiting.pop()
        if type(item) in _VALUES or id(item) in seen:
            continue
        seen.add(id(item))
        waiting.extend(_parts(path, item))


def plain(value: Any) -> Any:
    """Returns ``value`` with OmegaConf containers, namespaces and other mappings as dicts, and paths as strings.

    Interpolations are resolved.  Anything else stays what it is, for :func:`check_content` to judge.
    """
    omegaconf = sys.modules.get("omegaconf")  # where nobody has imported it, no value is one of its containers
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return plain(omegaconf.OmegaConf.to_container(value, resolve=True, enum_to_str=True))
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def copy_checkpoint(source: _Path, target: _Path) -> None:
    """Makes ``target`` the same file as ``source``: a second name where the file system has such, else a verified copy.

    Neither name is affected by what later happens to the other: checkpoints are replaced, never changed.
    """

    def fill(file: IO[bytes]) -> None:
        with Path(source).open("rb") as original:
            shutil.copyfileobj(original, file, 1 << 20)

    try:
        _place_name(Path(target), lambda name: os.link(source, name, follow_symlinks=True))
    except OSError:
        _place(Path(target), fill)


def link_checkpoint(source: _Path, target: _Path) -> None:
    """Makes ``target`` a symbolic link to ``source`` (relative, so that the folder can move); a copy where links are refused."""
    relative = os.path.relpath(source, Path(target).parent)
    try:
        _place_name(Path(target), lambda name: name.symlink_to(relative))
    except OSError:
        copy_checkpoint(source, target)


def _parts(path: str, item: object) -> list[tuple[str, object]]:
    """What has to be looked at inside ``item``; raises where ``item`` itself cannot be loaded again."""
    kind = type(item)
    if kind in _MAPPINGS:
        assert isinstance(item, dict)
        inside = [(f"{path}[{key!r}]", part) for key, part in item.items()]
        inside += [(f"{path} (its key {key!r})", key) for key in item]
        return inside + _attributes(path, item)
    if kind in _SEQUENCES:
        assert isinstance(item, list | tuple | set)
        return [(f"{path}[{index}]", part) for index, part in enumerate(item)]
    if kind in _TENSORS:
        assert isinstance(item, Tensor)
        if item.is_meta:
            raise CheckpointError(
                f"{path} is a tensor on the meta device, which has no values to save; materialise it first"
            )
        return _attributes(path, item)
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, strings, None, and lists, tuples "
        "and dicts of these, so that it loads without running code. Convert it (float(x), str(x), x.tolist()), or leave it out "
        "(save_hyperparameters(ignore=[...]), state_dict, on_save_checkpoint)"
    )


def _attributes(path: str, item: object) -> list[tuple[str, object]]:
    """What somebody hung on a tensor or an OrderedDict (``state_dict()._metadata``): pickled along with it."""
    return [(f"{path}.{name}", part) for name, part in getattr(item, "__dict__", {}).items()]


def _place(target: Path, fill: Callable[[IO[bytes]], None]) -> None:
    """Puts what ``fill`` writes in place of ``target``."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with _partial_file(target.parent) as (name, file):
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            _verify(name)
            name.replace(target)
        _sync_folder(target.parent)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"cannot write checkpoint {target}: {_reason(error)}; what stood there before is untouched. "
            "Free space or choose another folder (ModelCheckpoint(dirpath=...))"
        ) from error


def _place_name(target: Path, make: Callable[[Path], None]) -> None:
    """Puts the directory entry that ``make`` makes in place of ``target``."""
    name = _partial_name(target.parent)
    try:
        make(name)
        name.replace(target)
    finally:
        # Still there where `replace` failed, or did nothing because both names are already the same file.
        name.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _partial_name(folder: Path) -> Path:
    return folder / f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}"


@contextlib.contextmanager
def _partial_file(folder: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A new file in ``folder``, locked as long as its writer lives; its name is gone afterwards, renamed or removed."""
    while True:
        name = _partial_name(folder)
        with name.open("xb") as file:
            try:
                with contextlib.suppress(OSError):  # no locks on this file system: then nobody removes it either
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue  # another run took it for abandoned between its creation and the lock
                yield name, file
            finally:
                name.unlink(missing_ok=True)
        return


def _remove_abandoned(folder: Path) -> None:
    """Removes the partial files whose writers were killed: those that nobody holds a lock on."""
    for name in folder.glob(f".*{PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError), name.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.unlink()


def _verify(file: Path) -> None:
    """Reads the whole zip and compares its checksums."""
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")


def _sync_folder(folder: Path) -> None:
    """Flushes a rename to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def _check_there(file: Path) -> None:
    if file.is_dir():
        raise CheckpointError(f"{file} is a folder; a checkpoint is one file, named like 'epoch=3-step=400.ckpt'")
    if not file.exists():
        beside = [other.name for other in file.parent.glob("*.ckpt")] if file.parent.is_dir() else []
        raise CheckpointError(f"there is no checkpoint {file}{nearest(file.name, beside)}")


def _why_unreadable(file: Path, error: Exception) -> str:
    """What is wrong with a file that could not be loaded, and the cure."""
    unsafe = _unsafe_globals(file) if isinstance(error, pickle.UnpicklingError) else []
    if unsafe:
        return (
            f"{file} holds objects that only code could rebuild ({', '.join(unsafe):.500}), so it is not loaded. If you trust its "
            "source: load it once with torch.load(path, weights_only=False), put plain values in their place, torch.save it again"
        )
    return f"{file} is damaged or no checkpoint ({error!s:.200}); use an older one from the same folder"


def _unsafe_globals(file: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        return []


def _reason(error: BaseException) -> str:
    """The operating system's reason where there is one: torch hides it behind an error of its own writer."""
    for candidate in (error, error.__cause__, error.__context__):
        if isinstance(candidate, OSError) and candidate.strerror:
            return candidate.strerror
    return str(error).partition("\n")[0][:300]
