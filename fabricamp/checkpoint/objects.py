"""Objects in a checkpoint: values that only code can rebuild, pickled separately from the plain values around them.

A state with objects has an :class:`ObjectRef` in place of each object, and all of these share one :class:`PickledObjects`::

    {"hyper_parameters": {"lr": 0.1, "loss": ObjectRef(·, 0)}, "callbacks": {"Stats": ObjectRef(·, 1)}, ...}
                                                       │                                          │
                                                       └─────────────────┬────────────────────────┘
    PickledObjects(data: opcodes of loss and stats as a uint8 tensor, tensors: [loss.weight, ...], names, digest, ...)

The tensors inside objects are not in the bytes: they stand beside them, and are copied and written like all other tensors.  The
bytes stay closed until :meth:`PickledObjects.load` is allowed to open them.  ``object_files.py`` writes them into a file.

The bytes are pickle's opcodes for one object after the other, and get and put values by number, in pickle's memo::

    0 ... first-1         parts of the objects
    first ...             the tensors, which are put there before
    first+len(tensors)... the objects

Order: the classes, how objects are pickled, how they are read, the form of version 0.2.0.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import pickle
import re
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fabricamp._utils import lightning_alias
from fabricamp.checkpoint.lightning_names import (
    PROTOCOL,
    allowed_under_both_names,
    find_named,
    refuse_unnamed,
    renamed,
)
from fabricamp.errors import CheckpointError, CheckpointObjectsError
from fabricamp.ops.shards import is_shard
from fabricamp.precision.boundary import reduced_without_boundary
from fabricamp.torch_private import WeightsOnlyUnpickler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START: Final = pickle.PROTO + bytes([PROTOCOL])
"""What a pickle begins with; only torch's weights-only unpickler asks for this protocol."""


def put(place: int) -> bytes:
    """Returns the opcode that puts the value on top of the stack at ``place``."""
    return pickle.LONG_BINPUT + place.to_bytes(4, "little")


def body(data: bytes) -> bytes:
    """Returns the opcodes of a pickle, without its start and stop."""
    return data[len(START) : -len(pickle.STOP)]


