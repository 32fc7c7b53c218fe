"""Plain data: values that load without running code.

First the check that a checkpoint holds nothing else, then the conversion of other values, with notes of their original types.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import hashlib
import numbers
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fabricamp._utils.types import StateDict
from fabricamp.arguments.environment import FromEnvironment, Resolved, resolved
from fabricamp.checkpoint.objects import ObjectRef, PickledObjects
from fabricamp.errors import CheckpointError
from fabricamp.state import TrainerFn

PRIVATE = "private"
"""The key that marks a checkpoint as readable by its owner only."""

VALUES = frozenset(
    {bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout},
)
MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})
_SEQUENCES = frozenset({list, tuple, set})
TENSORS = frozenset({Tensor, nn.Parameter})


def check_content(value: object, name: str = "checkpoint", *, stored: bool = False) -> None:
    """Raises :class:`CheckpointError` with key path and type of a value that ``torch.load(weights_only=True)`` could not load.

    ``stored`` allows tensors on the meta device, which stand for tensors stored elsewhere.
    """
    tensors_in(value, name, stored=stored)


def tensors_in(value: object, name: str = "checkpoint", *, stored: bool = False) -> list[Tensor]:
    """Returns every tensor in ``value`` once; raises as :func:`check_content` does."""
    seen: set[int] = set()
    tensors: list[Tensor] = []
    waiting: list[tuple[str, object]] = [(name, value)]
    while waiting:
        path, item = waiting.pop()
        if type(item) in VALUES or id(item) in seen:
            continue
        seen.add(id(item))
        waiting.extend(_items_to_check(path, item, stored=stored))
        if isinstance(item, Tensor):
            tensors.append(item)
    return tensors


def structure(value: object) -> str:
    """Returns a digest of keys, plain values, and the tensors' shapes and dtypes, equal before writing and after reading.

    The file's own checksums cover the tensors' values.  Raises :class:`CheckpointError` if ``value`` is nested too deeply.
    """
    try:
        return _digest(value, {}).hex()
    except RecursionError:
        raise CheckpointError(
            "it holds lists or dicts within each other, deeper than Python can follow; flatten them"
        ) from None


def _digest(value: object, known: dict[int, bytes]) -> bytes:
    """Returns the digest of ``value``; ``known`` has those of containers by id, which also ends a recursion into itself."""
    if id(value) in known:
        return known[id(value)]
    words: list[bytes] = [type(value).__name__.encode()]
    if isinstance(value, Tensor):
        words.append(f"{value.dtype}{tuple(value.shape)}".encode())
    elif isinstance(value, dict):
        known[id(value)] = b"within itself"
        words += [_digest(part, known) for item in value.items() for part in item]
    elif isinstance(value, list | tuple) and type(value) in _SEQUENCES:
        known[id(value)] = b"within itself"
        words += [_digest(part, known) for part in value]
    elif isinstance(value, PickledObjects | ObjectRef):
        words += [_digest(part, known) for part in value.parts()]
    elif isinstance(value, set):
        # Sorted, because the iteration order of a set may differ after reading.
        words += sorted(_digest(part, known) for part in value)
    else:
        words.append(repr(value).encode("utf-8", "surrogatepass"))
    digest = hashlib.blake2b(b"|".join(words), digest_size=16).digest()
    if isinstance(value, dict | list | tuple | PickledObjects):
        known[id(value)] = digest
    return digest


def _items_to_check(path: str, item: object, *, stored: bool) -> list[tuple[str, object]]:
    """Returns the values inside ``item`` that are still to be checked; raises if ``item`` itself could not be loaded."""
    kind = type(item)
    if kind in MAPPINGS:
        assert isinstance(item, dict)
        inside = [(f"{path}[{key!r}]", part) for key, part in item.items()]
        inside += [(f"{path} (its key {key!r})", key) for key in item]
        return inside + _attributes(path, item)
    if kind in _SEQUENCES:
        assert isinstance(item, list | tuple | set)
        return [(f"{path}[{index}]", part) for index, part in enumerate(item)]
    if kind in TENSORS:
        assert isinstance(item, Tensor)
        if item.is_meta and not stored:
            raise CheckpointError(
                f"{path} is a tensor on the meta device, which has no values to save; materialise it first"
            )
        return _attributes(path, item)
    if isinstance(item, PickledObjects | ObjectRef):
        return [(f"{path} (its part {index})", part) for index, part in enumerate(item.parts())]
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, strings, None, and lists, tuples "
        "and dicts of these, so that it loads without running code. Convert it (float(x), str(x), x.tolist()), or leave it out "
        "(save_hyperparameters(ignore=[...]), state_dict, on_save_checkpoint); Trainer(checkpoint_objects=True) saves objects, and "
        "whoever loads them has to allow code by weights_only=False"
    )


def _attributes(path: str, item: object) -> list[tuple[str, object]]:
    """Returns the attributes of a tensor or OrderedDict (such as ``state_dict()._metadata``), which are pickled with it."""
    return [(f"{path}.{name}", part) for name, part in getattr(item, "__dict__", {}).items()]


def stages_as_text(state: StateDict) -> StateDict:
    """Returns ``state`` with each stage as text: hooks get a stage as a member of an enum, and may keep it in their state.

    Containers without a stage are those of ``state`` itself.  Weights and optimizers' states are not searched.
    """
    try:
        return {key: part if key in _WITHOUT_STAGES else _stages_as_text(part) for key, part in state.items()}
    except RecursionError:  # a list contains itself: the later check of the content reports it
        return state


_WITHOUT_STAGES = frozenset({"state_dict", "optimizer_states"})


def _stages_as_text(value: Any) -> Any:
    kind = type(value)
    if kind is TrainerFn:
        return value.value
    if kind in MAPPINGS:
        items = [(_stages_as_text(key), _stages_as_text(part)) for key, part in value.items()]
        if all(key is old and part is value[old] for (key, part), old in zip(items, value, strict=True)):
            return value
        converted = copy.copy(value)  # keeps the attributes, such as a state dict's _metadata
        converted.clear()
        converted.update(items)
        return converted
    if kind in _SEQUENCES:
        parts = [_stages_as_text(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else kind(parts)
    return value


class Described(NamedTuple):
    """A value as a file stores it."""

    values: Any
    """Plain data."""
    notes: list[dict[str, Any]]
    """One note per value that was more than plain data: ``at`` (its keys), ``kind`` and ``type``, as text."""


def plain(value: object, *, private: bool = False) -> Any:
    """Returns ``value`` as plain data: tensors, numbers, strings, None, and lists, tuples, sets and dicts of these.

    OmegaConf containers, namespaces, dataclasses, partials and other mappings become dicts; enums and paths become strings; arrays
    become tensors.  Interpolations are resolved, except references to the environment: these stay references, but in a ``private``
    file numbers and flags from the environment are resolved.  Any other object, class or function becomes its name.
    """
    return described(value, private=private).values


def described(value: object, *, private: bool = False, objects: bool = False) -> Described:
    """Returns ``value`` as :func:`plain` does, with notes of the original types in it.

    With ``objects``, what would become its name alone (an object, a class, a function, a partial) stays as it is.
    """
    notes: list[dict[str, Any]] = []
    return Described(_plain(value, _Position((), notes, frozenset(), private, objects)), notes)


def without_numpy(value: object) -> Described:
    """Returns ``value`` with Python's numbers in place of NumPy's and tensors in place of its arrays, with notes of their dtypes.

    In dicts, lists and tuples.  Keys and items of sets become Python's numbers without a note: they are equal to NumPy's.

    >>> import numpy
    >>> values, notes = without_numpy({"gamma": 0.5, "milestones": [numpy.int64(2), 3]})
    >>> values
    {'gamma': 0.5, 'milestones': [2, 3]}
    >>> notes
    [{'at': ('milestones', 0), 'dtype': 'int64'}]
    """
    notes: list[dict[str, Any]] = []

    def stored(item: Any, at: tuple[Any, ...]) -> Any:
        content = _without_numpy(item)
        if content is not item:
            notes.append({"at": at, "dtype": str(item.dtype)})
        return content

    return Described(_mapped(value, stored), notes)


def _without_numpy(item: Any) -> Any:
    """Returns a scalar or an array of NumPy's as a number or a tensor; any other value unchanged."""
    if type(item).__module__ != "numpy" or not hasattr(item, "dtype"):
        return item
    content = _array(item) if _is_array(item) else _simple(item)
    # Dates, texts and objects have no such form: they stay, and the check of the checkpoint's content names them.
    return item if content is None or content is _OTHER else content


