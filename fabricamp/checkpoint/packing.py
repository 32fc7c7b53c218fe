"""Separates the objects of a state from its plain values before it is written, and puts them back after it was read."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import sys
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricamp._utils.types import StateDict
from fabricamp.checkpoint.object_pickling import pickle_into
from fabricamp.checkpoint.objects import ObjectRef, PickledObjects, refusal
from fabricamp.checkpoint.plain import MAPPINGS, TENSORS, VALUES, check_content, name_of
from fabricamp.errors import CheckpointError, CheckpointObjectsError
from fabricamp.ops.shards import is_shard, local
from fabricamp.rng import isolate_rng
from fabricamp.torch_private import is_traceable_wrapper_subclass


def pack_objects(state: StateDict, module: nn.Module | None = None, *, allowed_alone: bool = False) -> StateDict:
    """Returns ``state`` with references in place of its objects, which are pickled now; ``state`` itself if it has none.

    An object is a value that is no plain data; a tuple, a set or a dict whose keys contain such a value counts as one object.
    With ``allowed_alone`` only those of classes that gave themselves, or that the program gave, to
    ``torch.serialization.add_safe_globals``: ``torch.load(weights_only=True)`` reads them.  Containers without objects are not
    copied.  Tensors of ``module`` inside objects are saved with the values of ``state["state_dict"]``, which are full precision if
    the module's are half.  Raises :class:`CheckpointError` with the key path of an object that cannot be pickled.
    """
    packing = _Packing(allowed_classes() if allowed_alone else None)
    try:
        packed: StateDict = packing.convert(state, "checkpoint")
    except RecursionError:  # a list contains itself: the later check of the content reports it
        return state
    if packing.found:
        with isolate_rng():  # an object may consume random numbers while it is pickled; a save must not change training
            pickle_into(packing.pickled, packing.found, {} if module is None else _full_values(module, state))
    return packed


def _full_values(module: nn.Module, state: StateDict) -> dict[int, Tensor]:
    """Returns the values in ``state`` for tensors of ``module`` with another dtype, by the ids of the module's tensors."""
    values = state.get("state_dict")
    full: dict[int, Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value: Any = values.get(name) if isinstance(values, dict) else None
        if type(value) not in TENSORS or value.dtype == tensor.dtype:
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        full[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    return full


def allowed_classes() -> frozenset[type]:
    """Returns the classes that were given to ``torch.serialization.add_safe_globals``, as torchao gives those of its tensors."""
    return frozenset(one for one in torch.serialization.get_safe_globals() if isinstance(one, type))


def objects_of(value: object, path: str) -> list[tuple[str, str, object]]:
    """Returns (key path, name of its class, object) of each object in ``value``."""
    packing = _Packing()
    packing.convert(value, path)
    return packing.found


def shards_of_others(value: object, path: str) -> list[tuple[str, str]]:
    """Returns (key path, class of this rank's part) of sharded tensors in ``value`` whose parts are no plain tensors."""
    packing = _Packing()
    packing.convert(value, path)
    return packing.shards_of_others


class _Packing:
    def __init__(self, only: frozenset[type] | None = None) -> None:
        """``only``: the classes of the objects to pack; None packs all."""
        self.pickled = PickledObjects()
        self.shards_of_others: list[tuple[str, str]] = []
        """(key path, class of this rank's part) of sharded tensors that are made of others: a folder would have plain ones."""
        self._only = only
        self.found: list[tuple[str, str, object]] = []
        # By id, so a container that occurs twice in the state is one object after a load too.
        self._converted: dict[int, Any] = {}

    def convert(self, value: object, path: str) -> Any:
        kind = type(value)
        # Strategies write shards separately.  An ObjectRef occurs if a packed state is packed again.
        if kind in VALUES or kind in TENSORS or kind is ObjectRef:
            return value
        if is_shard(value):
            part = local(value)
            if type(part) not in TENSORS:
                self.shards_of_others.append((path, name_of(part)))
            return value
        if id(value) not in self._converted:
            self._converted[id(value)] = value  # ends the recursion if the value contains itself
            self._converted[id(value)] = self._convert(value, path)
        return self._converted[id(value)]

    def _convert(self, value: Any, path: str) -> Any:
        if type(value) in MAPPINGS and _is_plain([*value, vars(value) if hasattr(value, "__dict__") else None]):
            return self._with(value, {key: self.convert(part, f"{path}[{key!r}]") for key, part in value.items()})
        if type(value) is list:
            return self._with(value, {at: self.convert(part, f"{path}[{at}]") for at, part in enumerate(value)})
        if type(value) in (tuple, set) and _is_plain(value):
            return value
        if not self._packs(value):
            return value
        self.found.append((path, name_of(value), value))
        return ObjectRef(self.pickled, len(self.found) - 1)

    def _packs(self, value: object) -> bool:
        if self._only is None or type(value) in self._only:
            return True
        return type(value) is tuple and all(self._packs(item) or _is_plain(item) for item in value)

    @staticmethod
    def _with(container: Any, parts: dict[Any, Any]) -> Any:
        """Returns a copy of ``container`` with ``parts`` by key; ``container`` itself if no part has changed."""
        if all(part is container[key] for key, part in parts.items()):
            return container
        changed = copy.copy(container)  # keeps the attributes, such as a state dict's _metadata
        for key, part in parts.items():
            changed[key] = part
        return changed


def _is_plain(value: object) -> bool:
    try:
        check_content(value, stored=True)
    except CheckpointError:
        return False
    return True


def objects_in(state: object) -> dict[str, ObjectRef]:
    """Returns the references in ``state`` by key path."""
    return {path: container[key] for path, container, key in _places(state)}


def unpack_objects(state: object, path: str, *, weights_only: bool | None) -> None:
    """Replaces the references in a state read from ``path`` by the objects, in place.

    ``weights_only`` False allows code to rebuild them.  True and None allow torch's own types, and those that the program gave to
    ``torch.serialization.add_safe_globals``; raises :class:`CheckpointObjectsError` with the keys and classes of others.  If all
    of these are in the states of optimizers, their references stay instead: everything else in the file loads without them, and
    :func:`unpack_optimizers` raises.
    """
    try:
        _put_back(state, path, weights_only=not allows_code(weights_only))
    except CheckpointObjectsError:
        if not all(place.startswith(_OF_OPTIMIZERS) for place in objects_in(state)):
            raise


_OF_OPTIMIZERS: Final = "checkpoint['optimizer_states']"


def unpack_optimizers(state: StateDict, path: str) -> None:
    """Replaces the references that :func:`unpack_objects` has left, in place: a package may have been imported since.

    Raises :class:`CheckpointObjectsError` with keys, classes, and the package that is missing.
    """
    references = objects_in(state)
    if not any(place.startswith(_OF_OPTIMIZERS) for place in references):
        return
    packages = {reference.name.partition(".")[0] for reference in references.values()}
    missing = sorted(package for package in packages if not _can_be_imported(package))
    if missing:
        raise CheckpointObjectsError(
            f"{path} holds states of an optimizer ({', '.join(described_objects(state)):.300}) of the package "
            f"{', '.join(missing)}, which is not installed here; install it to resume. All else in the file loads without it "
            "(load_from_checkpoint, validate, test, predict)"
        )
    _put_back(state, path, weights_only=True)


def _can_be_imported(package: str) -> bool:
    # A module's spec is looked for without importing it, unless its name, which is the file's, has dots.
    return package in sys.modules or (package.isidentifier() and importlib.util.find_spec(package) is not None)


def unpack_own(state: object) -> None:
    """Replaces the references in a copy of this process's state by the objects; always allowed, as no file is involved."""
    with isolate_rng():
        _put_back(state, "the copy of the state", weights_only=False)


def _put_back(state: object, path: str, *, weights_only: bool) -> None:
    try:
        places = _places(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older one from the same folder") from None
    by_pack: dict[int, list[Any]] = {}
    for _, container, key in places:
        pickled = container[key].objects
        if id(pickled) not in by_pack:
            by_pack[id(pickled)] = _loaded(pickled, path, state, weights_only=weights_only)
    for _, container, key in places:
        reference = container[key]
        container[key] = _where_its_parts_are(by_pack[id(reference.objects)][reference.index])


def _where_its_parts_are(value: Any) -> Any:
    """Returns a tensor made of others on their device: a pickle has the device of the save, and its parts are read elsewhere."""
    if not is_traceable_wrapper_subclass(value):
        return value
    tensor: Any = value
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    if all(part.device == tensor.device for part in parts.values()):
        return tensor
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())


def allows_code(weights_only: bool | None) -> bool:
    """Returns whether a call with this argument allows code; torch's environment variable can forbid it for every call."""
    forbidden = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true")
    return weights_only is False and not forbidden


def _loaded(pickled: PickledObjects, path: str, state: object, *, weights_only: bool) -> list[Any]:
    try:
        return pickled.load(weights_only=weights_only)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older one from the same folder") from None
    except pickle.UnpicklingError as error:
        if weights_only:
            raise refusal(path, described_objects(state)) from None
        raise _not_here(path, state, error) from error
    except Exception as error:  # code of user classes, which may have changed since the save
        raise _not_here(path, state, error) from error


def described_objects(state: object) -> list[str]:
    """Returns key path and class of each object in ``state``."""
    return [f"{path}: {reference.name}" for path, reference in objects_in(state).items()]


def loads_unasked(state: object) -> bool:
    """Returns whether the objects in ``state`` are all of classes that ``torch.load(weights_only=True)`` reads in this process."""
    packs = {id(reference.objects): reference.objects for reference in objects_in(state).values()}
    try:
        with isolate_rng():
            for pickled in packs.values():
                pickled.load(weights_only=True)
    except Exception:  # noqa: BLE001 - code of the classes
        return False
    return True


def _not_here(path: str, state: object, error: Exception) -> CheckpointObjectsError:
    return CheckpointObjectsError(
        f"{path} holds objects ({', '.join(described_objects(state)):.500}) that cannot be rebuilt here "
        f"({type(error).__name__}: {error!s:.300}); import or define their classes as when they were saved"
    )


def _places(state: object) -> list[tuple[str, Any, Any]]:
    """Returns (key path, container, key) of each reference, in the order of the state."""
    found: list[tuple[str, Any, Any]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("checkpoint", state)]
    while waiting:
        path, container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, part in items:
            inner = f"{path}[{key!r}]"
            if isinstance(part, ObjectRef):
                if not _leads_to_an_object(part):
                    raise CheckpointError(f"{inner} refers to an object that is not there")
                found.append((inner, container, key))
            elif isinstance(part, dict | list):
                waiting.append((inner, part))
    return found


def _leads_to_an_object(reference: ObjectRef) -> bool:
    names = getattr(reference.objects, "names", None)  # a damaged file may hold anything
    return isinstance(names, list) and isinstance(reference.index, int) and 0 <= reference.index < len(names)
