"""The arguments an object was built with, kept so that a checkpoint can build it again."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import numbers
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.environment import FromEnvironment, exposes, first_reference, resolved
from fabricamp.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

_CONSTRUCTORS = ("__init__", "__post_init__")


class Hyperparameters(dict[str, Any]):
    """A dict whose keys are attributes too, in nested dicts as well.

    >>> Hyperparameters({"optimizer": {"lr": 0.1}}).optimizer.lr
    0.1
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        super().__init__()
        for name, value in {**(values or {}), **named}.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        nested = type(value) is dict and all(isinstance(key, str) for key in value)
        super().__setitem__(name, Hyperparameters(value) if nested else value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"no hyperparameter {name!r}{nearest(name, self)} (known: {', '.join(self) or 'none'})"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __reduce__(self) -> tuple[type[Hyperparameters], tuple[dict[str, Any]]]:
        return Hyperparameters, (dict(self),)


class HyperparametersMixin:
    """Gives a class :meth:`save_hyperparameters` and ``hparams``."""

    @property
    def hparams(self) -> Hyperparameters:
        """The saved hyperparameters, empty where none were saved; changes to it reach the next checkpoint."""
        saved: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return saved

    @property
    def hparams_name(self) -> str | None:
        """The constructor argument that takes ``hparams`` as a whole; None where each is an argument of its own."""
        name: str | None = self.__dict__.get("_hparams_name")
        return name

    @property
    def logs_hyperparameters(self) -> bool:
        """Whether loggers are given ``hparams``."""
        return bool(self.__dict__.get("_hparams_logged", False))

    @property
    def hparams_private(self) -> bool:
        """Whether only the owner may read a file that shows ``hparams``: the environment says what a number or a flag in it is."""
        return bool(self.__dict__.get("_hparams_private", False))

    @hparams_private.setter
    def hparams_private(self, private: bool) -> None:
        self.__dict__["_hparams_private"] = private

    def save_hyperparameters(self, *names: Any, ignore: str | Iterable[str] | None = None, logger: bool = True) -> None:
        """Keeps the arguments of the ``__init__`` that calls it in ``hparams``: all, ``names``, or all but ``ignore``.

        Instead of names, one dict, Namespace or OmegaConf container can be given: its content is kept.  Where the
        ``__init__`` of a class and of its base both call it, both sets are kept and the class's own values win.
        ``logger`` False keeps them from loggers.  Call it first: an argument assigned to since has its new value.
        """
        frame = sys._getframe(1)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        content = _container(names[0]) if len(names) == 1 else None
        if content is not None:
            owner_arguments = frame.f_locals.items()
            self.__dict__["_hparams_name"] = next((name for name, value in owner_arguments if value is names[0]), None)
            overrides, source = True, names[0]
        else:
            content = _chosen(_arguments(frame, self), names)
            source = {name: value for name, value in content.items() if name not in ignored}
            overrides = _is_outermost(frame, self)
        if _exposes(source):
            self.__dict__["_hparams_private"] = True
        kept = {name: _checkpointable(value, name, name) for name, value in content.items() if name not in ignored}
        for name, value in kept.items():
            if overrides or name not in self.hparams:
                self.hparams[name] = value
        self.__dict__["_hparams_logged"] = logger


def saved_arguments(checkpoint: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the hyper-parameters of a checkpoint; raises :class:`CheckpointError` where they are no arguments."""
    saved, name = checkpoint.get("hyper_parameters", {}), checkpoint.get("hparams_name")
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise CheckpointError(
            f"{path}: its 'hyper_parameters' are {saved!r:.200}, not a dict of arguments; load the weights alone with "
            "module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])"
        )
    if not isinstance(name, str | None):
        raise CheckpointError(f"{path}: its 'hparams_name' is {name!r:.200}, not the name of an argument")
    return dict(saved)


def check_references(arguments: Mapping[str, Any], path: str) -> None:
    """Raises :class:`CheckpointError` for an argument of which the checkpoint holds a reference only.

    It is not looked up: no file decides what is read from the environment.
    """
    for name, value in arguments.items():
        if reference := first_reference(value):
            raise CheckpointError(
                f"{path} holds {reference} for the hyper-parameter {name!r}, and not the value that it had: pass it, as in "
                f"load_from_checkpoint(path, {name}=...)"
            )


def _container(value: Any) -> dict[str, Any] | None:
    """The content of a dict, Namespace or OmegaConf container; None for anything else."""
    if isinstance(value, argparse.Namespace):
        return dict(vars(value))
    plain = _without_omegaconf(value)
    return dict(plain) if isinstance(plain, Mapping) else None


def _without_omegaconf(value: Any) -> Any:
    if not type(value).__module__.startswith("omegaconf."):
        return value
    from omegaconf import OmegaConf

    return resolved(value).values if OmegaConf.is_config(value) else value


def _exposes(value: Any) -> bool:
    """Whether ``value`` holds an OmegaConf container in which the environment says what a number or a flag is."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return OmegaConf.is_config(value) and exposes(*resolved(value))
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_exposes, inner))


def _arguments(frame: FrameType, owner: object) -> dict[str, Any]:
    """The arguments of the constructor running in ``frame``, its ``**kwargs`` among them."""
    code, local = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:count]
    if code.co_name not in _CONSTRUCTORS or not names or local.get(names[0]) is not owner:
        raise ConfigError(
            f"save_hyperparameters() was called in {code.co_name}(); call it in the __init__ whose arguments it keeps, "
            "or pass a dict of them"
        )
    values = {name: local[name] for name in names[1:] if name in local}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        position = count + bool(code.co_flags & inspect.CO_VARARGS)
        values.update(local.get(code.co_varnames[position], {}))
    if code.co_name == "__post_init__" and dataclasses.is_dataclass(owner):
        fields = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner) if field.init}
        values = fields | values
    return values


def _chosen(arguments: dict[str, Any], names: tuple[Any, ...]) -> dict[str, Any]:
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"save_hyperparameters() got a {type(name).__name__}; "
                "pass names of arguments, or one dict, Namespace or OmegaConf container"
            )
        if name not in arguments:
            known = ", ".join(repr(argument) for argument in arguments) or "none"
            raise ConfigError(
                f"save_hyperparameters({name!r}): __init__ has no such argument"
                f"{nearest(name, arguments)} (known: {known})"
            )
    return {name: arguments[name] for name in names} if names else arguments


def _is_outermost(frame: FrameType, owner: object) -> bool:
    """Whether ``frame`` runs the constructor of the object's own class, not of a base."""
    constructor = inspect.unwrap(getattr(type(owner), frame.f_code.co_name))
    return getattr(constructor, "__code__", None) is frame.f_code


def _checkpointable(value: Any, path: str, name: str) -> Any:
    """``value`` as what a checkpoint can hold: tensors, numbers, strings (also of paths), lists and dicts; else raises."""
    value = _without_omegaconf(value)
    if value is None or isinstance(value, bool | Tensor | bytes | os.PathLike | FromEnvironment):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Number):
        return _builtin_number(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, list | tuple):
        items = [_checkpointable(item, f"{path}[{index}]", name) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {
            _checkpointable(key, f"{path} key", name): _checkpointable(item, f"{path}.{key}", name)
            for key, item in value.items()
        }
    raise ConfigError(
        f"hyperparameter {path!r} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists and "
        f"dicts; convert it, or leave it out: save_hyperparameters(ignore=[{name!r}])"
    )


def _builtin_number(value: numbers.Number) -> int | float | complex:
    """The number as Python's own type: NumPy's scalars and enums do not load under ``weights_only``."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else complex(value)  # type: ignore[call-overload]
