"""Builds a module or DataModule from the hyper-parameters in a checkpoint.

:func:`build` calls the constructor with the arguments of :func:`arguments_for`.  A file holds plain data with notes of the original
types: :func:`rebuilt` converts it back, to types that the loading code names, and to no others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import inspect
import logging
import os
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar

from torch import Tensor

from fabricamp._utils.types import StateDict
from fabricamp.arguments.environment import first_reference
from fabricamp.checkpoint.hyperparameters import HyperparameterKeys, Hyperparameters, HyperparametersMixin
from fabricamp.checkpoint.instantiate import INSTANTIATOR, LIGHTNINGS, check_classes, instantiate_module
from fabricamp.checkpoint.packing import allows_code
from fabricamp.checkpoint.plain import PRIVATE, name_of
from fabricamp.errors import CheckpointError, ConfigError, FabricampError, nearest

_LOG = logging.getLogger("fabricamp")

Owner = TypeVar("Owner", bound=HyperparametersMixin)


def build(
    owner: type[Owner],
    checkpoint: StateDict,
    keys: HyperparameterKeys,
    path: str,
    overrides: Mapping[str, Any],
    types: Iterable[type] = (),
    hparams_file: object = None,
    *,
    weights_only: bool | None = None,
) -> Owner:
    """Returns an ``owner`` built with :func:`arguments_for`; raises :class:`CheckpointError` if its constructor refuses them.

    ``weights_only`` False allows the file to name the classes of its values.  ``hparams_file`` is a YAML file with
    hyper-parameters, which replaces those in ``checkpoint``.
    """
    if hparams_file is not None:
        checkpoint = {**checkpoint, keys.values: _from_yaml(hparams_file), keys.types: []}
    if _saved(checkpoint, keys, path)[0].get(INSTANTIATOR) == LIGHTNINGS:
        return _build_as_configured(owner, checkpoint, keys, path, overrides, types, imports=allows_code(weights_only))
    arguments = arguments_for(owner, checkpoint, keys, path, overrides, types, imports=allows_code(weights_only))
    try:
        built = owner(**arguments)
    except FabricampError:  # some are TypeErrors too, and say what to change
        raise
    except TypeError as error:
        raise CheckpointError(
            f"{owner.__name__} cannot be built from {path}: {error}; pass what is missing as keyword arguments, "
            "or call self.save_hyperparameters() in __init__ before training"
        ) from error
    built.hparams_private = built.hparams_private or bool(checkpoint.get(PRIVATE))
    return built


def _build_as_configured(
    owner: type[Owner],
    checkpoint: StateDict,
    keys: HyperparameterKeys,
    path: str,
    overrides: Mapping[str, Any],
    types: Iterable[type],
    *,
    imports: bool,
) -> Owner:
    """Returns an ``owner`` built by jsonargparse from hyper-parameters that LightningCLI saved, updated by ``overrides``.

    Classes that the file names have to derive from those of the annotations, unless it may import any (``imports``).
    """
    saved = {key: value for key, value in _saved(checkpoint, keys, path)[0].items() if key not in overrides}
    _check_references(saved, path)
    if not imports:
        check_classes(owner, saved, named_types(owner, _checked(types)), path)
    try:
        return instantiate_module(owner, {**saved, **overrides})  # type: ignore[no-any-return]
    except argparse.ArgumentError as error:
        raise CheckpointError(
            f"{owner.__name__} cannot be built from {path}: {error}; pass what differs as keyword arguments"
        ) from None


def _from_yaml(file: Any) -> Any:
    yaml: Any = importlib.import_module("yaml")
    try:
        with Path(file).open() as text:
            return yaml.safe_load(text) or {}
    except FileNotFoundError:
        _LOG.warning(
            "hparams_file=%r does not exist: the constructor gets no hyper-parameters, as from an empty file",
            str(file),
        )
        return {}
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"hparams_file={str(file)!r} cannot be read ({' '.join(str(error).split()):.300}); give a YAML file of plain values"
        ) from None


def arguments_for(
    owner: type,
    checkpoint: Mapping[str, Any],
    keys: HyperparameterKeys,
    path: str,
    overrides: Mapping[str, Any],
    types: Iterable[type],
    *,
    imports: bool = False,
) -> dict[str, Any]:
    """Returns the arguments that build ``owner`` from ``checkpoint``, read from ``path``; ``overrides`` take precedence.

    ``types`` are classes that hyper-parameters may be rebuilt as, in addition to those annotated in ``owner``'s constructor; with
    ``imports`` also those that the file names.
    Raises :class:`CheckpointError` if a value is not in the file (for example a module or a function): it has to be given.
    """
    types = _checked(types)
    saved, name = _saved(checkpoint, keys, path)
    notes = checkpoint.get(keys.types, [])
    parameters = inspect.signature(owner).parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {key for key, parameter in parameters.items() if parameter.kind in by_name}
    whole = name if name in named else None
    if whole in overrides:
        return dict(overrides)
    needed = {key: value for key, value in saved.items() if key not in overrides}
    _check_references(needed, path)
    try:
        values, missing = rebuilt(needed, notes, named_types(owner, types), imports=imports)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if missing:
        calls = ", ".join(f"{key}=..." for key in missing)
        raise CheckpointError(
            f"{path}: the hyper-parameter {'; '.join(missing.values())}; pass what is missing, as in "
            f"{owner.__name__}.load_from_checkpoint(path, {calls})"
        )
    if whole is not None:
        # Overrides change values within that argument, unless only the constructor knows their name.
        beside = {key: value for key, value in overrides.items() if key in named and key not in saved}
        within = {key: value for key, value in overrides.items() if key not in beside}
        return {whole: _container({**values, **within}, notes), **beside}
    takes_any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any_name:
        # Unknown names are dropped: a base class may have saved them, or they were added to hparams.
        values = {key: value for key, value in values.items() if key in named}
        for unknown in (key for key in overrides if key not in named):
            cure = nearest(unknown, named) or "; leave it out"
            raise CheckpointError(
                f"load_from_checkpoint({unknown}=...): {owner.__name__} has no argument of this name{cure}"
            )
    return {**values, **overrides}


def _checked(types: Iterable[type]) -> list[type]:
    classes = [] if isinstance(types, type) else list(types)
    if isinstance(types, type) or not all(isinstance(kind, type) for kind in classes):
        raise ConfigError(f"types={types!r:.200}: give a list of classes, such as types=[Color, Options]")
    return classes


def _saved(checkpoint: Mapping[str, Any], keys: HyperparameterKeys, path: str) -> tuple[dict[str, Any], str | None]:
    """Returns the hyper-parameters, and the name of the single argument that held them, or None."""
    saved = checkpoint.get(keys.values, {})
    name = checkpoint.get(keys.name)
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise CheckpointError(
            f"{path}: its {keys.values!r} are {saved!r:.200}, not a dict of arguments; load the weights alone with "
            "module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])"
        )
    if not isinstance(name, str | None):
        raise CheckpointError(f"{path}: its {keys.name!r} is {name!r:.200}, not the name of an argument")
    return dict(saved), name


def _check_references(arguments: Mapping[str, Any], path: str) -> None:
    """Raises :class:`CheckpointError` for an argument that is only a reference to the environment in the checkpoint.

    The reference is not resolved: no file decides what is read from the environment.
    """
    for name, value in arguments.items():
        if reference := first_reference(value):
            raise CheckpointError(
                f"{path} holds {reference} for the hyper-parameter {name!r} instead of its value: pass the value, as in "
                f"load_from_checkpoint(path, {name}=...)"
            )


def _container(content: StateDict, notes: Any) -> Any:
    """Returns the value of a single argument: an OmegaConf container if it was one and can be rebuilt, else Hyperparameters."""
    was_config = any(note["kind"] == "config" and not note["at"] for note in notes)
    if was_config and not interpolates(content):
        try:
            from omegaconf import OmegaConf
            from omegaconf.errors import OmegaConfBaseException
        except ModuleNotFoundError:
            return Hyperparameters(content)
        with contextlib.suppress(OmegaConfBaseException):  # overrides may be anything
            return OmegaConf.create(content)
    return Hyperparameters(content)


class Rebuilt(NamedTuple):
    """The rebuilt values of a file."""

    values: dict[str, Any]
    missing: dict[str, str]
    """By first key, why a value could not be rebuilt: only the name of an object was saved, or its type was not given."""


def rebuilt(values: Mapping[str, Any], notes: Any, types: Iterable[type], *, imports: bool = False) -> Rebuilt:
    """Returns ``values`` rebuilt as ``types``, according to the ``notes`` of :func:`described`; no other class is used.

    With ``imports``, classes that the notes name are imported.

    Raises :class:`CheckpointError` if the notes do not have the expected layout.
    """
    try:
        by_keys = {tuple(note["at"]): (str(note["kind"]), str(note["type"])) for note in notes}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"its recorded types cannot be read ({type(error).__name__}: {error})") from None
    rebuilder = _Rebuilder(by_keys, tuple(types), {}, imports)
    if by_keys.get((), ("",))[0] == "config":
        for key, value in values.items():
            rebuilder.check_resolved(value, (key,))
    return Rebuilt({key: rebuilder.rebuild(value, (key,)) for key, value in values.items()}, rebuilder.missing)


def named_types(owner: type, types: Iterable[type] = ()) -> list[type]:
    """Returns ``types`` and the classes in the annotations of ``owner``'s constructor, and in annotations of their fields.

    Skips annotations with names that are not defined in the class's module (imported for type checkers only).
    """
    found: dict[type, None] = {}
    waiting = [*types]
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
        # One at a time: a name that is not defined spoils its own annotation alone.
        annotated = SimpleNamespace(__annotations__={name: annotation})
        try:
            hint = typing.get_type_hints(annotated, globalns=known)[name]
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
        classes += _classes_in(hint)
    return classes


def _classes_in(hint: object) -> Iterator[type]:
    for candidate in (hint, typing.get_origin(hint)):
        if isinstance(candidate, type):
            yield candidate
    for argument in typing.get_args(hint):
        yield from _classes_in(argument)


@dataclasses.dataclass(slots=True)
class _Rebuilder:
    notes: dict[tuple[Any, ...], tuple[str, str]]
    """(kind, name of the type) by the keys that lead to a value."""
    types: tuple[type, ...]
    missing: dict[str, str]
    imports: bool

    def rebuild(self, value: object, at: tuple[Any, ...]) -> Any:
        """Returns the value with the keys ``at`` in its original type; the plain value, recorded as missing, if that fails."""
        kind, name = self.notes.get(at, ("", ""))
        if kind in _NAME_ALONE:
            self._add_missing(at, f"{_NAME_ALONE[kind]} {name}, of which a checkpoint holds only the name")
            return value
        if isinstance(value, dict):
            value = {key: self.rebuild(item, (*at, key)) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            value = type(value)(self.rebuild(item, (*at, index)) for index, item in enumerate(value))
        if kind == "config":
            self.check_resolved(value, at)
        if kind in _WITHOUT_A_TYPE:
            return _WITHOUT_A_TYPE[kind](value)
        if kind in _OF_A_TYPE:
            return self._rebuild_as_type(value, at, kind, name)
        return value

    def check_resolved(self, value: object, at: tuple[Any, ...]) -> None:
        """Records a part of an OmegaConf container as missing if it could not be resolved when it was saved."""
        if interpolates(value):
            self._add_missing(at, f"{value!r:.200}, which OmegaConf could not resolve when it was saved")

    def _rebuild_as_type(self, value: object, at: tuple[Any, ...], kind: str, name: str) -> Any:
        typed = _OF_A_TYPE[kind]
        named = self._type_named(name, typed.fits)
        if named is None:
            if typed.required:
                self._add_missing(
                    at, f"of {name}: name this {typed.required} in the annotation of that argument, or give types=[...]"
                )
            return value
        try:
            return typed.make(named, value)
        except Exception as error:  # noqa: BLE001 - the user's own class, which may have changed since
            self._add_missing(
                at, f"of {name}, which cannot be built from {value!r:.200} ({type(error).__name__}: {error})"
            )
            return value

    def _type_named(self, name: str, fits: Callable[[type], bool]) -> type | None:
        """Returns the type with this full name, or the only one with the same class name: the module moved or was ``__main__``."""
        fitting = [kind for kind in self.types if fits(kind)]
        exact = [kind for kind in fitting if name_of(kind) == name]
        if exact:
            return exact[0]
        if self.imports and (imported := _imported(name)) and fits(imported):
            return imported
        if fits is _fits_a_path:
            return next(iter(fitting), None)
        moved = [kind for kind in fitting if kind.__name__ == name.rpartition(".")[2]]
        return moved[0] if len(moved) == 1 else None

    def _add_missing(self, at: tuple[Any, ...], why: str) -> None:
        dotted = ".".join(map(str, at))
        self.missing.setdefault(str(at[0]), f"{dotted!r} was {why}")


def _imported(name: str) -> type | None:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):  # it is gone, or was defined within a function
        return None
    return found if isinstance(found, type) else None


def _fits_a_path(kind: type) -> bool:
    return issubclass(kind, os.PathLike)


def _path(kind: type, value: str) -> Any:
    return kind(value) if issubclass(kind, PurePath) else Path(value)


def _config(value: object) -> Any:
    """Returns an OmegaConf container; the plain value if it has interpolations, or if OmegaConf is not installed."""
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError:
        return value
    return OmegaConf.create(value) if isinstance(value, dict | list) and not interpolates(value) else value


def interpolates(value: object) -> bool:
    """Returns whether ``value`` has an OmegaConf interpolation: no file may make OmegaConf look up values or call resolvers."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(map(interpolates, (*value, *value.values())))
    return isinstance(value, list | tuple) and any(map(interpolates, value))


