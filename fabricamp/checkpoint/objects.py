"""Objects in a checkpoint: values that only code can rebuild, pickled separately from the plain values around them.

A state with objects has an :class:`ObjectRef` in place of each object, and all of these share one :class:`PickledObjects`::

    {"hyper_parameters": {"lr": 0.1, "loss": ObjectRef(·, 0)}, "callbacks": {"Stats": ObjectRef(·, 1)}, ...}
                                                       │                                          │
                                                       └─────────────────┬────────────────────────┘
    PickledObjects(data: bytes of [loss, stats] as a uint8 tensor, tensors: [loss.weight, ...], names, digest)

The tensors inside objects are not in the bytes but in a separate list, so they are copied and written like all other tensors.  The
two classes pickle as calls of :func:`unpickled` and :func:`object_at`: ``torch.load(path, weights_only=False)`` returns the objects
themselves, at their keys, and ``weights_only=True`` refuses the file.  fabricamp reads a file under :func:`without_unpickling`:
these calls then only create the two classes, and the bytes are not unpickled until :meth:`PickledObjects.load` is allowed to.

Order: the classes, how objects are pickled, how they are read.
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
from torch import Tensor, nn

from fabricamp._utils import lightning_alias
from fabricamp.checkpoint.lightning_names import allowed_under_both_names, find_named, refuse_unnamed, renamed
from fabricamp.errors import CheckpointError, CheckpointObjectsError
from fabricamp.ops.shards import is_shard
from fabricamp.precision.boundary import reduced_without_boundary
from fabricamp.torch_private import WeightsOnlyUnpickler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PROTOCOL: Final = 2
"""torch.save's, and the only one that torch's weights-only unpickler reads."""


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

    def parts(self) -> tuple[Any, ...]:
        """Returns the fields, all of them plain values."""
        return self.data, self.tensors, self.names, self.digest

    def load(self, *, weights_only: bool) -> list[Any]:
        """Returns the objects; with ``weights_only`` only of types that torch allows, or that the program has added to them.

        Raises :class:`CheckpointError` if the bytes are not those that were written, before anything is unpickled, and
        ``pickle.UnpicklingError`` for a type that is not allowed.
        """
        file = io.BytesIO(_checked(*self.parts()))
        unpickler: Any
        if weights_only:
            unpickler = WeightsOnlyUnpickler(file)
            unpickler.persistent_load = lambda number: _tensor_or_storage(self.tensors, number)
        else:
            unpickler = _Unpickler(file, self.tensors)
        with allowed_under_both_names():
            objects = unpickler.load()
        if not isinstance(objects, list) or len(objects) != len(self.names):
            raise CheckpointError("the number of its objects is not the number that was written")
        return objects

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, self.parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> PickledObjects:
        return PickledObjects(*(copy.deepcopy(part, memo) for part in self.parts()))


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
        data, tensors = _dumped(values, full or {})
    except Exception as error:  # a class of the user may raise anything
        path, name, reason = _culprit(objects, error)
        raise CheckpointError(
            f"{path} is a {name}, which cannot be pickled ({reason:.300}), so no checkpoint can hold it. Put a function or class "
            "of a module in its place, or leave it out (save_hyperparameters(ignore=[...]), state_dict, on_save_checkpoint)"
        ) from error
    pickled.data = torch.frombuffer(data, dtype=torch.uint8)
    pickled.tensors = tensors
    pickled.names = [name for _, name, _ in objects]
    pickled.digest = _digest(data)


def _culprit(objects: Sequence[tuple[str, str, object]], error: Exception) -> tuple[str, str, str]:
    """Returns key path, name and reason of the first object that cannot be pickled alone."""
    for path, name, value in objects:
        try:
            _dumped([value], {})
        except Exception as own:  # noqa: BLE001 - the same
            return path, name, f"{type(own).__name__}: {own}"
    path, name, _ = objects[0]
    return path, name, f"{type(error).__name__}: {error}"


def _dumped(values: list[object], full: Mapping[int, Tensor]) -> tuple[bytearray, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file, full)
    pickler.dump(values)
    data = file.getvalue()
    if lightning_alias.is_installed():  # the file may go back to Lightning
        data = renamed(data)
    return bytearray(data), pickler.tensors


class _Pickler(pickle.Pickler):
    """Keeps tensors, and storages of tensors of other classes, out of the bytes."""

    def __init__(self, file: io.BytesIO, full: Mapping[int, Tensor]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[Tensor] = []  # keeps the numbered tensors alive, so no id is used twice
        self._full = full
        self._numbers: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if lightning_alias.is_installed():
            refuse_unnamed(value)
        reduced = reduced_without_boundary(value) if isinstance(value, nn.Module) else None
        return NotImplemented if reduced is None else reduced

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if is_shard(value):
                raise CheckpointError("it holds a sharded tensor, and this rank has only its local shard")
            # A tensor with attributes, or of another class, is pickled by its own __reduce_ex__, down to a storage, which gets the
            # number; a tensor on the meta device has no storage.
            if type(value) in (Tensor, nn.Parameter) and not value.is_meta and not vars(value):
                return self._number(id(value), self._full.get(id(value), value))
        elif isinstance(value, torch.UntypedStorage):
            raise CheckpointError(
                "it holds an UntypedStorage, which torch pickles but does not rebuild: keep the tensor instead"
            )
        elif isinstance(value, torch.storage.TypedStorage):
            storage = value._untyped_storage  # the public methods warn that the class is deprecated
            whole = torch.empty(0, dtype=value.dtype, device=storage.device).set_(storage)
            return "storage", self._number(storage._cdata, whole)
        return None

    def _number(self, key: int, tensor: Tensor) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[key]


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Rebuilds any object; used only if a call has allowed the bytes to run code."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Any:
        return _tensor_or_storage(self._tensors, number)

    def find_class(self, module: str, name: str) -> Any:
        found = find_named(module, name)
        return super().find_class(module, name) if found is None else found


def _tensor_or_storage(tensors: list[Tensor], number: Any) -> Any:
    """Returns the tensor or the storage that :class:`_Pickler` gave this number."""
    if isinstance(number, int):
        return tensors[number]
    tensor = tensors[number[1]]
    return torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)


def unpickled(data: Any, tensors: Any, names: Any, digest: Any) -> list[Any]:
    """Returns the objects of a file; ``torch.load(path, weights_only=False)`` calls it, and fabricamp's own reading does not."""
    return PickledObjects(data, tensors, names, digest).load(weights_only=False)


