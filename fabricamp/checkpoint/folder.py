"""A sharded checkpoint is a folder: ``state.pt`` (the file form without sharded tensors), and a DCP folder with sharded tensors.

``state.pt`` names the folder of its tensors and is written last: a kill at any moment leaves the old checkpoint or the new one.
A new checkpoint folder is renamed to its final name when it is complete; in an existing folder ``state.pt`` is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp._utils.files import sync
from fabricamp.checkpoint import storage
from fabricamp.checkpoint.compiled_names import ON_DISK
from fabricamp.checkpoint.file import ATTEMPTS, retry_if_folder_is_removed, write_checkpoint
from fabricamp.checkpoint.plain import PRIVATE, TENSORS, check_content
from fabricamp.checkpoint.reading import read_checkpoint, read_once
from fabricamp.checkpoint.shards import (
    METADATA,
    check_shards,
    digest_of,
    files_of,
    read_shards,
    replaced,
    split,
    stored_in,
    write_shards,
)
from fabricamp.checkpoint.storage import PARTIAL_SUFFIX
from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp._utils.types import StateDict
    from fabricamp.strategies.base import Strategy
    from fabricamp.strategies.host_ranks import HostRanks

SHARDS: Final = "shards"
"""The key with the folder and the files of the sharded tensors."""
_READ_TOGETHER: Final = 256 << 20
"""The most bytes of tensors that one rank reads before it sends them, unless one tensor has more."""
_NAME: Final = re.compile(r"shards-[0-9a-f]{16}")


def write_folder(path: str | os.PathLike[str], state: StateDict, strategy: Strategy) -> None:
    """Writes ``state`` with its sharded tensors as a folder at ``path``; every rank calls it with its own state.

    All values except sharded tensors are rank 0's.  Raises :class:`CheckpointError` on every rank if one rank cannot write; the
    previous checkpoint at ``path`` is then untouched.
    """
    unsharded, shards = split(state)
    write_split(path, unsharded, shards, strategy)


def write_whole(path: str | os.PathLike[str], state: StateDict) -> None:
    """Writes ``state`` with full tensors as a folder at ``path``, from which ranks can read local shards of weights and states."""
    from fabricamp.strategies.base import Strategy

    unsharded = dict(state)
    shards: dict[str, torch.Tensor] = {}
    for key in unsharded.keys() & {"state_dict", "current_model_state", "optimizer_states"}:
        unsharded[key], tensors = split(state[key], key, lambda value: type(value) in TENSORS and value.dim() > 0)
        shards |= tensors
    write_split(path, unsharded, shards, Strategy())


def write_split(
    path: str | os.PathLike[str], unsharded: StateDict, shards: dict[str, torch.Tensor], strategy: Strategy
) -> None:
    """Writes the result of :func:`split` as :func:`write_folder` does; only rank 0 needs ``unsharded``."""
    path = storage.normalized(path)
    if storage.is_remote(path):
        raise CheckpointError(
            f"cannot write checkpoint {path}: a sharded one needs a folder of this machine, or one that all machines have "
            "mounted (ModelCheckpoint(dirpath=...))"
        )
    for attempt in range(1, ATTEMPTS + 1):
        writer = _FolderWriter(Path(path), private=bool(unsharded.get(PRIVATE)))
        try:
            _write_once(writer, unsharded, shards, strategy)
        except CheckpointError:
            # All ranks have the same error.  Only a removed folder is retried, not other write errors.
            if attempt == ATTEMPTS or not strategy.on_rank_zero(writer.removed):
                raise
        else:
            return
        finally:
            writer.close()


def _write_once(
    writer: _FolderWriter, unsharded: StateDict, shards: dict[str, torch.Tensor], strategy: Strategy
) -> None:
    path = str(writer.target)
    folder = Path(strategy.on_rank_zero(lambda: str(writer.begin(unsharded))))
    strategy.agree(_problem(path, lambda: write_shards(folder, shards, strategy.group)))
    files = strategy.on_rank_zero(writer.files)
    own = _files_checked_by(strategy)
    contents: dict[str, str] = {}
    strategy.agree(_problem(path, lambda: contents.update(check_shards(folder, files, own))))
    of_all_ranks = strategy.all_gather_object(contents)
    strategy.on_rank_zero(lambda: writer.end(unsharded, files, {name: of[name] for of in of_all_ranks for name in of}))


def _files_checked_by(strategy: Strategy) -> Callable[[str], bool]:
    """Returns a filter for the files that a rank checks: those with its number in DCP's file name; together all are checked."""
    rank = strategy.rank
    world_size = strategy.world_size

    def own(name: str) -> bool:
        match = re.match(r"__(\d+)_", name)
        writer = int(match[1]) if match else 0
        return writer % world_size == rank  # the file may be of a run with more ranks

    return own


