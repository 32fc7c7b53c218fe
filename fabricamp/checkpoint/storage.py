"""Paths of checkpoints: one set of functions for paths on this machine and for URLs that fsspec opens.

Here ``path`` is either of the two, as text; ``remote_path`` is a URL's path on its own file system.  First come functions of the
text alone, then those that read or change the file system.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol

from fabricamp.errors import ConfigError

PARTIAL_SUFFIX = ".ckpt.partial"
"""Suffix of the hidden name of a checkpoint that is being written, or whose writer was killed."""

STATE = "state.pt"
"""The file that makes a folder a checkpoint."""

_NEARBY_DEPTH = 5  # as deep as runs/name/version_0/checkpoints
_NEARBY_FILES = 1000  # at each depth

_ON_THIS_MACHINE = ("file://", "local://")


def normalized(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or the URL unchanged if it is remote (``s3://bucket/run``, ``memory://run``)."""
    text = os.fspath(path)
    for prefix in _ON_THIS_MACHINE:
        text = text.removeprefix(prefix)
    return text.rstrip("/") if is_remote(text) else str(Path(text).expanduser().absolute())


def is_remote(path: str) -> bool:
    """Returns whether fsspec has to open ``path``."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """Returns the path or URL of ``name`` in ``folder``."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


def parent(path: str) -> str:
    """Returns the folder that ``path`` is in."""
    return path.rpartition("/")[0] or "/"


def with_stem_suffix(path: str, added: str) -> str:
    """Returns ``path`` with ``added`` between its stem and its suffix."""
    folder, slash, name = path.rpartition("/")
    stem, suffix = os.path.splitext(name)  # noqa: PTH122 - Path would collapse the slashes of a URL
    return f"{folder}{slash}{stem}{added}{suffix}"


def is_within(path: str, folder: str) -> bool:
    """Returns whether ``path`` is below ``folder``, at any depth."""
    return path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")


def partial_name() -> str:
    """Returns a unique hidden name for a checkpoint that is incomplete or being removed."""
    return f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}"


class FileSystem(Protocol):
    """What is asked of a file system of fsspec: that of a URL's protocol, whose package has no types."""

    @property
    def protocol(self) -> str | tuple[str, ...]:
        """Its name in URLs, or several names."""
        ...

    def open(self, path: str, mode: str) -> AbstractContextManager[IO[Any]]:
        """Opens a file, of bytes or (mode "w") of text."""
        ...

    def get_file(self, path: str, file: IO[bytes]) -> object:
        """Copies the content of ``path`` into an open local file."""
        ...

    def exists(self, path: str) -> bool:
        """Returns whether the file exists."""
        ...

    def info(self, path: str) -> Mapping[str, object]:
        """Returns what the server says of the file."""
        ...

    def glob(self, pattern: str) -> Iterable[object]:
        """Returns the paths that match."""
        ...

    def makedirs(self, path: str, *, exist_ok: bool) -> object:
        """Makes a folder and those above it."""
        ...

    def mv(self, path: str, target: str) -> object:
        """Renames a file."""
        ...

    def rm_file(self, path: str) -> object:
        """Removes a file; raises FileNotFoundError if it is gone."""
        ...


def filesystem_of(url: str) -> tuple[FileSystem, str]:
    """Returns the file system of a URL and the path on it; raises :class:`ConfigError` if no package serves the protocol."""
    import fsspec

    try:
        filesystem, remote_path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened: {error}; install the package, or give a path on this machine"
        ) from None
    return filesystem, remote_path


def is_folder(path: str) -> bool:
    """Returns whether ``path`` is a checkpoint in folder form."""
    return not is_remote(path) and (Path(path) / STATE).is_file()


def exists(path: str) -> bool:
    """Returns whether the name exists, also as a broken link."""
    if not path:
        return False
    if is_remote(path):
        filesystem, remote_path = filesystem_of(path)
        return filesystem.exists(remote_path)
    return os.path.lexists(path)


def resolves_within(path: str, folder: str, *, any_folder: bool = False) -> bool:
    """Returns whether a path from a file leads to a file below ``folder``; never to another host, nor by a link out of it.

    With ``any_folder`` a folder counts as a file: a plug-in may write checkpoints as folders.
    """
    if is_remote(folder):
        # fsspec reads "::" and "://" within a URL as another file system.
        below = path[len(folder) :]
        return is_within(path, folder) and "::" not in below and "://" not in below
    if is_remote(path):
        return False
    real = os.path.realpath(path)
    is_checkpoint = Path(real).is_file() or is_folder(real) or (any_folder and Path(real).is_dir())
    return is_checkpoint and is_within(real, os.path.realpath(folder))


def same_file(path: str, other: str) -> bool:
    """Returns whether both names exist, and lead to the same file."""
    if is_remote(path) or is_remote(other):
        return path == other and exists(path)
    file = _file_of(path)
    other_file = _file_of(other)
    if not (exists(path) and exists(other)):
        return False
    return file.exists() and other_file.exists() and file.samefile(other_file)


def _file_of(path: str) -> Path:
    """Returns the file that identifies a checkpoint: the file itself, or a folder's ``state.pt``."""
    return Path(path) / STATE if is_folder(path) else Path(path)


def modified_at(path: str) -> int:
    """Returns a file's modification time in nanoseconds; 0 if the file is remote or missing."""
    if is_remote(path):
        return 0
    try:
        return _file_of(path).stat().st_mtime_ns
    except OSError:
        return 0