def object_at(objects: list[Any], index: int) -> Any:
    """Returns one of the objects of :func:`unpickled`."""
    return objects[index]


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


GLOBALS: Final = {_name_of(unpickled), _name_of(object_at)}
"""The names of the functions that a file with objects calls."""


def _closed_objects(data: Any, tensors: Any, names: Any, digest: Any) -> PickledObjects:
    """Replaces :func:`unpickled` while a file is read.

    It is a function and not the class: with a class, a file could create an object without fields, or set them afterwards.
    """
    return PickledObjects(data, tensors, names, digest)


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


def _checked(data: Any, tensors: Any, names: Any, digest: Any) -> bytes:
    """Returns the bytes; raises :class:`CheckpointError` if they differ from the written ones."""
    has_layout = isinstance(tensors, list) and isinstance(names, list) and isinstance(data, Tensor)
    if (
        not has_layout
        or data.is_meta
        or data.dtype is not torch.uint8
        or data.layout is not torch.strided
        or data.dim() != 1
        or not data.is_contiguous()  # a small file could ask for any amount of memory
        or not all(isinstance(name, str) for name in names)
    ):
        raise CheckpointError("its objects do not have the layout of objects")
    content: bytes = data.cpu().contiguous().numpy().tobytes()
    if _digest(content) != digest:
        raise CheckpointError("the bytes of its objects are not those that were written")
    return content


def refusal(path: str, objects: Sequence[str]) -> CheckpointObjectsError:
    """Returns the error for a file with ``objects``, each with key and class, that were not allowed to be unpickled."""
    return CheckpointObjectsError(
        f"{path} holds objects that only code could rebuild ({', '.join(objects):.500}), so it is not loaded. If you trust its "
        "source, give weights_only=False to this call (fit, validate, test, predict or load_from_checkpoint); to allow these types "
        "alone, call torch.serialization.add_safe_globals([...]) before"
    )
