"""Converts plain data from a file back to its original types, if the loading code names these types."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor

from fabricamp.checkpoint.plain import name_of
from fabricamp.errors import CheckpointError


class Rebuilt(typing.NamedTuple):
    """The rebuilt values of a file."""

    values: dict[str, Any]
    absent: dict[str, str]
    """By first key, why a value could not be rebuilt: only the name of an object was saved, or its type was not given."""


def rebuilt(values: Mapping[str, Any], notes: Any, types: Iterable[type]) -> Rebuilt:
    """Returns ``values`` rebuilt as ``types``, according to the ``notes`` of :func:`described`; no other class is used.

    Raises :class:`CheckpointError` if the notes do not have the expected layout.
    """
    try:
        by_place = {tuple(one["at"]): (str(one["kind"]), str(one["type"])) for one in notes}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"its notes of types are not laid out as such ({type(error).__name__}: {error})"
        ) from None
    work = _Work(by_place, tuple(types), {})
    if by_place.get((), ("",))[0] == "config":
        for key, value in values.items():
            work.check_resolved(value, (key,))
    return Rebuilt({key: work.back(value, (key,)) for key, value in values.items()}, work.absent)


def named_types(owner: type, given: Iterable[type] = ()) -> list[type]:
    """Returns ``given`` and the classes in the annotations of ``owner``'s constructor, and in annotations of their fields.

    Skips annotations with names that are not defined in the class's module (imported for type checkers only).
    """
    found: dict[type, None] = {}
    waiting = [*given]
    for base in owner.__mro__:
        for name in ("__init__", "__post_init__"):
            function = vars(base).get(name)
            waiting += _classes_of(getattr(function, "__annotations__", {}), getattr(function, "__globals__", {}))
    while waiting:
        kind = waiting.pop(0)
        if kind not in found:
            found[kind] = None
            if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
                waiting += _classes_of(getattr(kind, "__annotations__", {}), _globals_of(kind))
    return list(found)


def _globals_of(kind: type) -> dict[str, Any]:
    return dict(vars(sys.modules.get(kind.__module__, SimpleNamespace())))


def _classes_of(annotations: Mapping[str, Any], known: dict[str, Any]) -> list[type]:
    classes: list[type] = []
    for name, annotation in annotations.items():
        one = SimpleNamespace(__annotations__={name: annotation})
        try:
            hint = typing.get_type_hints(one, globalns=known)[name]
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
        classes += _classes_in(hint)
    return classes


def _classes_in(hint: Any) -> Iterator[type]:
    for one in (hint, typing.get_origin(hint)):
        if isinstance(one, type):
            yield one
    for part in typing.get_args(hint):
        yield from _classes_in(part)


@dataclasses.dataclass(slots=True)
class _Work:
    notes: dict[tuple[Any, ...], tuple[str, str]]
    types: tuple[type, ...]
    absent: dict[str, str]

    def back(self, value: Any, at: tuple[Any, ...]) -> Any:
        kind, name = self.notes.get(at, ("", ""))
        if kind in _NAME_ALONE:
            self._miss(at, f"{_NAME_ALONE[kind]} {name}, of which a checkpoint holds no more than that")
            return value
        if isinstance(value, dict):
            value = {key: self.back(item, (*at, key)) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            value = type(value)(self.back(item, (*at, index)) for index, item in enumerate(value))
        if kind == "config":
            self.check_resolved(value, at)
        if kind in _ALWAYS:
            return _ALWAYS[kind](value)
        return value if kind not in _OF_A_TYPE else self._of_a_type(value, at, kind, name)

    def check_resolved(self, value: Any, at: tuple[Any, ...]) -> None:
        """Records a part of an OmegaConf container as absent if it could not be resolved when it was saved."""
        if interpolates(value):
            self._miss(at, f"{value!r:.200}, which OmegaConf could not resolve when it was saved")

    def _of_a_type(self, value: Any, at: tuple[Any, ...], kind: str, name: str) -> Any:
        needed, make, fits = _OF_A_TYPE[kind]
        found = self._named(name, fits)
        if found is None:
            if needed:
                self._miss(at, f"of {name}: name this {needed} in the annotation of that argument, or give types=[...]")
            return value
        try:
            return make(found, value)
        except Exception as error:  # noqa: BLE001 - the user's own class, which may have changed since
            self._miss(at, f"of {name}, which cannot be made of {value!r:.200} ({type(error).__name__}: {error})")
            return value

    def _named(self, name: str, fits: Callable[[type], bool]) -> type | None:
        """Returns the type with this full name, or the only one with the same class name: the module moved or was ``__main__``."""
        fitting = [one for one in self.types if fits(one)]
        exact = [one for one in fitting if name_of(one) == name]
        if fits is _fits_a_path:
            return next(iter(exact or fitting), None)
        moved = [one for one in fitting if one.__name__ == name.rpartition(".")[2]]
        return exact[0] if exact else moved[0] if len(moved) == 1 else None

    def _miss(self, at: tuple[Any, ...], words: str) -> None:
        whole = ".".join(map(str, at))
        self.absent.setdefault(str(at[0]), f"{whole!r} was {words}")


def _fits_a_path(kind: type) -> bool:
    return issubclass(kind, os.PathLike)


def _path(kind: type, value: str) -> Any:
    return kind(value) if issubclass(kind, PurePath) else Path(value)


def _config(value: Any) -> Any:
    """Returns an OmegaConf container; the plain value if it has interpolations, or if OmegaConf is not installed."""
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError:
        return value
    return OmegaConf.create(value) if isinstance(value, dict | list) and not interpolates(value) else value


def interpolates(value: Any) -> bool:
    """Returns whether ``value`` has an OmegaConf interpolation: no file may make OmegaConf look up values or call resolvers."""
    if isinstance(value, str):
        return "${" in value
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(interpolates, inner))


def _dataclass(kind: Any, value: dict[str, Any]) -> Any:
    """Returns an object of ``kind``: fields with ``init`` go to the constructor, the others are set afterwards."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    made = kind(**{name: item for name, item in value.items() if name not in fields or fields[name].init})
    for name, item in value.items():
        if not fields[name].init:
            object.__setattr__(made, name, item)
    return made


_NAME_ALONE: Final = {"name": "the class or function", "object": "an object of", "partial": "a partial of"}
_ALWAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "namespace": lambda value: argparse.Namespace(**value) if isinstance(value, dict) else value,
    "array": lambda value: value.cpu().numpy() if isinstance(value, Tensor) else value,
    "config": _config,
}
_OF_A_TYPE: Final[dict[str, tuple[str, Callable[[Any, Any], Any], Callable[[type], bool]]]] = {
    "dataclass": ("dataclass", _dataclass, dataclasses.is_dataclass),
    "enum": ("enum", lambda kind, value: kind[value], lambda kind: issubclass(kind, enum.Enum)),
    "flag": ("enum", lambda kind, value: kind(value), lambda kind: issubclass(kind, enum.Enum)),
    "value": ("", lambda kind, value: kind(value), lambda kind: issubclass(kind, enum.Enum)),
    "namedtuple": ("", lambda kind, value: kind(*value), lambda kind: hasattr(kind, "_fields")),
    "path": ("", _path, _fits_a_path),
}
"""(Word for a type that has to be given, or "" if the plain value will do; how to build the value; which types fit)."""