def with_numpy(value: Any, notes: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the ``value`` that :func:`without_numpy` was given, from its result."""
    if not notes:
        return value
    import numpy as np

    dtypes = {tuple(note["at"]): np.dtype(note["dtype"]) for note in notes}

    def original(item: Any, at: tuple[Any, ...]) -> Any:
        if at not in dtypes:
            return item
        return item.numpy().copy() if isinstance(item, Tensor) else dtypes[at].type(item)

    return _mapped(value, original)


def _mapped(value: Any, replace: Callable[[Any, tuple[Any, ...]], Any], at: tuple[Any, ...] = ()) -> Any:
    """Returns ``value`` with ``replace(item, keys that lead to it)`` for each item that is no container, and no key of NumPy's."""
    kind = type(value)
    if kind in MAPPINGS:
        result = copy.copy(value)  # keeps the attributes of an OrderedDict
        result.clear()
        for key, item in value.items():
            builtin = _mapped(key, lambda part, _: _without_numpy(part))
            result[builtin] = _mapped(item, replace, (*at, builtin))
        return result
    if kind is set:
        return {_mapped(item, lambda part, _: _without_numpy(part)) for item in value}
    if kind is list or kind is tuple:
        return kind(_mapped(item, replace, (*at, index)) for index, item in enumerate(value))
    return replace(value, at)


def items_of(value: object) -> list[Any]:
    """Returns the items of a collection, a namespace, a dataclass or a partial; empty for any other value."""
    kind = _kind_of(value)
    if kind is None or kind.name in ("config", "array"):
        return []
    content = kind.content(value)
    if isinstance(content, dict):
        return [*content.values()]
    return [*content] if isinstance(content, list | tuple) else []


@dataclasses.dataclass(frozen=True, slots=True)
class _Position:
    """The position of a value within the outermost value."""

    at: tuple[Any, ...]
    notes: list[dict[str, Any]]
    within: frozenset[int]
    """Ids of the enclosing containers, as a container may contain itself."""
    private: bool
    objects: bool

    def note(self, kind: str, name: str) -> None:
        self.notes.append({"at": self.at, "kind": kind, "type": name})

    def below(self, container: object, key: object) -> _Position:
        return _Position((*self.at, key), self.notes, self.within | {id(container)}, self.private, self.objects)


class _Kind(NamedTuple):
    """A kind of values, which a file stores as their ``content``; ``name`` is None if that needs no note."""

    name: str | None
    holds: Callable[[Any], bool]
    content: Callable[[Any], Any]
    """Returns a plain container, whose items may still need conversion; None if the value has no such content."""
    type_name: Callable[[Any], str] = lambda value: name_of(type(value))


def name_of(value: object) -> str:
    """Returns module and name of a class or function; for any other object, those of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"


def _plain(value: object, position: _Position) -> Any:
    simple = _simple(value)
    if simple is not _OTHER:
        return simple
    kind = _kind_of(value)
    content = None
    if kind is not None and id(value) not in position.within:
        content = kind.content(value)
    if isinstance(content, Resolved):
        content = content.values if position.private else content.written
    has_plain_form = kind is not None and content is not None and kind.name != "partial"
    if position.objects and not has_plain_form:
        return value
    if kind is None or content is None:
        position.note("name" if hasattr(value, "__qualname__") else "object", name_of(value))
        return name_of(value)
    if kind.name is not None:
        position.note(kind.name, kind.type_name(value))
    if isinstance(content, dict):
        return {key: _plain(item, position.below(value, key)) for key, item in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_plain(item, position.below(value, index)) for index, item in enumerate(content))
    return content


def _kind_of(value: object) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.holds(value)), None)


_OTHER: Final = object()


def _simple(value: Any) -> Any:
    """Returns a scalar or tensor as a value that loads unchanged; ``_OTHER`` for any other value."""
    if type(value) in VALUES or (type(value) in TENSORS and not value.is_meta):
        return value
    if isinstance(value, enum.Enum):
        return _OTHER
    if isinstance(value, str):
        return value.reference if isinstance(value, FromEnvironment) else str.__str__(value)
    if isinstance(value, numbers.Complex):
        return _builtin_number(value)
    numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    item = value.item() if numpy_scalar else _OTHER
    return item if type(item) in VALUES else _OTHER


def _builtin_number(value: numbers.Complex) -> int | float | complex:
    """Returns the number as a builtin type: NumPy's scalars do not load under ``weights_only``."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else complex(value)


def is_config(value: object) -> bool:
    """Returns whether ``value`` is an OmegaConf container."""
    omegaconf = sys.modules.get("omegaconf")  # if it was never imported, no value is an OmegaConf container
    return omegaconf is not None and omegaconf.OmegaConf.is_config(value)


def resolved_config(value: object) -> Resolved:
    """Returns the content of an OmegaConf container; unresolved if it cannot be resolved (a resolver is missing)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return resolved(value, enum_to_str=True)
    except OmegaConfBaseException:
        as_written = OmegaConf.to_container(value, resolve=False, enum_to_str=True)
        return Resolved(as_written, as_written)


def _fields(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _partial(value: functools.partial[Any]) -> dict[str, Any]:
    return {"partial": name_of(value.func), "args": list(value.args), "keywords": dict(value.keywords)}


def _mapping(value: Mapping[Any, Any]) -> dict[Any, Any] | None:
    keys = [_key(key) for key in value]
    return None if _OTHER in keys else dict(zip(keys, value.values(), strict=True))


def _key(key: object) -> Any:
    if isinstance(key, enum.Enum) and isinstance(key, str | int):
        return _mixed_in(key)
    return _simple(key)


def _set(value: set[Any]) -> set[Any] | None:
    items = [_simple(item) for item in value]
    return None if _OTHER in items else set(items)


def _array(value: Any) -> Any:
    import torch

    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError):  # text, objects; another order of bytes than the machine's
        return None


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _mixed_in(value: Any) -> Any:
    """Returns the str or number value of an enum member whose class also derives from str, int or float."""
    return str.__str__(value) if isinstance(value, str) else _builtin_number(value)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_KINDS: Final = (
    _Kind("value", lambda value: isinstance(value, enum.Enum) and isinstance(value, str | int | float), _mixed_in),
    _Kind("flag", _is(enum.Flag), lambda value: value.value),
    _Kind("enum", _is(enum.Enum), lambda value: value.name),
    _Kind("config", is_config, resolved_config),
    _Kind(None, lambda value: isinstance(value, nn.Module | type), lambda _: None),  # stored by name, never by content
    _Kind("dataclass", dataclasses.is_dataclass, _fields),
    _Kind("namespace", _is(argparse.Namespace), lambda value: dict(vars(value))),
    _Kind("partial", _is(functools.partial), _partial, lambda value: name_of(value.func)),
    _Kind("namedtuple", lambda value: isinstance(value, tuple) and hasattr(value, "_fields"), tuple),
    _Kind(None, _is(list), list),
    _Kind(None, _is(tuple), tuple),
    _Kind(None, _is(set), _set),
    _Kind(None, _is(Mapping), _mapping),
    _Kind("path", _is(os.PathLike), os.fspath),
    _Kind("array", _is_array, _array),
)
"""The first kind that matches is used."""
