"""Hyper-parameters: the constructor arguments of an object, saved so that it can be built again from a checkpoint.

In order: the dict that users see, ``save_hyperparameters``, how it finds the arguments, the entries of hyper-parameters in a
checkpoint, and references by which a tuner changes one of them.  ``load_from_checkpoint`` builds the object again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

from fabricamp._utils.types import StateDict
from fabricamp.arguments.environment import exposes, resolved
from fabricamp.arguments.private_methods import refuse_private_methods
from fabricamp.checkpoint.plain import described, is_config, items_of, resolved_config
from fabricamp.errors import ConfigError, nearest

_CONSTRUCTORS = ("__init__", "__post_init__")
_CONFIGURED: ContextVar[tuple[type, Mapping[str, Any]] | None] = ContextVar("_CONFIGURED", default=None)
"""The class being built from a configuration, and its arguments in there."""


class Hyperparameters(dict[str, Any]):
    """A dict with its keys as attributes too, also in nested dicts.

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

    def __str__(self) -> str:
        """Returns one line per entry, sorted by name, as Lightning prints them."""
        width = max((len(str(name)) for name in self), default=0) + 3
        lines = [(f'"{name}":', self[name]) for name in sorted(self, key=str)]
        return "\n".join(f"{label:{width}} {value}" for label, value in lines)

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __reduce__(self) -> tuple[type[Hyperparameters], tuple[dict[str, Any]]]:
        return Hyperparameters, (dict(self),)


@contextlib.contextmanager
def configured(kind: type, arguments: Mapping[str, Any]) -> Iterator[None]:
    """A context in which an object of ``kind`` saves ``arguments`` as its hyper-parameters, in place of what it is built with.

    Those of a configuration are plain data, where the constructor gets objects that were built from them.
    """
    token = _CONFIGURED.set((kind, arguments))
    try:
        yield
    finally:
        _CONFIGURED.reset(token)


class HyperparametersMixin:
    """Gives a class :meth:`save_hyperparameters` and ``hparams``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_private_methods(cls)

    @property
    def hparams(self) -> Hyperparameters:
        """The saved hyper-parameters, empty if none were saved; the next checkpoint contains changes of them.

        If an OmegaConf container was saved as a whole, this is that container.
        """
        saved: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return saved

    @property
    def hparams_initial(self) -> Hyperparameters:
        """A copy of ``hparams`` as they were saved; collections are copied, other objects are not."""
        saved: Hyperparameters = _copied(self.__dict__.get("_hparams_initial", Hyperparameters()))
        return saved

    @property
    def hparams_name(self) -> str | None:
        """The constructor argument that takes all of ``hparams`` as one value; None if each one is an argument of its own."""
        name: str | None = self.__dict__.get("_hparams_name")
        return name

    @property
    def logs_hyperparameters(self) -> bool:
        """Whether loggers get ``hparams``."""
        return bool(self.__dict__.get("_hparams_logged", False))

    @property
    def hparams_private(self) -> bool:
        """Whether files with ``hparams`` are readable by their owner only, because a number or a flag is from the environment."""
        return bool(self.__dict__.get("_hparams_private", False))

    @hparams_private.setter
    def hparams_private(self, private: bool) -> None:
        self.__dict__["_hparams_private"] = private

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Saves the arguments of the calling ``__init__`` in ``hparams``: all, only ``names``, or all but ``ignore``.

        Arguments may have any type; ``hparams`` holds the same objects, but copies of lists, tuples and dicts.  Files hold plain
        data only: of modules, functions, classes and other objects the name, so that ``load_from_checkpoint`` asks for them; with
        ``Trainer(checkpoint_objects=True)`` the objects themselves.

        Instead of names, pass one dict, Namespace or OmegaConf container to save its content.  A call in the ``__init__`` of a base
        class saves the arguments of the derived classes too; for equal names the values of the derived class win.
        With ``ignore`` a derived class removes arguments that its base class has saved.
        ``logger`` False does not send them to loggers.  Pass ``frame``, the frame of the ``__init__``, if another function calls
        this.  Call this first in ``__init__``: an argument that was assigned to before the call is saved with its new value.

        >>> class Net(HyperparametersMixin):
        ...     def __init__(self, lr: float = 0.1, activation=abs):
        ...         self.save_hyperparameters()
        >>> Net(0.5).hparams
        {'lr': 0.5, 'activation': <built-in function abs>}
        """
        frame = frame or sys._getframe(1)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        # One container instead of names holds all hyper-parameters; OmegaConf's containers are mappings.
        whole = names[0] if len(names) == 1 and isinstance(names[0], Mapping | argparse.Namespace) else None
        if whole is not None:
            self.__dict__["_hparams_name"] = next(
                (name for name, value in frame.f_locals.items() if value is whole), None
            )
            source = whole
            overrides = True
        else:
            kind, of_configuration = _CONFIGURED.get() or (None, {})
            of_constructors = of_configuration if kind is type(self) else _arguments_of_all(frame, self)
            arguments = _selected(dict(of_constructors), names)
            source = {name: value for name, value in arguments.items() if name not in ignored}
            overrides = _is_outermost(frame, self)
        if _exposes_environment(source):
            self.__dict__["_hparams_private"] = True
        if is_config(source) and not self.hparams and not ignored & source.keys():
            self.__dict__["_hparams"] = source
        else:
            content = {name: value for name, value in _content(source).items() if name not in ignored}
            self._add_hyperparameters(content, overrides=overrides)
            for name in ignored:  # the __init__ of a base class may have saved the argument
                self.hparams.pop(name, None)
        self.__dict__["_hparams_initial"] = _copied(self.hparams)
        self.__dict__["_hparams_logged"] = logger

    def _add_hyperparameters(self, content: StateDict, *, overrides: bool) -> None:
        hparams = self.hparams
        if is_config(hparams):  # an OmegaConf container can hold plain values only
            hparams = Hyperparameters(_content(hparams))
            self.__dict__["_hparams"] = hparams
        for name, value in content.items():
            if overrides or name not in hparams:
                is_container = is_config(value) or isinstance(value, argparse.Namespace)
                hparams[name] = value if is_container else _copied(value)