def identity(path: str) -> tuple[int, ...]:
    """Returns what tells a file from one that has replaced it; empty if the file is remote or missing."""
    try:
        return () if is_remote(path) else identity_of(_file_of(path).stat())
    except OSError:
        return ()


def identity_of(file: os.stat_result) -> tuple[int, ...]:
    """Returns what tells a file from one that has replaced it."""
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns


def is_link(path: str) -> bool:
    """Returns whether ``path`` is a symbolic link."""
    return not is_remote(path) and Path(path).is_symlink()


def has_other_names(path: str) -> bool:
    """Returns whether a file would survive the removal of ``path``, because it is a link, or has another hard link."""
    if is_remote(path):
        return False
    file = _file_of(path)
    return is_link(path) or not file.exists() or file.stat().st_nlink > 1


def files_in(folder: str, suffix: str, depth: int = 0) -> list[str]:
    """Returns the sorted names that end in ``suffix``, ``depth`` folders below and not hidden; also folders and broken links.

    Empty if the folder does not exist; raises ``OSError`` if it may not be listed.
    """
    if is_remote(folder):
        filesystem, remote_path = filesystem_of(folder)
        listed = filesystem.glob(f"{remote_path.rstrip('/')}/{'*/' * depth}*")
        # Keep the spelling of ``folder``: the same URL can be spelled in several ways.
        paths = [join(folder, "/".join(str(path).split("/")[-depth - 1 :])) for path in listed]
    else:
        paths = _entries(folder, depth) if Path(folder).is_dir() else []
    return sorted(path for path in paths if path.endswith(suffix) and not path.rpartition("/")[2].startswith("."))


def _entries(folder: str, depth: int) -> list[str]:
    with os.scandir(folder) as entries:  # raises if the folder may not be listed; Path.glob would skip it
        if not depth:
            return [entry.path for entry in entries]
        folders = [entry.path for entry in entries if entry.is_dir()]
    return [path for inner in folders for path in _entries(inner, depth - 1)]


def nearby_checkpoints(path: str) -> str:
    """Returns ``"; there are A, B"`` with the newest checkpoints in and below the folder of ``path``; empty if there are none."""
    if is_remote(path):
        return ""
    with contextlib.suppress(RuntimeError):  # the home of a user who does not exist
        path = str(Path(path).expanduser())
    parents = Path(path).absolute().parents
    folder = next(ancestor for ancestor in parents if ancestor.is_dir())
    found: list[tuple[float, str]] = []
    for depth in range(_NEARBY_DEPTH):
        with contextlib.suppress(OSError):  # skip folders that may not be listed
            files = [*itertools.islice(folder.glob(f"{'*/' * depth}[!.]*.ckpt"), _NEARBY_FILES)]
            found += [(file.stat().st_mtime, str(file).removeprefix(f"{Path.cwd()}/")) for file in files]
    newest = [name for _, name in sorted(found, reverse=True)[:3]]
    if not newest:
        return ""
    return f"; there {'is' if len(newest) == 1 else 'are'} {', '.join(newest)}"


def why_not_writable(folder: str) -> str:
    """Returns why no file can be written into ``folder``, checked without creating it; empty if nothing is wrong."""
    if is_remote(folder):
        try:
            filesystem_of(folder)
        except ConfigError as error:
            return str(error)
        return ""
    location = Path(folder)
    existing = next(ancestor for ancestor in (location, *location.parents) if ancestor.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written to"


@contextlib.contextmanager
def open_for_reading(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading; a remote file is read in pieces, on demand, or copied whole if its server sends no pieces."""
    if is_remote(path):
        filesystem, remote_path = filesystem_of(path)
        if _sends_ranges(filesystem, remote_path):
            with filesystem.open(remote_path, "rb") as file:
                yield file
        else:
            with tempfile.TemporaryFile() as file:
                filesystem.get_file(remote_path, file)
                file.seek(0)
                yield file
    else:
        with Path(path).open("rb") as file:
            yield file


def _sends_ranges(filesystem: FileSystem, remote_path: str) -> bool:
    """Returns whether a file can be read in pieces: over HTTP only if the server says so, as many servers ignore ranges."""
    protocol = filesystem.protocol
    if "http" not in ((protocol,) if isinstance(protocol, str) else protocol):
        return True
    return bool(filesystem.info(remote_path).get("partial"))


def copy_bytes(source: str, target: IO[bytes]) -> None:
    """Writes the content of ``source`` into an open file."""
    with open_for_reading(source) as file:
        shutil.copyfileobj(file, target, 1 << 20)


def remove(path: str) -> None:
    """Removes a file or a checkpoint folder if it exists; raises ``OSError``."""
    if is_folder(path) and not is_link(path):
        # Rename first: if this process is killed, the next writer removes the hidden folder as abandoned.
        hidden = Path(path).with_name(partial_name())
        Path(path).rename(hidden)
        shutil.rmtree(hidden)
        return
    if not is_remote(path):
        Path(path).unlink(missing_ok=True)
        return
    filesystem, remote_path = filesystem_of(path)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm_file(remote_path)


def reason(error: BaseException) -> str:
    """Returns the operating system's reason if there is one: torch wraps it in an error of its own zip writer."""
    for candidate in (error, error.__cause__, error.__context__):
        if isinstance(candidate, OSError) and candidate.strerror:
            return candidate.strerror
    return str(error).partition("\n")[0][:300]