@dataclass(eq=False, slots=True)  # slots: a file cannot set an attribute in the place of a method
class PickledObjects:
    """The bytes of a list of objects."""

    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors inside the objects, in the order of their first occurrence."""
    names: list[str] = field(default_factory=list)
    """The class of each object, for messages; of a class or a function its own name."""
    digest: str = ""
    """A digest of ``data``."""
    first: int | None = None
    """The place of the first tensor; None: ``data`` is a pickle of version 0.2.0."""
    storages: list[int] = field(default_factory=list)
    """The numbers of tensors of which the objects hold the storage: tensors of other classes do."""

    def parts(self) -> tuple[Any, ...]:
        """Returns the fields, all of them plain values."""
        parts = (self.data, self.tensors, self.names, self.digest)
        return parts if self.first is None else (*parts, self.first, self.storages)

    def content(self) -> bytes:
        """Returns the bytes; raises :class:`CheckpointError` unless they are those that were written."""
        return _checked(self)

    def load(self, *, weights_only: bool) -> list[Any]:
        """Returns the objects; with ``weights_only`` only of types that torch allows, or that the program has added to them.

        Raises :class:`CheckpointError` if the bytes are not those that were written, before anything is unpickled, and
        ``pickle.UnpicklingError`` for a type that is not allowed.
        """
        content = self.content()
        if self.first is not None:
            content = _with_tensors(content, self.first, len(self.tensors))
        file = io.BytesIO(content)
        unpickler: Any
        if weights_only:
            unpickler = WeightsOnlyUnpickler(file)
            unpickler.persistent_load = self.stored
        else:
            unpickler = _Unpickler(file, self)
        with allowed_under_both_names():
            loaded = unpickler.load()
        objects = loaded if self.first is None or not isinstance(loaded, list) else loaded[len(self.tensors) :]
        if not isinstance(objects, list) or len(objects) != len(self.names):
            raise CheckpointError("the number of its objects is not the number that was written")
        return objects

    def stored(self, number: Any) -> Any:
        """Returns a tensor, or its storage if that is what the objects hold."""
        if isinstance(number, int):
            tensor = self.tensors[number]
            return typed_storage(tensor) if number in self.storages else tensor
        return typed_storage(self.tensors[number[1]])  # version 0.2.0

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, self.parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> PickledObjects:
        return PickledObjects(*(copy.deepcopy(part, memo) for part in self.parts()))


def typed_storage(tensor: Tensor) -> Any:
    """Returns the storage of ``tensor`` in the form that torch pickles."""
    return torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)


def whole_tensor(storage: Any) -> Tensor:
    """Returns all values of a storage, as the inverse of :func:`typed_storage`."""
    untyped = storage._untyped_storage  # the public methods warn that the class will go
    return torch.empty(0, dtype=storage.dtype, device=untyped.device).set_(untyped)


@dataclass(eq=False, slots=True)
class ObjectRef:
    """The place of an object in a state."""

    objects: PickledObjects
    index: int

    def parts(self) -> tuple[Any, ...]:
        """Returns the fields."""
        return self.objects, self.index

    @property
    def name(self) -> str:
        """The class of the object."""
        name = self.objects.names[self.index]
        # The name is from the file, which is not trusted.
        return "".join(letter if letter.isprintable() else "?" for letter in name)

    def __reduce__(self) -> tuple[Any, ...]:
        return object_at, self.parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectRef:
        return ObjectRef(copy.deepcopy(self.objects, memo), self.index)


# -- pickling ------------------------------------------------------------------------------------------------------------------


def pickle_into(
    pickled: PickledObjects, objects: Sequence[tuple[str, str, object]], full: Mapping[int, Tensor] | None = None
) -> None:
    """Fills ``pickled`` with objects, given as (key path, name, object).

    ``full`` maps ids of tensors inside the objects to the tensors to save instead: the full values of half weights.  Raises
    :class:`CheckpointError` with the key path of an object that cannot be pickled.
    """
    values = [value for _, _, value in objects]
    try:
        dumped = _dumped(values, full or {})
    except Exception as error:  # a class of the user may raise anything
        path, name, reason = _culprit(objects, error)
        raise CheckpointError(
            f"{path} is a {name}, which cannot be pickled ({reason:.300}), so no checkpoint can hold it. Put a function or class "
            "of a module in its place, or leave it out (save_hyperparameters(ignore=[...]), state_dict, on_save_checkpoint)"
        ) from error
    pickled.data = torch.frombuffer(dumped.data, dtype=torch.uint8)
    pickled.tensors = dumped.tensors
    pickled.names = [name for _, name, _ in objects]
    pickled.digest = _digest(dumped.data)
    pickled.first = dumped.first
    pickled.storages = dumped.storages


def _culprit(objects: Sequence[tuple[str, str, object]], error: Exception) -> tuple[str, str, str]:
    """Returns key path, name and reason of the first object that cannot be pickled alone."""
    for path, name, value in objects:
        try:
            _dumped([value], {})
        except Exception as own:  # noqa: BLE001 - the same
            return path, name, f"{type(own).__name__}: {own}"
    path, name, _ = objects[0]
    return path, name, f"{type(error).__name__}: {error}"


class _Dumped(NamedTuple):
    """Fields of :class:`PickledObjects`."""

    data: bytearray
    tensors: list[Tensor]
    storages: list[int]
    first: int


def _dumped(values: Sequence[object], full: Mapping[int, Tensor]) -> _Dumped:
    pickler = _Pickler(full)
    pickles = [pickler.pickled(value) for value in values]
    first = _place_of_a_list(pickler.pickled([]))  # the next place that the pickler takes
    if lightning_alias.is_installed():  # the file may go back to Lightning
        pickles = [renamed(data) for data in pickles]
    place = first + len(pickler.tensors)
    result = bytearray()
    for number, data in enumerate(pickles):
        result += pickler.with_gets(body(data), first)
        result += put(place + number)
    return _Dumped(result, pickler.tensors, pickler.storages, first)


def _place_of_a_list(data: bytes) -> int:
    """Returns where a pickle of an empty list puts it."""
    opcodes = body(data)
    short = opcodes[1:2] == pickle.BINPUT
    return opcodes[2] if short else int.from_bytes(opcodes[2:6], "little")


class PartsPickler(pickle.Pickler):
    """Pickles one value after the other; a later pickle refers to the places of earlier ones."""

    def __init__(self, file: io.BytesIO, protocol: int = PROTOCOL) -> None:
        super().__init__(file, protocol=protocol)
        self.file = file

    def pickled(self, value: object) -> bytes:
        """Returns the pickle of ``value``."""
        self.file.seek(0)
        self.file.truncate()
        pickle.Pickler.dump(self, value)
        return self.file.getvalue()


class _Pickler(PartsPickler):
    """Keeps tensors, and storages of tensors of other classes, out of the bytes.

    Each has a long random number as its id, so that :meth:`with_gets` finds the id in the bytes without reading all opcodes.
    """

    def __init__(self, full: Mapping[int, Tensor]) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Tensor] = []  # they keep what is numbered alive, so no id is used twice
        self.storages: list[int] = []
        self._full = full
        self._numbers: dict[int, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # of the storages
        self._tail = secrets.token_bytes(16) + b"\x01"  # the last byte fixes sign and length

    def with_gets(self, opcodes: bytes, first: int) -> bytes:
        """Returns ``opcodes`` with the value at ``first`` and further places for each id of a tensor or storage."""
        size = bytes([_NUMBER + len(self._tail)])
        pattern = re.escape(pickle.LONG1 + size) + b"(.{%d})" % _NUMBER + re.escape(self._tail + pickle.BINPERSID)

        def get(found: re.Match[bytes]) -> bytes:
            place = first + int.from_bytes(found[1], "little")
            return pickle.LONG_BINGET + place.to_bytes(4, "little")

        return re.sub(pattern, get, opcodes, flags=re.DOTALL)

    def reducer_override(self, value: object) -> Any:
        if lightning_alias.is_installed():
            refuse_unnamed(value)
        reduced = reduced_without_boundary(value) if isinstance(value, nn.Module) else None
        return NotImplemented if reduced is None else reduced

    def persistent_id(self, value: object) -> int | None:
        if isinstance(value, Tensor):
            if is_shard(value):
                raise CheckpointError("it holds a sharded tensor, and this rank has only its local shard")
            # A tensor with attributes, or of another class, is pickled by its own __reduce_ex__, down to a storage, which gets the
            # number; a tensor on the meta device has no storage.
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
                    f"it holds tensors of {self._dtypes[memory]} and {value.dtype} in the same memory: clone one of them"
                )
            return self._id(memory, whole_tensor(value))
        return None

    def _id(self, key: int, tensor: Tensor) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        return int.from_bytes(self._numbers[key].to_bytes(_NUMBER, "little") + self._tail, "little")


_NUMBER: Final = 4
"""Number of bytes of a tensor's number in its id."""


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------------------------


