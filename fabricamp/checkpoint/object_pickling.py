"""Pickles the objects of a state: fills :class:`PickledObjects` with their opcodes and their tensors."""

from __future__ import annotations

import io
import pickle
import pickletools
import secrets
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from fabricamp.checkpoint.lightning_names import PROTOCOL, refuse_unnamed, renamed
from fabricamp.checkpoint.objects import START, PickledObjects, digest_of, get, put, whole_tensor
from fabricamp.errors import CheckpointError
from fabricamp.habits import habits
from fabricamp.ops.shards import is_shard
from fabricamp.precision.boundary import reduced_without_boundary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_NUMBER: Final = 4
"""Number of bytes of a tensor's number in its id."""
_LAST: Final = b"\x01"
"""The highest byte of an id: above zero and below 128, so that pickle writes all of its bytes and no further one for the sign."""


def pickle_into(
    pickled: PickledObjects, objects: Sequence[tuple[str, str, object]], full: Mapping[int, Tensor] | None = None
) -> None:
    """Fills ``pickled`` with objects, given as (key path, name, object).

    ``full`` maps ids of tensors inside the objects to the tensors to save instead: the full values of half weights.  Raises
    :class:`CheckpointError` with the key path of an object that cannot be pickled.
    """
    pickler = _ObjectPickler(full or {})
    parts = [_opcodes_of(pickler, *one) for one in objects]
    first = pickler.next_in_memo()
    objects_at = first + len(pickler.tensors)
    data = b"".join(pickler.with_gets(part, first) + put(objects_at + number) for number, part in enumerate(parts))
    if habits().files_have_lightnings_names:  # the file may go back to Lightning
        data = renamed(data)
    pickled.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    pickled.tensors = pickler.tensors
    pickled.digest = digest_of(data)
    pickled.first = first
    pickled.storages = pickler.storages
    pickled.names = [name for _, name, _ in objects]


def _opcodes_of(pickler: _ObjectPickler, path: str, name: str, value: object) -> bytes:
    try:
        return pickler.opcodes(value)
    except Exception as error:  # a class of the user may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} is a {name}, which cannot be pickled ({reason:.300}), so no checkpoint can hold it. Put a function or class "
            "of a module in its place, or leave it out (save_hyperparameters(ignore=[...]), state_dict, on_save_checkpoint)"
        ) from error


class OpcodePickler(pickle.Pickler):
    """Pickles one value after the other with one memo: a later value refers to parts of earlier ones."""

    def __init__(self, file: io.BytesIO, protocol: int = PROTOCOL) -> None:
        super().__init__(file, protocol=protocol)
        self.file = file

    def opcodes(self, value: object) -> bytes:
        """Returns the opcodes of ``value``: its pickle without start and stop."""
        self.file.seek(0)
        self.file.truncate()
        pickle.Pickler.dump(self, value)
        return self.file.getvalue()[len(START) : -len(pickle.STOP)]

    def next_in_memo(self) -> int:
        """Returns the index in the memo that the next value gets."""
        # Without a copy of the memo, which may be large: the opcodes of a list are EMPTY_LIST and a put.
        _, (_, index, _), _ = pickletools.genops(self.opcodes([]) + pickle.STOP)
        assert isinstance(index, int)
        return index


class _ObjectPickler(OpcodePickler):
    """Keeps tensors, and storages of tensors of other classes, out of the opcodes: each is an id instead.

    An id is a whole number that pickle writes as these bytes, so that :meth:`with_gets` finds it without reading all opcodes::

        LONG1, size (1 byte), random (16 bytes, the same in all ids), number of the tensor (4 bytes), _LAST, BINPERSID
    """

    def __init__(self, full: Mapping[int, Tensor]) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Tensor] = []  # they keep what is numbered alive, so no id is used twice
        self.storages: list[int] = []
        self._full = full
        self._numbers: dict[int, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # of the storages
        self._random = secrets.token_bytes(16)

    def with_gets(self, opcodes: bytes, first: int) -> bytes:
        """Returns ``opcodes`` with a get from the memo in place of each id: number n is at ``first + n`` there."""
        size = len(self._random) + _NUMBER + len(_LAST)
        before, *others = opcodes.split(pickle.LONG1 + bytes([size]) + self._random)
        end = _NUMBER + len(_LAST) + len(pickle.BINPERSID)
        return before + b"".join(
            get(first + int.from_bytes(other[:_NUMBER], "little")) + other[end:] for other in others
        )

    def reducer_override(self, value: object) -> Any:
        if habits().files_have_lightnings_names:
            refuse_unnamed(value)
        reduced = reduced_without_boundary(value) if isinstance(value, nn.Module) else None
        return NotImplemented if reduced is None else reduced

    def persistent_id(self, value: object) -> int | None:
        if isinstance(value, Tensor):
            if is_shard(value):
                raise CheckpointError("it holds a sharded tensor, and this rank has only its local shard")
            # Any other tensor is pickled by its own __reduce_ex__: one of another class, or with attributes, down to its storage,
            # which gets a number below; one on the meta device has no storage.
            if type(value) in (Tensor, nn.Parameter) and not value.is_meta and not vars(value):
                return self._id(id(value), self._full.get(id(value), value))
        elif isinstance(value, torch.UntypedStorage):
            raise CheckpointError(
                "it holds an UntypedStorage, which torch pickles but does not rebuild: keep the tensor instead"
            )
        elif isinstance(value, torch.storage.TypedStorage):
            memory = value._untyped_storage._cdata
            if memory not in self._numbers:
                self.storages.append(len(self.tensors))
                self._dtypes[memory] = value.dtype
            elif self._dtypes[memory] != value.dtype:
                raise CheckpointError(
                    f"it, or it and an object before it, holds tensors of {self._dtypes[memory]} and {value.dtype} in the same "
                    "memory: clone one of them"
                )
            return self._id(memory, whole_tensor(value))
        return None

    def _id(self, key: int, tensor: Tensor) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        number = self._numbers[key].to_bytes(_NUMBER, "little")
        return int.from_bytes(self._random + number + _LAST, "little")
