"""The tensors of a sharded checkpoint, in torch's distributed checkpoint format (DCP), read without running code from a file.

In order: a checkpoint is split into its sharded tensors and all other values; the tensors are written, checked and read.
``shard_loading.py`` loads them as this rank's local shards.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from fabricamp.checkpoint.plain import MAPPINGS, TENSORS
from fabricamp.errors import CheckpointError
from fabricamp.ops.shards import is_shard
from fabricamp.torch_private import load_zipfile, open_zipfile_reader, weights_only_pickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem


METADATA: Final = ".metadata"
SEPARATOR: Final = "/"
"""Separates the keys in a tensor's name on disk."""

_KNOWN: Final = {
    "torch": re.compile(r"Size|device|(float|bfloat|int|uint|complex)\d+|bool"),
    "torch.serialization": re.compile(r"_get_layout"),
    "torch.distributed.checkpoint.metadata": re.compile(
        r"Metadata|TensorStorageMetadata|TensorProperties|_MEM_FORMAT_ENCODING|ChunkStorageMetadata|MetadataIndex|StorageMeta"
    ),
    "torch.distributed.checkpoint.filesystem": re.compile(r"_StorageInfo"),
    "pathlib": re.compile(r"(Pure)?(Posix|Windows)?Path"),
    "pathlib._local": re.compile(r"(Pure)?(Posix|Windows)?Path"),
}
"""All classes and functions that occur in DCP's metadata of tensors."""


def split(value: Any, name: str = "", wanted: Callable[[Any], bool] = is_shard) -> tuple[Any, dict[str, Tensor]]:
    """Returns ``value`` with its sharded (or ``wanted``) tensors replaced by meta tensors, and the originals by their names.

    ``name`` is the name on disk of ``value`` itself.  Raises :class:`CheckpointError` for a tensor that is already on the meta
    device.
    """
    shards: dict[str, Tensor] = {}

    def without_shards(value: Any, name: str) -> Any:
        if type(value) in MAPPINGS:
            result = copy.copy(value)  # keeps the attributes that torch sets on a state dict
            for key, item in value.items():
                result[key] = without_shards(item, _joined(name, key))
            return result
        if type(value) in (list, tuple):
            return type(value)(without_shards(item, f"{name}{SEPARATOR}{index}") for index, item in enumerate(value))
        if isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(f"{name} is a tensor on the meta device, which has no values to save; materialise it")
        if not wanted(value):
            return value
        assert name not in shards, name
        shards[name] = value.detach()
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return without_shards(value, name), shards


def stored_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields each meta tensor, which stands for a tensor on disk, with its name on disk."""
    items: Iterable[tuple[Any, Any]] = ()
    if type(value) in MAPPINGS:
        items = value.items()
    elif type(value) in (list, tuple):
        items = enumerate(value)
    for key, item in items:
        yield from stored_in(item, _joined(name, key))
    if type(value) in TENSORS and value.is_meta:
        yield name, value


def _joined(name: str, key: object) -> str:
    return f"{name}{SEPARATOR}{key}" if name else str(key)


def replaced(value: Any, by: Mapping[int, Tensor]) -> Any:
    """Returns ``value`` with tensors replaced by those in ``by``, which maps ids of tensors to replacements."""
    if type(value) in MAPPINGS:
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = replaced(item, by)
        return result
    if type(value) in (list, tuple):
        return type(value)(replaced(item, by) for item in value)
    return by.get(id(value), value) if isinstance(value, Tensor) else value


def write_shards(folder: Path, shards: dict[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Writes each rank's shards into ``folder`` and flushes them to disk; every rank calls it, with collectives in ``group``."""
    writer = FileSystemWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
        _reduced_errors(lambda: save(dict(shards), storage_writer=writer, process_group=group), "cannot be written")


def read_shards(folder: Path, targets: dict[str, Tensor], files: Mapping[str, int]) -> None:
    """Fills ``targets``, full or sharded in any way; each rank reads its own shards, without collectives."""
    if not targets:
        return
    reader = _Reader(folder, files)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        _reduced_errors(lambda: load(dict(targets), storage_reader=reader, no_dist=True), "cannot be read")


