"""Sharded tensors on disk: torch's distributed checkpoint (DCP) of tensors only, read without running code from a file."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fabricamp.checkpoint import storage
from fabricamp.checkpoint.plain import TENSORS
from fabricamp.errors import CheckpointError
from fabricamp.ops.shards import any_shard, is_shard
from fabricamp.optimizers.refusals import owned_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer


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


def split(value: Any, place: str = "", wanted: Callable[[Any], bool] = is_shard) -> tuple[Any, dict[str, Tensor]]:
    """Returns ``value`` with its sharded (or ``wanted``) tensors replaced by meta tensors, and the originals by their names.

    Raises :class:`CheckpointError` for a tensor that is already on the meta device.
    """
    shards: dict[str, Tensor] = {}

    def without(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            result = copy.copy(value)  # keeps the attributes that torch sets on a state dict
            for key, item in value.items():
                result[key] = without(item, f"{place}{SEPARATOR}{key}" if place else str(key))
            return result
        if type(value) in (list, tuple):
            return type(value)(without(item, f"{place}{SEPARATOR}{index}") for index, item in enumerate(value))
        if isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(
                f"{place} is a tensor on the meta device, which has no values to save; materialise it"
            )
        if not wanted(value):
            return value
        assert place not in shards, place
        shards[place] = value.detach()
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return without(value, place), shards


def stored_in(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields each meta tensor, which stands for a tensor on disk, with its name on disk."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
    for key, item in items:
        yield from stored_in(item, f"{place}{SEPARATOR}{key}" if place else str(key))
    if type(value) in TENSORS and value.is_meta:
        yield place, value


def replaced(value: Any, by: Mapping[int, Tensor]) -> Any:
    """Returns ``value`` with tensors replaced by those in ``by``, which maps ids of tensors to replacements."""
    if isinstance(value, dict):
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
        _told(lambda: save(dict(shards), storage_writer=writer, process_group=group), "cannot be written")


def read_shards(folder: Path, targets: dict[str, Tensor], files: Mapping[str, int]) -> None:
    """Fills ``targets``, full or sharded in any way; each rank reads its own shards, without collectives."""
    if not targets:
        return
    reader = _Reader(folder, files)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        _told(lambda: load(dict(targets), storage_reader=reader, no_dist=True), "cannot be read")


def files_of(folder: Path) -> dict[str, int]:
    """Returns the names and sizes of the tensor files."""
    return {one.name: one.stat().st_size for one in sorted(folder.iterdir()) if one.name != METADATA}


def digest_of(folder: Path) -> str:
    """Returns a digest of DCP's metadata, which has the position of each tensor."""
    return hashlib.blake2b((folder / METADATA).read_bytes(), digest_size=16).hexdigest()


def check_shards(folder: Path, files: Mapping[str, int], names: Callable[[str], bool]) -> None:
    """Reads the complete files that ``names`` selects; raises :class:`CheckpointError` if a file is missing or damaged."""
    found = files_of(folder)
    if found != dict(files):
        wrong = sorted(set(found.items()) ^ set(files.items()))
        raise CheckpointError(f"{folder} is damaged: {wrong[0][0]} is missing, or not as long as it was written")
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in files if names(name)}
    for one in _Reader(folder, files).read_metadata().storage_data.values():
        if one.relative_path in places:
            places[one.relative_path].append((one.offset, one.length))
    for name, parts in places.items():
        with (folder / name).open("rb") as file:
            for offset, length in sorted(parts):
                file.seek(offset)
                _check_part(io.BytesIO(file.read(length)), folder / name)


def _check_part(part: io.BytesIO, file: Path) -> None:
    try:
        with zipfile.ZipFile(part) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{file} is damaged ({error})") from error
    if damaged is not None:
        raise CheckpointError(f"{file} is damaged: the checksum of {damaged} is wrong")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        pattern = _KNOWN.get(module)
        if pattern is None or not pattern.fullmatch(name):
            raise CheckpointError(
                f"it names {module}.{name}, which is no part of a list of tensors, so it is not loaded"
            )
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
        for one in metadata.storage_data.values():
            if one.relative_path not in self._files:
                raise CheckpointError(f"it leads to {one.relative_path!r}, which is no file of this checkpoint")
            if getattr(one, "transform_descriptors", None):
                raise CheckpointError("its tensors are packed in a way that is not read")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _told(action: Callable[[], object], what: str) -> None:
    """Runs ``action``; turns any error into a :class:`CheckpointError` with only the reason, without a traceback per rank."""
    try:
        action()
    except CheckpointException as error:
        failures = cast("Mapping[int, Any]", error.failures)
        rank, (cause, _) = next(iter(failures.items()))
        raise CheckpointError(f"its tensors {what} (rank {rank}: {cause})") from cause
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"its tensors {what} ({type(error).__name__}: {error!s:.300})") from error