class _FolderWriter:
    """Rank 0's part of writing a folder; other ranks never call :meth:`begin`."""

    def __init__(self, target: Path, *, private: bool) -> None:
        self.target = target
        self._private = private
        self._open = contextlib.ExitStack()
        self._container = target
        self._folder = target
        self._handle: int | None = None  # of the open folder: detects that another one took its name
        self._ended = False

    def begin(self, unsharded: StateDict) -> Path:
        """Creates and returns the folder that tensors are written into."""
        check_content(unsharded, stored=True)
        with _explained_errors(self.target):
            return retry_if_folder_is_removed(self._make_folder)

    def _make_folder(self) -> Path:
        self._open.close()
        self._container = self._open.enter_context(_container(self.target, private=self._private))
        self._folder = self._container / f"shards-{secrets.token_hex(8)}"
        self._folder.mkdir()
        self._open.callback(self._remove)
        self._close_handle()
        self._handle = os.open(self._folder, os.O_RDONLY)
        return self._folder

    def files(self) -> dict[str, int]:
        """Returns the names and sizes of the files that the ranks have written."""
        with _explained_errors(self.target):
            return files_of(self._folder)

    def end(self, unsharded: StateDict, files: dict[str, int], contents: dict[str, str]) -> None:
        """Completes the checkpoint after all ranks have written and checked their files: writes ``state.pt`` and renames.

        ``contents`` has the digests of what the files hold.
        """
        with _explained_errors(self.target):
            sync(self._folder)
            digest = digest_of(self._folder)
            shards = {"folder": self._folder.name, "files": files, "contents": contents, "digest": digest}
            write_checkpoint(self._container / storage.STATE, {**unsharded, SHARDS: shards})
            self._ended = True
            self._open.close()
            _remove_others(self.target, self._folder.name)
        if self.removed():  # before write_checkpoint, which then created the outer folder again
            raise CheckpointError(f"cannot write checkpoint {self.target}: it was removed while it was being written")

    def removed(self) -> bool:
        """Returns whether the folder was removed since its creation, also if DCP has created another one of the same name."""
        if self._handle is None:
            return False
        names = [self._folder, self.target / self._folder.name]  # before and after the container is renamed
        # The handle is asked only if there is a folder: on NFS asking for a removed one fails.
        return not any(name.is_dir() and os.path.samestat(name.stat(), os.fstat(self._handle)) for name in names)

    def close(self) -> None:
        """Removes an incomplete folder, and closes the handle."""
        self._open.close()
        self._close_handle()

    def _close_handle(self) -> None:
        handle = self._handle
        self._handle = None
        if handle is not None:
            os.close(handle)

    def _remove(self) -> None:
        if not self._ended:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _container(target: Path, *, private: bool) -> Iterator[Path]:
    """Yields the folder at ``target``, or a new one, which is renamed to ``target`` afterwards if ``state.pt`` is in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    if target.is_dir() and not target.is_symlink():
        yield target
        return
    if target.exists() and not target.is_symlink():
        raise CheckpointError(
            f"{target} is a file, and a sharded checkpoint is a folder: give another name, or remove it"
        )
    new = target.parent / storage.partial_name()
    new.mkdir(mode=0o700 if private else 0o777)
    try:
        with _locked(new):
            yield new
            complete = (new / storage.STATE).exists()
            if complete:
                sync(new)
                if target.is_symlink():
                    target.unlink()
                new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    if complete:
        sync(target.parent)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder while its writer lives, if the file system supports locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(parent: Path) -> None:
    """Removes unfinished folders that nobody holds a lock on: their writers were killed."""
    for name in parent.glob(f".*{PARTIAL_SUFFIX}"):
        if not name.is_dir():
            continue
        with contextlib.suppress(OSError):
            handle = os.open(name, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(name, ignore_errors=True)
            finally:
                os.close(handle)


def _remove_others(target: Path, name: str) -> None:
    """Removes the tensor folders at ``target`` other than ``name``: from an earlier checkpoint, or from a killed writer."""
    for folder in target.glob("shards-*"):
        if folder.name != name:
            shutil.rmtree(folder, ignore_errors=True)


def read_folder(path: str, *, verify: bool = True, map_location: object = "cpu", **options: Any) -> StateDict:
    """Returns the content of the checkpoint at ``path`` with full tensors; with ``map_location="meta"`` they are not read.

    ``options`` are those of :func:`read_checkpoint` about objects.
    """
    state = read_checkpoint(Path(path) / storage.STATE, map_location, verify=verify, **options)
    _check_list(path, state)
    if map_location == "meta":
        return state
    if verify:
        _check(path, state, lambda _: True)
    targets = _full_targets(state)
    read_into(path, state, targets)
    return _with_full(state, targets, map_location if isinstance(map_location, str | torch.device) else "cpu")


def read_folder_once(path: str, host: HostRanks, *, weights_only: bool | None) -> StateDict:
    """Returns what :func:`read_folder` does on each rank of ``host``: they check it together, and the first one reads its tensors.

    Raises :class:`CheckpointError` on every rank if one rank finds damage.
    """
    state: StateDict = {}

    def read_state() -> None:
        state.update(read_without_shards(path, host, weights_only=weights_only))
        check_together(path, state, host)

    host.agree(_problem_of(read_state))
    targets = _full_targets(state)
    memories = [target.view(-1).view(torch.uint8) for target in targets.values()]
    names = list(targets)
    unread = set(names)

    def read(index: int, *_: int) -> None:
        if names[index] in unread:  # with those after it, as each call reads the list of all tensors
            together = _first_within(memories[index:], _READ_TOGETHER)
            chosen = names[index : index + together]
            read_into(path, state, {name: targets[name] for name in chosen})
            unread.difference_update(chosen)

    host.fill(memories, read)
    return _with_full(state, targets, "cpu")


def _first_within(memories: list[torch.Tensor], most: int) -> int:
    """Returns how many of the first tensors have at most this number of bytes together; at least 1."""
    total = 0
    for count, memory in enumerate(memories):
        total += memory.numel()
        if total > most:
            return max(count, 1)
    return len(memories)


def _full_targets(state: StateDict) -> dict[str, torch.Tensor]:
    """Returns memory for the full values of each tensor on disk, by name."""
    return {name: torch.empty(meta.shape, dtype=meta.dtype, device="cpu") for name, meta in stored_in(state)}


def _with_full(state: StateDict, tensors: dict[str, torch.Tensor], device: str | torch.device) -> StateDict:
    """Returns ``state`` with ``tensors`` in the places of those on disk."""
    by_id = {id(meta): tensors[name].to(device) for name, meta in stored_in(state)}
    full: StateDict = replaced(state, by_id)
    del full[SHARDS]
    return full


def read_without_shards(path: str, host: HostRanks, *, weights_only: bool | None) -> StateDict:
    """Returns the content of ``state.pt`` at ``path``: sharded tensors are on the meta device, ``shards`` has their files.

    The first rank of ``host`` reads it.
    """
    state = read_once(storage.join(path, storage.STATE), host, weights_only=weights_only)
    _check_list(path, state)
    return state


def _check_list(path: str, state: StateDict) -> None:
    """Raises :class:`CheckpointError` if the list of tensors is missing or damaged."""
    folder, _ = _shard_files(state, path)

    def check_list() -> None:
        if not (folder / METADATA).is_file() or digest_of(folder) != state[SHARDS].get("digest"):
            raise CheckpointError("the list of its tensors is missing, or not the one that was written: it is damaged")

    _with_path_in_errors(path, check_list)


def check_together(path: str, state: StateDict, strategy: Strategy) -> None:
    """Raises :class:`CheckpointError` if a tensor file is damaged; each rank checks its share of the files."""
    _check(path, state, _files_checked_by(strategy))


def _check(path: str, state: StateDict, names: Callable[[str], bool]) -> None:
    """Raises :class:`CheckpointError` if a tensor file that ``names`` selects is damaged, or of another checkpoint."""
    folder, files = _shard_files(state, path)

    def check() -> None:
        contents = check_shards(folder, files, names)
        written = state[SHARDS].get("contents", contents)  # folders of 0.2.0 do not say what their files hold
        for name, digest in contents.items():
            if written.get(name) != digest:
                raise CheckpointError(
                    f"{folder / name} is not the file that was written here, but one of another checkpoint"
                )

    _with_path_in_errors(path, check)


def read_into(path: str, state: StateDict, targets: dict[str, torch.Tensor]) -> None:
    """Reads tensors of the checkpoint at ``path`` into ``targets``, by their key paths joined by slashes."""
    folder, files = _shard_files(state, path)
    _with_path_in_errors(path, lambda: read_shards(folder, _by_names_on_disk(state, targets), files))


def copy_folder(source: Path, target: Path) -> None:
    """Makes ``target`` a copy of the checkpoint ``source``: with hard links where the file system supports them."""
    state = read_checkpoint(source / storage.STATE, "meta", verify=False)
    folder, _ = _shard_files(state, str(source))

    def filled(into: Path) -> None:
        into.mkdir()
        for file in folder.iterdir():
            _link_or_copy(file, into / file.name)
        sync(into)

    with _container(target, private=not source.stat().st_mode & 0o077) as container:
        own = container / folder.name
        if not own.exists():
            filled(own)
        spare = container / storage.partial_name()
        _link_or_copy(source / storage.STATE, spare)
        spare.replace(container / storage.STATE)
        spare.unlink(missing_ok=True)  # replace does nothing if both are hard links to one file
    _remove_others(target, own.name)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _shard_files(state: StateDict, path: str) -> tuple[Path, dict[str, int]]:
    """Returns the folder of a checkpoint's tensors, and its files with sizes; refuses names that lead out of the checkpoint."""
    shards = state.get(SHARDS)
    name = shards.get("folder") if isinstance(shards, dict) else None
    if not isinstance(shards, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{path} is damaged: its {storage.STATE} does not say where its tensors are")
    files = shards.get("files")
    if not isinstance(files, dict) or any("/" in str(file) for file in files):
        raise CheckpointError(f"{path} is damaged: its {storage.STATE} does not say in which files its tensors are")
    return Path(path) / name, files


def _by_names_on_disk(state: StateDict, targets: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns ``targets`` by the names under which the checkpoint's format wrote these tensors."""
    result = {}
    renamed: dict[str, str] = state[SHARDS].get("renamed", {})
    names: dict[str, str] = state[SHARDS].get(ON_DISK, {})
    for own_name, target in targets.items():
        name = names.get(own_name, own_name)
        prefix = next((new for new in renamed if name.startswith(new)), "")
        result[renamed.get(prefix, "") + name.removeprefix(prefix)] = target
    return result


def _problem_of(action: Callable[[], object]) -> CheckpointError | None:
    try:
        action()
    except CheckpointError as error:
        return error
    return None


def _problem(path: str, action: Callable[[], object]) -> CheckpointError | None:
    return _problem_of(lambda: _with_path_in_errors(path, action))


def _with_path_in_errors(path: str, action: Callable[[], object]) -> None:
    try:
        action()
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error}; use another one") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - damaged bytes can raise anything, and no rank may end alone
        raise CheckpointError(
            f"checkpoint {path} is damaged ({type(error).__name__}: {error!s:.300}); use another one"
        ) from None


@contextlib.contextmanager
def _explained_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error.strerror or error}; an earlier one there is unchanged. Free space or "
            "choose another folder (ModelCheckpoint(dirpath=...))"
        ) from None
