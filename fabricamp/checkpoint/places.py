"""Where checkpoints lie: paths on this machine, and URLs that fsspec opens; one set of functions for both."""

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
"""How the (hidden) name of a checkpoint ends that is still being written, or was when its writer was killed."""

STATE = "state.pt"
"""The file that makes a folder a checkpoint."""

_NEAR, _MANY = 5, 1000
"""So many folders deep, and so many files in each depth, are looked at for checkpoints: ``runs/name/version_0/checkpoints``."""

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


def is_folder(place: str) -> bool:
    """Whether ``place`` is a checkpoint that is a folder."""
    return not is_remote(place) and (Path(place) / STATE).is_file()


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


def may_follow(name: str, folder: str) -> bool:
    """Whether a name that a file brought leads to a file below ``folder``: never to another host, or by a link out of it."""
    if is_remote(folder):
        return is_within(name, folder) and "::" not in name[len(folder) :] and "://" not in name[len(folder) :]
    if is_remote(name):
        return False
    real = os.path.realpath(name)
    return is_within(real, os.path.realpath(folder)) and (Path(real).is_file() or is_folder(real))


def partial_name() -> str:
    """Returns a name that nobody else has, for what is not yet, or no longer, a checkpoint."""
    return f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}"


def exists(place: str) -> bool:
    """Whether the name is taken, be it by a link that leads nowhere."""
    if not place:
        return False
    if is_remote(place):
        filesystem, path = remote(place)
        return bool(filesystem.exists(path))
    return os.path.lexists(place)


def remove(place: str) -> None:
    """Removes a file, or a checkpoint that is a folder, if it is there; raises ``OSError``."""
    if is_folder(place) and not is_link(place):
        # Under a name that the next one who writes here takes for abandoned, should this one be killed.
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
    """Returns whatever has such a name ``depth`` folders below and is not hidden, sorted: folders and broken links too.

    Nothing where the folder is not there; raises ``OSError`` where it may not be listed.
    """
    if is_remote(folder):
        filesystem, path = remote(folder)
        names = filesystem.glob(f"{path.rstrip('/')}/{'*/' * depth}*")
        # As the folder is written: a URL can be written in several ways.
        found = [join(folder, "/".join(str(one).split("/")[-depth - 1 :])) for one in names]
    else:
        found = _listed(folder, depth) if Path(folder).is_dir() else []
    return sorted(one for one in found if one.endswith(suffix) and not one.rpartition("/")[2].startswith("."))


def found_near(place: str) -> str:
    """Returns ``"; there are A, B"`` for the newest checkpoints beside and below where ``place`` should be; nothing without any."""
    if is_remote(place):
        return ""
    path = Path(place).expanduser().absolute()
    folder = next(one for one in path.parents if one.is_dir())
    found: list[tuple[float, str]] = []
    for depth in range(_NEAR):
        with contextlib.suppress(OSError):  # what may not be listed is not near
            files = [*itertools.islice(folder.glob(f"{'*/' * depth}[!.]*.ckpt"), _MANY)]
            found += [(file.stat().st_mtime, str(file).removeprefix(f"{Path.cwd()}/")) for file in files]
    newest = [name for _, name in sorted(found, reverse=True)[:3]]
    if not newest:
        return ""
    return f"; there {'is' if len(newest) == 1 else 'are'} {', '.join(newest)}"


def _listed(folder: str, depth: int) -> list[str]:
    with os.scandir(folder) as entries:  # Path.glob leaves out what may not be listed
        if not depth:
            return [entry.path for entry in entries]
        folders = [entry.path for entry in entries if entry.is_dir()]
    return [one for inner in folders for one in _listed(inner, depth - 1)]


def same_file(place: str, other: str) -> bool:
    """Whether both names are there, and lead to one file."""
    if is_remote(place) or is_remote(other):
        return place == other and exists(place)
    one, two = _file_of(place), _file_of(other)
    return exists(place) and exists(other) and one.exists() and two.exists() and one.samefile(two)


def _file_of(place: str) -> Path:
    """What tells whether two names are of one checkpoint."""
    return Path(place) / STATE if is_folder(place) else Path(place)


def written_at(place: str) -> int:
    """When the system says that a file was written, in nanoseconds; 0 where it was not asked: on other machines, or gone."""
    try:
        return 0 if is_remote(place) else _file_of(place).stat().st_mtime_ns
    except OSError:
        return 0


def is_link(place: str) -> bool:
    """Whether ``place`` is a symbolic link."""
    return not is_remote(place) and Path(place).is_symlink()


def has_other_names(place: str) -> bool:
    """Whether a file would still be there if ``place`` were removed: it is a link, or has a second name."""
    if is_remote(place):
        return False
    file = _file_of(place)
    return is_link(place) or not file.exists() or file.stat().st_nlink > 1


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