# ~~~ from checkpoint.shard_loading: Brings tensors of a checkpoint, full or sharded in another way, to this rank's local shards.


class ShardLoader:
    """Collects tensors of ``checkpoint``, as read from ``path``, and reads them together."""

    def __init__(self, checkpoint: dict[str, Any], path: str) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._targets: dict[str, Tensor] = {}

    def place(self, name: str, saved: Any, like: Any) -> Any:
        """Returns ``saved``, whose name on disk is ``name``, sharded like ``like``; :meth:`read` may have to fill in its values."""
        if not isinstance(saved, Tensor) or is_shard(saved):
            return saved
        sharded = is_shard(like) and saved.shape == like.shape
        if saved.is_meta:
            target = (
                torch.empty_like(like.detach(), dtype=saved.dtype)
                if sharded
                else torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            )
            self._targets[name] = target
            return target
        if not sharded:
            return saved
        from torch.distributed.tensor import distribute_tensor

        # No communication: each rank has read the full tensor and keeps its own shard.
        placed = distribute_tensor(saved.detach(), like.device_mesh, like.placements, src_data_rank=None)
        return placed.to(like.device)  # with CPU offload local shards are in host memory

    def read(self) -> None:
        """Reads the values of the tensors that :meth:`place` returned; uses no collective."""
        if self._targets:
            from fabricamp.checkpoint.folder import fill

            fill(storage.normal(self._path), self._checkpoint, self._targets)


def placed_weights(checkpoint: dict[str, Any], path: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``checkpoint`` with its weights sharded like the module's ``own``; unchanged if none of ``own`` is sharded.

    Tensors that callbacks keep under weights' names (averages) are sharded the same way.
    """
    if not any_shard(own.values()):
        return checkpoint
    placing = ShardLoader(checkpoint, path)

    def placed(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            return value
        result = copy.copy(value)  # keeps the attributes that torch sets on a state dict
        for key, item in value.items():
            name = f"{place}/{key}"
            result[key] = placing.place(name, item, own.get(key)) if isinstance(item, Tensor) else placed(item, name)
        return result

    found = checkpoint.copy()
    for key in found.keys() & {"state_dict", "current_model_state", "callbacks"}:
        found[key] = placed(checkpoint[key], key)
    placing.read()
    return found


def placed_states(
    checkpoint: dict[str, Any], path: str, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the optimizers' ``states`` with the tensors of a sharded parameter sharded like that parameter."""
    placing, placed = ShardLoader(checkpoint, path), []
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        parameters = owned_parameters(optimizer)
        indices = [index for group in state["param_groups"] for index in group["params"]]
        if not any_shard(parameters) or len(indices) != len(parameters):
            placed.append(state)
            continue
        like = dict(zip(indices, parameters, strict=True))
        entries = {
            index: {
                name: placing.place(f"optimizer_states/{number}/state/{index}/{name}", value, like.get(index))
                for name, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        placed.append({**state, "state": entries})
    placing.read()
    return placed


def placed_gradients(checkpoint: dict[str, Any], path: str, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the gradients of a checkpoint's accumulation in progress, sharded like the parameters."""
    placing = ShardLoader(checkpoint, path)
    saved: dict[str, Any] = checkpoint["loops"]["fit"]["window"]["gradients"]
    placed = {
        name: placing.place(f"loops/fit/window/gradients/{name}", value, own.get(name)) for name, value in saved.items()
    }
    placing.read()
    return placed


def read_gradient(checkpoint: dict[str, Any], path: str, name: str, saved: Tensor) -> Tensor:
    """Returns the gradient ``saved`` of a checkpoint's accumulation in progress; if it is still on disk, reads the full tensor."""
    if not saved.is_meta:
        return saved
    from fabricamp.checkpoint.folder import fill

    found = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
    fill(storage.normal(path), checkpoint, {f"loops/fit/window/gradients/{name}": found})
    return found