def _content(container: Any) -> StateDict:
    """Returns the content of a dict, Namespace or OmegaConf container as a dict."""
    if isinstance(container, argparse.Namespace):
        return dict(vars(container))
    return resolved(container).values if is_config(container) else dict(container)


def _copied(value: Any) -> Any:
    """Returns ``value`` with copies of all collections in it, but the same other objects."""
    if is_config(value):
        return copy.deepcopy(value)
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**_copied(vars(value)))
    if type(value) in (dict, Hyperparameters):
        return type(value)({key: _copied(item) for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item) for item in value)
    return value


def _exposes_environment(value: object) -> bool:
    """Returns whether ``value`` holds an OmegaConf container with a number or flag from the environment."""
    waiting = [value]
    seen: dict[int, Any] = {}  # holds the values: an id is unique among living objects
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if is_config(item) and exposes(*resolved_config(item)):
            return True
        waiting += items_of(item)
    return False


def _arguments_of_all(frame: FrameType, owner: object) -> dict[str, Any]:
    """Returns the arguments of the constructor in ``frame`` and of the derived classes' constructors around it; these win.

    With the base's values alone, ``load_from_checkpoint`` would build the derived class from the values passed to its base.
    """
    values = _arguments(frame, owner)
    outer = frame.f_back
    while outer is not None:
        if _constructs(outer, owner):
            values.update(_arguments(outer, owner))
        outer = outer.f_back
    return values


def _constructs(frame: FrameType, owner: object) -> bool:
    code = frame.f_code
    return code.co_name in _CONSTRUCTORS and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is owner


def _arguments(frame: FrameType, owner: object) -> dict[str, Any]:
    """Returns the arguments of the constructor running in ``frame``, including its ``**kwargs``."""
    code = frame.f_code
    local = frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:count]
    if not _constructs(frame, owner):
        raise ConfigError(
            f"save_hyperparameters() was called in {code.co_name}(); call it in the __init__ whose arguments it keeps, "
            "or pass a dict of them"
        )
    values = {name: local[name] for name in names[1:] if name in local}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        # In co_varnames the name of *args comes before that of **kwargs.
        index = count + bool(code.co_flags & inspect.CO_VARARGS)
        values.update(local.get(code.co_varnames[index], {}))
    if code.co_name == "__post_init__" and dataclasses.is_dataclass(owner):
        fields = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner) if field.init}
        values = fields | values
    return values