def _with_tensors(content: bytes, first: int, count: int) -> bytes:
    """Returns a pickle of a list: the tensors, which are put in their places, and the objects."""
    tensors = b"".join(
        pickle.BININT + number.to_bytes(4, "little") + pickle.BINPERSID + put(first + number) for number in range(count)
    )
    return START + pickle.EMPTY_LIST + pickle.MARK + tensors + content + pickle.APPENDS + pickle.STOP


class _Unpickler(pickle.Unpickler):
    """Rebuilds any object; used only if a call has allowed the bytes to run code."""

    def __init__(self, file: io.BytesIO, pickled: PickledObjects) -> None:
        super().__init__(file)
        self._pickled = pickled

    def persistent_load(self, number: object) -> Any:
        return self._pickled.stored(number)

    def find_class(self, module: str, name: str) -> Any:
        found = find_named(module, name)
        return super().find_class(module, name) if found is None else found


def _checked(pickled: PickledObjects) -> bytes:
    data, names = pickled.data, pickled.names
    has_layout = isinstance(pickled.tensors, list) and isinstance(names, list) and isinstance(data, Tensor)
    if (
        not has_layout
        or data.is_meta
        or data.dtype is not torch.uint8
        or data.layout is not torch.strided
        or data.dim() != 1
        or not data.is_contiguous()  # a small file could ask for any amount of memory
        or not all(isinstance(name, str) for name in names)
        or not _has_places(pickled)
    ):
        raise CheckpointError("its objects do not have the layout of objects")
    content: bytes = data.cpu().contiguous().numpy().tobytes()
    if _digest(content) != pickled.digest:
        raise CheckpointError("the bytes of its objects are not those that were written")
    return content


def _has_places(pickled: PickledObjects) -> bool:
    if pickled.first is None:
        return True
    storages = pickled.storages
    numbers = isinstance(storages, list) and all(isinstance(number, int) for number in storages)
    # Each part of an object that has a place takes two bytes or more: a small file could ask for any amount of memory.
    return numbers and type(pickled.first) is int and 0 <= pickled.first <= pickled.data.numel()


def refusal(path: str, objects: Sequence[str]) -> CheckpointObjectsError:
    """Returns the error for a file with ``objects``, each with key and class, that were not allowed to be unpickled."""
    return CheckpointObjectsError(
        f"{path} holds objects that only code could rebuild ({', '.join(objects):.500}), so it is not loaded. If you trust its "
        "source, give weights_only=False to this call (fit, validate, test, predict or load_from_checkpoint); to allow these types "
        "alone, call torch.serialization.add_safe_globals([...]) before"
    )


# -- the form of version 0.2.0 ---------------------------------------------------------------------------------------------------
#
# Its files call these two functions around the bytes.  A file of it that is exported keeps the form.


def unpickled(data: Any, tensors: Any, names: Any, digest: Any, first: Any = None, storages: Any = ()) -> list[Any]:
    """Returns the objects of a file; ``torch.load(path, weights_only=False)`` calls it, and fabricamp's own reading does not."""
    return PickledObjects(data, tensors, names, digest, first, storages).load(weights_only=False)


def object_at(objects: list[Any], index: int) -> Any:
    """Returns one of the objects of :func:`unpickled`."""
    return objects[index]


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


GLOBALS: Final = {_name_of(unpickled), _name_of(object_at)}
"""The names of these functions."""


def _closed_objects(
    data: Any, tensors: Any, names: Any, digest: Any, first: Any = None, storages: Any = ()
) -> PickledObjects:
    """Stands for :func:`unpickled`; a function, as of a class a file could make an object without fields, or change them."""
    return PickledObjects(data, tensors, names, digest, first, storages)


def _closed_reference(objects: Any, index: Any) -> ObjectRef:
    return ObjectRef(objects, index)


READING: Final = threading.Lock()
"""Held while torch allows more types than the program does, because torch has one set of them for all threads."""


@contextlib.contextmanager
def without_unpickling() -> Iterator[None]:
    """A context in which ``torch.load(weights_only=True)`` returns :class:`PickledObjects` and references, without unpickling."""
    places: list[Any] = [(_closed_objects, _name_of(unpickled)), (_closed_reference, _name_of(object_at))]
    with READING, torch.serialization.safe_globals(places):
        yield