def _dataclass(kind: Any, value: dict[str, Any]) -> Any:
    """Returns an object of ``kind``: fields with ``init`` go to the constructor, the others are set afterwards."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    made = kind(**{name: item for name, item in value.items() if name not in fields or fields[name].init})
    for name, item in value.items():
        if not fields[name].init:
            object.__setattr__(made, name, item)
    return made


class _TypedKind(NamedTuple):
    """A kind of values that are rebuilt as a class which the loading code names."""

    required: str
    """The word for the class if it has to be given; empty if the plain value will do without it."""
    make: Callable[[Any, Any], Any]
    """Returns an object of a class from the plain value."""
    fits: Callable[[type], bool]
    """Returns whether a class is of this kind."""


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


_NAME_ALONE: Final = {"name": "the class or function", "object": "an object of", "partial": "a partial of"}
_WITHOUT_A_TYPE: Final[dict[str, Callable[[Any], Any]]] = {
    "namespace": lambda value: argparse.Namespace(**value) if isinstance(value, dict) else value,
    "array": lambda value: value.cpu().numpy() if isinstance(value, Tensor) else value,
    "config": _config,
}
_OF_A_TYPE: Final = {
    "dataclass": _TypedKind("dataclass", _dataclass, dataclasses.is_dataclass),
    "enum": _TypedKind("enum", lambda kind, value: kind[value], _is_enum),
    "flag": _TypedKind("enum", lambda kind, value: kind(value), _is_enum),
    "value": _TypedKind("", lambda kind, value: kind(value), _is_enum),
    "namedtuple": _TypedKind("", lambda kind, value: kind(*value), lambda kind: hasattr(kind, "_fields")),
    "path": _TypedKind("", _path, _fits_a_path),
}
"""How each kind of note of :func:`described` is converted back."""
