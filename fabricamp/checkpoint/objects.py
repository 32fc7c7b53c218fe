"""Objects in a checkpoint: values that only code can rebuild, pickled separately from the plain values around them.

A state with objects has an :class:`ObjectRef` in place of each object, and all of these share one :class:`PickledObjects`::

    {"hyper_parameters": {"lr": 0.1, "loss": ObjectRef(·, 0)}, "callbacks": {"Stats": ObjectRef(·, 1)}, ...}
                                                       │                                          │
                                                       └─────────────────┬────────────────────────┘
    PickledObjects(data: opcodes of loss and stats as a uint8 tensor, tensors: [loss.weight, ...], names, digest, ...)

The tensors inside objects are not in the bytes: they stand beside them, and are copied and written like all other tensors.  The
bytes stay closed until :meth:`PickledObjects.load` is allowed to open them.

The bytes are pickle's opcodes for one object after the other.  They put values into pickle's memo, and get them from it, by index::

    0 ... first-1         parts of the objects
    first ...             the tensors, which whoever reads the bytes puts there before
    first+len(tensors)... the objects

``object_pickling.py`` makes them, ``closed_pickle.py`` writes them into the pickle of a state and cuts them out of it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import pickle
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.checkpoint.lightning_names import PROTOCOL, Unpickler, allowed_under_both_names
from fabricamp.errors import CheckpointError, CheckpointObjectsError
from fabricamp.torch_private import WeightsOnlyUnpickler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START: Final = pickle.PROTO + bytes([PROTOCOL])
"""What a pickle begins with; only torch's weights-only unpickler asks for this protocol."""


def put(index: int) -> bytes:
    """Returns the opcode that puts the value on top of the stack into the memo, at ``index``."""
    return pickle.LONG_BINPUT + index.to_bytes(4, "little")


def get(index: int) -> bytes:
    """Returns the opcode that gets the value at ``index`` of the memo."""
    return pickle.LONG_BINGET + index.to_bytes(4, "little")


def digest_of(data: bytes | bytearray) -> str:
    """Returns the digest of the bytes of objects."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


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
    """The index of the first tensor in the memo; None: ``data`` is a pickle of version 0.2.0."""
    storages: list[int] = field(default_factory=list)
    """The numbers of tensors of which the objects hold the storage: tensors of other classes do."""

    def parts(self) -> tuple[Any, ...]:
        """Returns the fields, all of them plain values."""
        parts = (self.data, self.tensors, self.names, self.digest)
        return parts if self.first is None else (*parts, self.first, self.storages)

    def content(self) -> bytes:
        """Returns the bytes; raises :class:`CheckpointError` unless they are those that were written."""
        if not self._has_layout():  # a file may hold anything
            raise CheckpointError("its objects do not have the layout of objects")
        content: bytes = self.data.cpu().contiguous().numpy().tobytes()
        if digest_of(content) != self.digest:
            raise CheckpointError("the bytes of its objects are not those that were written")
        return content

    def load(self, *, weights_only: bool) -> list[Any]:
        """Returns the objects; with ``weights_only`` only of types that torch allows, or that the program has added to them.

        Raises :class:`CheckpointError` if the bytes are not those that were written, before anything is unpickled, and
        ``pickle.UnpicklingError`` for a type that is not allowed.
        """
        content = self.content()
        if self.first is not None:
            content = _list_of(self.first, len(self.tensors), content)
        unpickler: Any = (WeightsOnlyUnpickler if weights_only else Unpickler)(io.BytesIO(content))
        unpickler.persistent_load = self._stored
        with allowed_under_both_names():
            loaded = unpickler.load()
        objects = loaded if self.first is None or not isinstance(loaded, list) else loaded[len(self.tensors) :]
        if not isinstance(objects, list) or len(objects) != len(self.names):
            raise CheckpointError("the number of its objects is not the number that was written")
        return objects

    def _stored(self, number: Any) -> Any:
        """Returns a tensor, or its storage if that is what the objects hold."""
        if isinstance(number, int):
            tensor = self.tensors[number]
            return typed_storage(tensor) if number in self.storages else tensor
        return typed_storage(self.tensors[number[1]])  # version 0.2.0

    def _has_layout(self) -> bool:
        data = self.data
        return (
            isinstance(data, Tensor)
            and not data.is_meta
            and data.dtype is torch.uint8
            and data.layout is torch.strided
            and data.dim() == 1
            and data.is_contiguous()  # a small file could ask for any amount of memory
            and isinstance(self.tensors, list)
            and isinstance(self.names, list)
            and all(isinstance(name, str) for name in self.names)
            and (self.first is None or self._has_layout_in_memo())
        )

    def _has_layout_in_memo(self) -> bool:
        # Each part of an object in the memo takes two bytes or more: a small file could ask for any amount of memory.
        return (
            isinstance(self.storages, list)
            and all(isinstance(number, int) for number in self.storages)
            and type(self.first) is int
            and 0 <= self.first <= self.data.numel()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, self.parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> PickledObjects:
        return PickledObjects(*(copy.deepcopy(part, memo) for part in self.parts()))


def _list_of(first: int, count: int, opcodes: bytes) -> bytes:
    """Returns a pickle of a list: ``count`` tensors, in the memo from ``first`` on, and the objects of ``opcodes``."""
    tensors = b"".join(
        pickle.BININT + number.to_bytes(4, "little") + pickle.BINPERSID + put(first + number) for number in range(count)
    )
    return START + pickle.EMPTY_LIST + pickle.MARK + tensors + opcodes + pickle.APPENDS + pickle.STOP


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
