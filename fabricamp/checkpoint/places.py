"""Where checkpoints lie: paths on this machine, and URLs that fsspec opens; one set of functions for both."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "copy_bytes",
    "exists",
    "files_in",
    "has_other_names",
    "is_link",
    "is_remote",
    "is_within",
    "join",
    "normal",
    "opened",
    "parent",
    "remote",
    "remove",
    "same_file",
    "unusable",
    "with_name",
]

_ON_THIS_MACHINE = ("file://", "local://")


def normal(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or the URL where it leads to another machine (``s3://bucket/run``, ``memory://run``)."""
    place = os.fspath(path)
    for prefix in _ON_THIS_MACHINE:
        place = place.removeprefix(prefix)
    return place.rstrip("/") if is_remote(place) else str(Path(place).expanduser().absolute())


def is_remote(place: str) -> bool:
    """Whether fsspec has to open ``place``."""
    return "://" in place


def remote(place: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path on it; raises :class:`ConfigError` where no package serves the protocol."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{place} cannot be opened: {error}; install the package, or give a path on this machine"
        ) from error
    return filesystem, path


def join(folder: str, name: str) -> str:
    """Returns the place of ``name`` in ``folder``."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


def parent(place: str) -> str:
    """Returns the folder that ``place`` is in."""
    return place.rpartition("/")[0] or "/"


def with_name(place: str, added: str) -> str:
    """Returns ``place`` with ``added`` behind its name and before its suffix."""
    folder, slash, name = place.rpartition("/")
    stem, suffix = os.path.splitext(name)  # noqa: PTH122 - a URL is no Path: that would fold its slashes
    return f"{folder}{slash}{stem}{added}{suffix}"


def is_within(place: str, folder: str) -> bool:
    """Whether ``place`` is somewhere below ``folder``."""
    return place.startswith(f"{folder.rstrip('/')}/") and ".." not in place.split("/")


def exists(place: str) -> bool:
    """Whether the name is taken, be it by a link that leads nowhere."""
    if not place:
        return False
    if is_remote(place):
        filesystem, path = remote(place)
        return bool(filesystem.exists(path))
    return os.path.lexists(place)


def remove(place: str) -> None:
    """Removes a file, if it is there; raises ``OSError``."""
    if not is_remote(place):
        Path(place).unlink(missing_ok=True)
        return
    filesystem, path = remote(place)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm_file(path)


def files_in(folder: str, suffix: str, depth: int = 0) -> list[str]:
    """Returns the files ``depth`` folders below ``folder`` whose names end so and are not hidden, sorted."""
    pattern = "*/" * depth + "*"
    if is_remote(folder):
        filesystem, path = remote(folder)
        found = [str(filesystem.unstrip_protocol(one)) for one in filesystem.glob(f"{path.rstrip('/')}/{pattern}")]
    else:
        found = [str(one) for one in Path(folder).glob(pattern) if one.is_file()]
    return sorted(one for one in found if one.endswith(suffix) and not one.rpartition("/")[2].startswith("."))


def same_file(place: str, other: str) -> bool:
    """Whether both names are there, and lead to one file."""
    if is_remote(place) or is_remote(other):
        return place == other and exists(place)
    return exists(place) and exists(other) and Path(place).exists() and Path(place).samefile(other)


def is_link(place: str) -> bool:
    """Whether ``place`` is a symbolic link."""
    return not is_remote(place) and Path(place).is_symlink()


def has_other_names(place: str) -> bool:
    """Whether a file would still be there if ``place`` were removed: it is a link, or has a second name."""
    if is_remote(place):
        return False
    file = Path(place)
    return file.is_symlink() or not file.exists() or file.stat().st_nlink > 1


def unusable(folder: str) -> str:
    """Returns why no file can be written into ``folder``, as far as that can be told without making it; else nothing."""
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
    """Opens a file for reading; remote ones are read in pieces as they are asked for."""
    if is_remote(place):
        filesystem, path = remote(place)
        with filesystem.open(path, "rb") as file:
            yield file
    else:
        with Path(place).open("rb") as file:
            yield file


def copy_bytes(source: str, target: IO[bytes]) -> None:
    """Writes what lies at ``source`` into an open file."""
    with opened(source) as file:
        shutil.copyfileobj(file, target, 1 << 20)
