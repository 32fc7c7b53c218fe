"""The pickle of a state with objects, for torch: its :class:`Pickler` and :class:`Unpickler`, as those of Python's ``pickle``.

It is that of the state with the objects in their places, so ``torch.load`` of any program rebuilds them: it needs their classes,
and not fabricamp.  One key is added, and comes first::

    {"fabricamp_objects": [lengths, names, digest, ..., tensors, objects], "hyper_parameters": {"loss": an object of these}, ...}
                                                                 │  └── their bytes, as they were pickled at the save
                                                                 └───── put at the places where these bytes get them

:class:`Pickler` writes the places of objects as pickle's references to them.  :class:`Unpickler` cuts the bytes of the objects out
of the pickle, and gives the rest to torch's weights-only unpickler: a reference then leads to an :class:`ObjectRef`.
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
"""A pickler of torch or Python puts the dict in a place, so no pickle of another program begins in this way."""

_LONG: Final = pickle.LONG1 + b"\x08"
"""The opcode of a number of eight bytes."""

_NUMBERS: Final = struct.Struct("<" + "2sq" * 4)
"""What follows: lengths of the values before the objects, and of the objects; the objects' first place, and how many they are."""


class Pickler(OpcodePickler):
    """Writes the pickle of a state, whose references are to one :class:`PickledObjects`."""

    def dump(self, state: Any) -> None:
        """Writes the pickle of ``state``."""
        references = objects_in(state).values()
        pickled, *others = {id(reference.objects): reference.objects for reference in references}.values()
        assert not others, "a state is packed once"
        assert pickled.first is not None
        content = pickled.content()
        objects_at = pickled.first + len(pickled.tensors)
        count = len(pickled.names)
        self._take_places(references, objects_at, count)

        fields = (pickled.names, pickled.digest, pickled.storages, pickled.first)
        parts = [*map(self.opcodes, fields)]
        storages = set(pickled.storages)
        for number, tensor in enumerate(pickled.tensors):
            stored = typed_storage(tensor) if number in storages else tensor
            parts += [self.opcodes(stored), put(pickled.first + number)]
        head = b"".join(parts)
        # The keys of the state go into the dict that begins the pickle.
        rest = self.opcodes(dict(state)).removeprefix(pickle.EMPTY_DICT)
        numbers = _NUMBERS.pack(_LONG, len(head), _LONG, len(content), _LONG, objects_at, _LONG, count)
        self.file.seek(0)
        self.file.truncate()
        self.file.writelines((BEGIN, numbers, head, content, pickle.APPENDS, pickle.SETITEM, rest, pickle.STOP))

    def _take_places(self, references: Iterable[ObjectRef], objects_at: int, count: int) -> None:
        """Gives each reference the place of its object; what is pickled from now on takes places behind all of these."""
        places: dict[int, tuple[int, Any]] = {id(one): (objects_at + one.index, one) for one in references}
        # The pickler takes the number of its places as the next one.
        fillers = [object() for _ in range(objects_at + count - len(places))]
        places.update((id(filler), (0, filler)) for filler in fillers)
        self.memo = places


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