def files_of(folder: Path) -> dict[str, int]:
    """Returns the names and sizes of the tensor files."""
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != METADATA}


def digest_of(folder: Path) -> str:
    """Returns a digest of DCP's metadata, which has the position of each tensor."""
    return hashlib.blake2b((folder / METADATA).read_bytes(), digest_size=16).hexdigest()


def check_shards(folder: Path, files: Mapping[str, int], names: Callable[[str], bool]) -> dict[str, str]:
    """Reads the complete files that ``names`` selects; returns a digest of what each one holds.

    Raises :class:`CheckpointError` if a file is missing or damaged.
    """
    existing = files_of(folder)
    if existing != dict(files):
        wrong = sorted(set(existing.items()) ^ set(files.items()))
        raise CheckpointError(f"{folder} is damaged: {wrong[0][0]} is missing, or not as long as it was written")
    extents: dict[str, list[tuple[int, int]]] = {name: [] for name in files if names(name)}
    for stored in _Reader(folder, files).read_metadata().storage_data.values():
        if stored.relative_path in extents:
            extents[stored.relative_path].append((stored.offset, stored.length))
    digests = {}
    for name, file_extents in extents.items():
        digest = hashlib.blake2b(digest_size=16)
        with (folder / name).open("rb") as file:
            for offset, length in sorted(file_extents):
                file.seek(offset)
                digest.update(_checked_part(io.BytesIO(file.read(length)), folder / name))
        digests[name] = digest.hexdigest()
    return digests


def _checked_part(part: io.BytesIO, file: Path) -> bytes:
    """Returns names, sizes and checksums of what a part of a tensor file holds; raises if these are not its checksums."""
    try:
        with zipfile.ZipFile(part) as archive:
            damaged = archive.testzip()
            members = [(member.filename, member.file_size, member.CRC) for member in archive.infolist()]
    except Exception as error:  # noqa: BLE001 - a flipped bit may ask for a password, another compression, or a name that is no text
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error!s:.200})") from None
    if damaged is not None:
        raise CheckpointError(f"{file} is damaged: the checksum of {damaged} is wrong")
    return repr(members).encode()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        pattern = _KNOWN.get(module)
        if pattern is None or not pattern.fullmatch(name):
            raise CheckpointError(f"it names {module}.{name}, which is not part of a list of tensors; it is not loaded")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """DCP's reader with a restricted unpickler: of the metadata pickle, only the classes in ``_KNOWN`` are loaded."""

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with (self._folder / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        for stored in metadata.storage_data.values():
            if stored.relative_path not in self._files:
                raise CheckpointError(f"it leads to {stored.relative_path!r}, which is not a file of this checkpoint")
            if getattr(stored, "transform_descriptors", None):
                raise CheckpointError("its tensors are packed in an unknown format")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors: of a part of a shard only that part is read, as files are mapped into memory."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = self._folder / name
            mapped = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(str(path), False, path.stat().st_size))
            with path.open("rb") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._stored(file, mapped, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stored(self, file: IO[bytes], mapped: torch.UntypedStorage, item: ReadItem) -> Tensor:
        """Returns the tensor on disk that ``item`` asks for, or the part of it, in the memory of the mapped file."""
        place = self.storage_data[item.storage_index]
        shard = mapped[place.offset : place.offset + place.length]
        with open_zipfile_reader(self._slice_file(file, place)) as reader:
            stored: Tensor = load_zipfile(reader, "cpu", weights_only_pickle, overall_storage=shard, encoding="utf-8")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        return stored


def _reduced_errors(action: Callable[[], object], what: str) -> None:
    """Runs ``action``; turns any error into a :class:`CheckpointError` with only the reason, without a traceback per rank."""
    try:
        action()
    except CheckpointException as error:
        failures = cast("Mapping[int, Any]", error.failures)
        rank, (cause, _) = next(iter(failures.items()))
        raise CheckpointError(f"its tensors {what} (rank {rank}: {cause})") from None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - as torch's reader
        raise CheckpointError(f"its tensors {what} ({type(error).__name__}: {error!s:.300})") from None
