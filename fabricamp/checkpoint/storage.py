"""Locations of checkpoints: one set of functions for paths on this machine and for URLs that fsspec opens."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fabricamp.errors import ConfigError

PARTIAL_SUFFIX = ".ckpt.partial"
"""Suffix of the hidden name of a checkpoint that is being written, or whose writer was killed."""

STATE = "state.pt"
"""The file that makes a folder a checkpoint."""

_NEAR, _MANY = 5, 1000
"""Limits of the search for nearby checkpoints: folder depth (``runs/name/version_0/checkpoints``), and files at each depth."""

_ON_THIS_MACHINE = ("file://", "local://")


def normal(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or the URL unchanged if it is remote (``s3://bucket/run``, ``memory://run``)."""
    place = os.fspath(path)
    for prefix in _ON_THIS_MACHINE:
        place = place.removeprefix(prefix)
    return place.rstrip("/") if is_remote(place) else str(Path(place).expanduser().absolute())


def is_remote(place: str) -> bool:
    """Returns whether fsspec has to open ``place``."""
    return "://" in place


def remote(place: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path on it; raises :class:`ConfigError` if no package serves the protocol."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{place} cannot be opened: {error}; install the package, or give a path on this machine"
        ) from error
    return filesystem, path


def is_folder(place: str) -> bool:
    """Returns whether ``place`` is a checkpoint in folder form."""
    return not is_remote(place) and (Path(place) / STATE).is_file()


def join(folder: str, name: str) -> str:
    """Returns the path or URL of ``name`` in ``folder``."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


def parent(place: str) -> str:
    """Returns the folder that ``place`` is in."""
    return place.rpartition("/")[0] or "/"


def with_name(place: str, added: str) -> str:
    """Returns ``place`` with ``added`` between its stem and its suffix."""
    folder, slash, name = place.rpartition("/")
    stem, suffix = os.path.splitext(name)  # noqa: PTH122 - Path would collapse the slashes of a URL
    return f"{folder}{slash}{stem}{added}{suffix}"


def is_within(place: str, folder: str) -> bool:
    """Returns whether ``place`` is below ``folder``, at any depth."""
    return place.startswith(f"{folder.rstrip('/')}/") and ".." not in place.split("/")


def may_follow(name: str, folder: str) -> bool:
    """Returns whether a name from a file leads to a file below ``folder``; never to another host, nor by a link out of it."""
    if is_remote(folder):
        return is_within(name, folder) and "::" not in name[len(folder) :] and "://" not in name[len(folder) :]
    if is_remote(name):
        return False
    real = os.path.realpath(name)
    return is_within(real, os.path.realpath(folder)) and (Path(real).is_file() or is_folder(real))


def partial_name() -> str:
    """Returns a unique hidden name for a checkpoint that is incomplete or being removed."""
    return f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}"


def exists(place: str) -> bool:
    """Returns whether the name exists, also as a broken link."""
    if not place:
        return False
    if is_remote(place):
        filesystem, path = remote(place)
        return bool(filesystem.exists(path))
    return os.path.lexists(place)


def remove(place: str) -> None:
    """Removes a file or a checkpoint folder if it exists; raises ``OSError``."""
    if is_folder(place) and not is_link(place):
        # Rename first: if this process is killed, the next writer removes the hidden folder as abandoned.
        hidden = Path(place).with_name(partial_name())
        Path(place).rename(hidden)
        shutil.rmtree(hidden)
        return
    if not is_remote(place):
        Path(place).unlink(missing_ok=True)
        return
    filesystem, path = remote(place)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm_file(path)


def files_in(folder: str, suffix: str, depth: int = 0) -> list[str]:
    """Returns the sorted names that end in ``suffix``, ``depth`` folders below and not hidden; also folders and broken links.

    Empty if the folder does not exist; raises ``OSError`` if it may not be listed.
    """
    if is_remote(folder):
        filesystem, path = remote(folder)
        names = filesystem.glob(f"{path.rstrip('/')}/{'*/' * depth}*")
        # Keep the spelling of ``folder``: the same URL can be spelled in several ways.
        found = [join(folder, "/".join(str(one).split("/")[-depth - 1 :])) for one in names]
    else:
        found = _listed(folder, depth) if Path(folder).is_dir() else []
    return sorted(one for one in found if one.endswith(suffix) and not one.rpartition("/")[2].startswith("."))


def found_near(place: str) -> str:
    """Returns ``"; there are A, B"`` with the newest checkpoints in and below the folder of ``place``; empty if there are none."""
    if is_remote(place):
        return ""
    path = Path(place).expanduser().absolute()
    folder = next(one for one in path.parents if one.is_dir())
    found: list[tuple[float, str]] = []
    for depth in range(_NEAR):
        with contextlib.suppress(OSError):  # skip folders that may not be listed
            files = [*itertools.islice(folder.glob(f"{'*/' * depth}[!.]*.ckpt"), _MANY)]
            found += [(file.stat().st_mtime, str(file).removeprefix(f"{Path.cwd()}/")) for file in files]
    newest = [name for _, name in sorted(found, reverse=True)[:3]]
    if not newest:
        return ""
    return f"; there {'is' if len(newest) == 1 else 'are'} {', '.join(newest)}"


def _listed(folder: str, depth: int) -> list[str]:
    with os.scandir(folder) as entries:  # raises if the folder may not be listed; Path.glob would skip it
        if not depth:
            return [entry.path for entry in entries]
        folders = [entry.path for entry in entries if entry.is_dir()]
    return [one for inner in folders for one in _listed(inner, depth - 1)]


def same_file(place: str, other: str) -> bool:
    """Returns whether both names exist, and lead to the same file."""
    if is_remote(place) or is_remote(other):
        return place == other and exists(place)
    one, two = _file_of(place), _file_of(other)
    return exists(place) and exists(other) and one.exists() and two.exists() and one.samefile(two)


def _file_of(place: str) -> Path:
    """Returns the file that identifies a checkpoint: the file itself, or a folder's ``state.pt``."""
    return Path(place) / STATE if is_folder(place) else Path(place)


def written_at(place: str) -> int:
    """Returns a file's modification time in nanoseconds; 0 if the file is remote or missing."""
    try:
        return 0 if is_remote(place) else _file_of(place).stat().st_mtime_ns
    except OSError:
        return 0


def is_link(place: str) -> bool:
    """Returns whether ``place`` is a symbolic link."""
    return not is_remote(place) and Path(place).is_symlink()


def has_other_names(place: str) -> bool:
    """Returns whether a file would survive the removal of ``place``, because it is a link, or has another hard link."""
    if is_remote(place):
        return False
    file = _file_of(place)
    return is_link(place) or not file.exists() or file.stat().st_nlink > 1


def unusable(folder: str) -> str:
    """Returns why no file can be written into ``folder``, checked without creating it; empty if nothing is wrong."""
    if is_remote(folder):
        try:
            remote(folder)
        except ConfigError as error:
            return str(error)
        return ""
    where = Path(folder)
    existing = next(one for one in (where, *where.parents) if one.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written to"


@contextlib.contextmanager
def opened(place: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading; a remote file is read in pieces, on demand."""
    if is_remote(place):
        filesystem, path = remote(place)
        with filesystem.open(path, "rb") as file:
            yield file
    else:
        with Path(place).open("rb") as file:
            yield file


def copy_bytes(source: str, target: IO[bytes]) -> None:
    """Writes the content of ``source`` into an open file."""
    with opened(source) as file:
        shutil.copyfileobj(file, target, 1 << 20)