def _selected(arguments: dict[str, Any], names: tuple[Any, ...]) -> dict[str, Any]:
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"save_hyperparameters() got a {type(name).__name__}; "
                "pass names of arguments, or one dict, Namespace or OmegaConf container"
            )
        if name not in arguments:
            known = ", ".join(repr(argument) for argument in arguments) or "none"
            raise ConfigError(
                f"save_hyperparameters({name!r}): __init__ has no argument of this name"
                f"{nearest(name, arguments)} (known: {known})"
            )
    return {name: arguments[name] for name in names} if names else arguments


def _is_outermost(frame: FrameType, owner: object) -> bool:
    """Returns whether ``frame`` runs the constructor of the object's own class, not of a base."""
    constructor = inspect.unwrap(getattr(type(owner), frame.f_code.co_name))
    return getattr(constructor, "__code__", None) is frame.f_code


class SavedHyperparameters(NamedTuple):
    """The hyper-parameters of an object, with the properties of :class:`HyperparametersMixin`."""

    values: Any
    name: str | None
    logged: bool
    private: bool


def saved_hyperparameters(owner: object) -> SavedHyperparameters:
    """Returns the hyper-parameters of ``owner``, a fabricamp or Lightning object.

    Lightning's name "kwargs" becomes None: it means that no single argument takes all of them.
    """
    if isinstance(owner, HyperparametersMixin):
        return SavedHyperparameters(
            owner.hparams, owner.hparams_name, owner.logs_hyperparameters, owner.hparams_private
        )
    values = getattr(owner, "hparams", {})
    name = getattr(owner, "_hparams_name", None)
    if name == "kwargs":
        name = None
    logged = bool(getattr(owner, "_log_hyperparams", False))
    return SavedHyperparameters(values, name, logged, _exposes_environment(values))


@dataclasses.dataclass(frozen=True)
class HyperparameterKeys:
    """The keys of an object's hyper-parameters in a checkpoint."""

    values: str
    types: str
    """The notes about the values' original types."""
    name: str
    """The name of the argument, if a single argument held all hyper-parameters."""

    def entries(self, owner: object, *, objects: bool = False) -> dict[str, Any]:
        """Returns the checkpoint entries of the ``owner``'s hyper-parameters; empty if there are none.

        With ``objects``, values without a plain form are the objects themselves.
        """
        saved = saved_hyperparameters(owner)
        if not saved.values:
            return {}
        values, notes = described(saved.values, private=saved.private, objects=objects)
        entries = {self.values: values, self.types: notes, self.name: saved.name}
        return {key: value for key, value in entries.items() if value}


MODULE = HyperparameterKeys("hyper_parameters", "hyper_parameter_types", "hparams_name")
DATA = HyperparameterKeys("datamodule_hyper_parameters", "datamodule_hyper_parameter_types", "datamodule_hparams_name")


class SettingRef:
    """A reference to an attribute or a hyper-parameter, such as the learning rate, to read and set it."""

    def __init__(self, owner: Any, name: str, *, by_key: bool) -> None:
        self._owner = owner
        self._name = name
        self._by_key = by_key

    @property
    def value(self) -> Any:
        """The current value."""
        return self._owner[self._name] if self._by_key else getattr(self._owner, self._name)

    @value.setter
    def value(self, value: Any) -> None:
        if self._by_key:
            self._owner[self._name] = value
        else:
            setattr(self._owner, self._name, value)


def setting_refs(name: str, *owners: Any) -> list[SettingRef]:
    """Returns references to every attribute and hyper-parameter ``name`` of ``owners``; an owner may be None."""
    refs = []
    for owner in owners:
        if owner is None:
            continue
        if hasattr(owner, name):
            refs.append(SettingRef(owner, name, by_key=False))
        if name in owner.hparams:
            refs.append(SettingRef(owner.hparams, name, by_key=True))
    return refs
