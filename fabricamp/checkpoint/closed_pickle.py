"""Stands for Python's ``pickle`` in torch: ``object_files.py`` gives this module to ``torch.save`` as ``pickle_module``.

Torch writes by :class:`Pickler` and reads by :class:`Unpickler`.  The pickle is that of the state with the objects in their places,
so ``torch.load`` of any program rebuilds them: it needs their classes, and not fabricamp.  :class:`Unpickler` keeps them closed: it
returns the bytes of the objects, imports no class of theirs and runs no code, which only :meth:`PickledObjects.load` does.  One key
is added, and comes first::

    {"fabricamp_objects": [lengths, names, digest, ..., tensors, objects], "hyper_parameters": {"loss": an object of these}, ...}
                                                                 │  └── their bytes, as they were pickled at the save
                                                                 └───── put into the memo where these bytes get them

:class:`Pickler` writes each reference to an object as a get from the memo.  :class:`Unpickler` cuts the bytes of the objects out of
the pickle, and gives the rest to torch's weights-only unpickler, with an :class:`ObjectRef` in the memo for each object.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.checkpoint.object_pickling import OpcodePickler
from fabricamp.checkpoint.objects import START, ObjectRef, PickledObjects, put, typed_storage, whole_tensor
from fabricamp.checkpoint.packing import objects_in
from fabricamp.errors import CheckpointError
from fabricamp.torch_private import WeightsOnlyUnpickler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabricamp._utils.types import StateDict

KEY: Final = "fabricamp_objects"
"""The first key of a state with objects, as torch sees it."""

BEGIN: Final = (
    START
    + pickle.EMPTY_DICT
    + pickle.BINUNICODE
    + len(KEY).to_bytes(4, "little")
    + KEY.encode()
    + pickle.EMPTY_LIST
    + pickle.MARK
)
"""How the pickle begins.  Picklers of torch and Python write a put after EMPTY_DICT, so no pickle of another program does."""

_LONG: Final = pickle.LONG1 + b"\x08"
"""The opcode of a number of eight bytes."""

_NUMBERS: Final = struct.Struct("<" + "2sq" * 4)
"""What follows: lengths of the values before the objects, and of the objects; the first object's index in the memo; their count."""


class Pickler(OpcodePickler):
    """Writes the pickle of a state, whose references are to one :class:`PickledObjects`."""

    def dump(self, state: Any) -> None:
        """Writes the pickle of ``state``; raises :class:`CheckpointError` if it has references to objects of several files."""
        references = objects_in(state).values()
        pickled, *others = {id(reference.objects): reference.objects for reference in references}.values()
        if others:  # it has what read_header returned
            raise CheckpointError(
                "its objects are partly references of read_header, to those in another file; put the objects there, which "
                "read_checkpoint(path, weights_only=False) returns"
            )
        assert pickled.first is not None  # object_files.save has asked
        content = pickled.content()
        objects_at = pickled.first + len(pickled.tensors)
        count = len(pickled.names)
        self._put_references(references, objects_at, count)

        fields = (pickled.names, pickled.digest, pickled.storages, pickled.first)
        parts = [*map(self.opcodes, fields)]
        storages = set(pickled.storages)
        for number, tensor in enumerate(pickled.tensors):
            stored = typed_storage(tensor) if number in storages else tensor
            parts += [self.opcodes(stored), put(pickled.first + number)]
        head = b"".join(parts)
        # What follows EMPTY_DICT puts a dict into the memo, and adds the state's keys to it: here to the dict of BEGIN, which is on
        # top of the stack once SETITEM has added KEY.
        rest = self.opcodes(dict(state)).removeprefix(pickle.EMPTY_DICT)
        numbers = _NUMBERS.pack(_LONG, len(head), _LONG, len(content), _LONG, objects_at, _LONG, count)
        self.file.seek(0)
        self.file.truncate()
        self.file.writelines((BEGIN, numbers, head, content, pickle.APPENDS, pickle.SETITEM, rest, pickle.STOP))

    def _put_references(self, references: Iterable[ObjectRef], objects_at: int, count: int) -> None:
        """Puts each reference into the memo where its object is; what is pickled from now on goes behind all of these."""
        # A pickler's memo is {id of a value: (index, the value)}; of a value in it, only a get is written.
        memo: dict[int, tuple[int, Any]] = {id(one): (objects_at + one.index, one) for one in references}
        # A new value gets the size of the memo as its index, so that must be the number of indices in use.  The pickle refers to no
        # filler, whatever its index.
        fillers = [object() for _ in range(objects_at + count - len(memo))]
        memo.update((id(filler), (0, filler)) for filler in fillers)
        self.memo = memo


class Unpickler(WeightsOnlyUnpickler):
    """Reads a state with references in place of its objects; runs no code."""

    def __init__(self, file: io.BytesIO, *, encoding: str) -> None:
        data = file.getvalue()
        _, head, _, length, _, objects_at, _, count = _NUMBERS.unpack_from(data, len(BEGIN))
        begin = len(BEGIN) + _NUMBERS.size + head
        end = begin + length
        super().__init__(io.BytesIO(data[:begin] + data[end:]), encoding=encoding)
        self._content = bytearray(data[begin:end])
        self._pickled = PickledObjects()
        if not 0 <= count * len(put(0)) <= length:  # a small file could ask for any amount of memory
            raise pickle.UnpicklingError("it has fewer objects than it says")
        self.memo = {objects_at + index: ObjectRef(self._pickled, index) for index in range(count)}

    def load(self) -> StateDict:
        """Returns the state with references."""
        state: StateDict = super().load()  # type: ignore[no-untyped-call]
        _, _, _, _, names, digest, storages, first, *tensors = state.pop(KEY)
        for number in storages:
            tensors[number] = whole_tensor(tensors[number])
        pickled = self._pickled
        pickled.data = torch.frombuffer(self._content, dtype=torch.uint8)
        pickled.tensors = tensors
        pickled.names = names
        pickled.digest = digest
        pickled.first = first
        pickled.storages = storages
        return state
