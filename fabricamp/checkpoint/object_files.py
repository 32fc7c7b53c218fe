"""Objects within a file of ``torch.save``: the file is as torch would write it, and fabricamp reads it without opening them.

``data.pkl``, the pickle in torch's zip, is of the state with the objects in their places, so that ``torch.load`` of any program
rebuilds them: it needs their classes, and not fabricamp.  One key is added, and comes first::

    {"fabricamp_objects": [lengths, names, digest, ..., tensors, objects], "hyper_parameters": {"loss": an object of these}, ...}
                                                                 │  └── their bytes, as they were pickled at the save
                                                                 └───── put at the places where these bytes get them

:func:`save` writes the places of objects as pickle's references to them.  :func:`load_closed` cuts the bytes of the objects out of
the pickle, and gives the rest to torch's weights-only unpickler: a reference then leads to an :class:`ObjectRef`.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch

from fabricamp.checkpoint.objects import (
    START,
    ObjectRef,
    PartsPickler,
    PickledObjects,
    body,
    put,
    typed_storage,
    whole_tensor,
)
from fabricamp.checkpoint.packing import objects_in
from fabricamp.errors import CheckpointError
from fabricamp.torch_private import WeightsOnlyUnpickler, load_zipfile, open_zipfile_reader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabricamp._utils.types import StateDict

KEY: Final = "fabricamp_objects"
"""The first key of a state with objects, as torch sees it."""

_BEGIN: Final = (
    START
    + pickle.EMPTY_DICT
    + pickle.BINUNICODE
    + len(KEY).to_bytes(4, "little")
    + KEY.encode()
    + pickle.EMPTY_LIST
    + pickle.MARK
)
"""A pickler of torch or Python puts the dict in a place, so no pickle of another program begins in this way."""


def _number(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + value.to_bytes(8, "little")


_HEADER: Final = re.compile(re.escape(_BEGIN) + (re.escape(pickle.LONG1 + b"\x08") + b"(.{8})") * 4, re.DOTALL)
"""Followed by lengths of the values before the objects, and of the objects; their first place, and how many they are."""


# -- writing -------------------------------------------------------------------------------------------------------------------


def save(state: StateDict, file: IO[bytes]) -> None:
    """Writes ``state`` as ``torch.save`` does, with the objects of its references in their places."""
    references = [*objects_in(state).values()]
    # Those of a file of version 0.2.0 keep their form: their bytes have other references to tensors.
    inline = references and all(reference.objects.first is not None for reference in references)
    if inline:
        torch.save(state, file, pickle_module=_Inline)
    else:
        torch.save(state, file)


def without_key(state: StateDict) -> StateDict:
    """Returns ``state``, if plain torch has loaded it, without the key of a file's objects; raises if the key is the user's own."""
    if KEY not in state:
        return state
    value = state[KEY]
    if not isinstance(value, list) or len(value) < 8 or not all(type(number) is int for number in value[:4]):
        raise CheckpointError(f"a checkpoint's key {KEY!r} is fabricamp's own; give your value another name")
    return {key: value for key, value in state.items() if key != KEY}


class _InlinePickler(PartsPickler):
    """The pickler of a state with references."""

    def dump(self, state: Any) -> None:
        """Writes the pickle of ``state``, whose references are to one :class:`PickledObjects`."""
        references = objects_in(state).values()
        pickled, *others = {id(reference.objects): reference.objects for reference in references}.values()
        assert not others, "a state is packed once"
        assert pickled.first is not None
        content = pickled.content()
        objects_at = pickled.first + len(pickled.tensors)
        self._take_places(references, objects_at, len(pickled.names))

        head = self._body(pickled.names) + self._body(pickled.digest) + self._body(pickled.storages)
        head += self._body(pickled.first)
        storages = set(pickled.storages)
        for number, tensor in enumerate(pickled.tensors):
            stored = typed_storage(tensor) if number in storages else tensor
            head += self._body(stored) + put(pickled.first + number)
        rest = self._body(dict(state)).removeprefix(
            pickle.EMPTY_DICT
        )  # its keys go into the dict that begins the pickle
        numbers = map(_number, (len(head), len(content), objects_at, len(pickled.names)))
        self.file.seek(0)
        self.file.truncate()
        for part in (_BEGIN, *numbers, head, content, pickle.APPENDS, pickle.SETITEM, rest, pickle.STOP):
            self.file.write(part)

    def _take_places(self, references: Iterable[ObjectRef], objects_at: int, count: int) -> None:
        """Gives each reference the place of its object; what is pickled from now on takes places behind all of these."""
        places: dict[int, tuple[int, Any]] = {id(one): (objects_at + one.index, one) for one in references}
        # The pickler takes the number of its places as the next one.
        fillers = [object() for _ in range(objects_at + count - len(places))]
        places.update(zip(map(id, fillers), zip(repeat(0), fillers), strict=False))
        self.memo = places

    def _body(self, value: object) -> bytes:
        return body(self.pickled(value))


class _Inline:
    """Stands for the module ``pickle`` where torch writes."""

    Pickler = _InlinePickler


# -- reading -------------------------------------------------------------------------------------------------------------------


def has_objects(source: str | IO[bytes]) -> bool:
    """Returns whether the file begins as one that :func:`save` wrote with objects."""
    return _begin(source) == _BEGIN


def _begin(source: str | IO[bytes]) -> bytes:
    if not isinstance(source, str):
        source.seek(0)
    if not zipfile.is_zipfile(source):
        return b""
    with zipfile.ZipFile(source) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if not names:
            return b""
        with archive.open(names[0]) as member:
            return member.read(len(_BEGIN))


def load_closed(source: str | IO[bytes], map_location: object, *, mapped: bool) -> StateDict:
    """Returns the state that :func:`save` has written, with references; raises ``zipfile.BadZipFile`` if it is damaged."""
    if not isinstance(source, str):
        source.seek(0)
    memory = None
    if mapped and isinstance(source, str):
        memory = torch.UntypedStorage.from_file(source, False, Path(source).stat().st_size)
    try:
        # Not by torch.load: without weights_only it gives a TorchScript archive to torch.jit, and a tar file to its oldest loader,
        # whatever the pickle module.
        with open_zipfile_reader(source) as reader:
            state = load_zipfile(reader, map_location, _Closed, overall_storage=memory, encoding="utf-8")
    except OSError:
        raise
    except Exception as error:  # the pickle may hold anything
        raise zipfile.BadZipFile(f"its plain values cannot be read: {type(error).__name__}") from error
    return cast("StateDict", state)


class _References(dict[int, Any]):
    """The places of a pickle; those of the objects lead to references."""

    def __init__(self, pickled: PickledObjects, objects_at: int, count: int) -> None:
        super().__init__()
        self._pickled = pickled
        self._objects_at = objects_at
        self._count = count

    def __missing__(self, place: int) -> ObjectRef:
        if not 0 <= place - self._objects_at < self._count:
            raise KeyError(place)
        self[place] = ObjectRef(self._pickled, place - self._objects_at)
        return cast("ObjectRef", self[place])


class _ClosedUnpickler(WeightsOnlyUnpickler):
    """The rest of a pickle, by torch's weights-only unpickler."""

    def __init__(self, file: io.BytesIO, *, encoding: str) -> None:
        data = file.getvalue()
        header = _HEADER.match(data)
        if header is None:
            raise pickle.UnpicklingError("it has no header of objects")
        numbers = (int.from_bytes(number, "little", signed=True) for number in header.groups())
        head, content, objects_at, count = numbers
        begin = header.end() + head
        end = begin + content
        super().__init__(io.BytesIO(data[:begin] + data[end:]), encoding=encoding)
        self._content = bytearray(data[begin:end])
        self._pickled = PickledObjects()
        self.memo = _References(self._pickled, objects_at, count)

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


class _Closed:
    """Stands for the module ``pickle`` where torch reads."""

    Unpickler = _ClosedUnpickler
