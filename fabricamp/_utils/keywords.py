"""Checks the keywords of constructors: unknown ones raise an error with a hint, and OmegaConf's containers become Python's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar

from fabricamp._utils.containers import own_containers
from fabricamp.arguments.private_methods import refuse_private_methods
from fabricamp.errors import UnknownArgumentError, advice, meant, nearest

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class NamesKeywords:
    """Makes constructors of subclasses raise :class:`UnknownArgumentError`: Python's TypeError has no hint, and may name a parent.

    Also refuses subclasses that override private methods of Lightning.
    Signatures, docstrings and pickles of the classes stay the same, and so do all other errors of a constructor.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_private_methods(cls)
        if "__init__" in vars(cls):
            cls.__init__ = _refusing(cls, cls.__init__)  # type: ignore[method-assign]  # the same signature


def names_keywords(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorates a method: an unknown keyword raises :class:`UnknownArgumentError` with the nearest known keyword."""
    known = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def called(*args: _Given.args, **given: _Given.kwargs) -> _Result:
        refuse_others(method.__name__, given, known)
        return method(*args, **given)

    return called


def refuse_others(called: str, given: Iterable[str], known: list[str]) -> None:
    """Raises :class:`UnknownArgumentError` for the first name of ``given`` not in ``known``; the message names ``called``."""
    for name in given:
        if name not in known:
            raise UnknownArgumentError(f"{called} has no argument {name!r}{advice(called, name, known)}")


def _refusing(owner: type, init: Callable[..., None]) -> Callable[..., None]:
    converts = owner.__module__.startswith("fabricamp.")  # a user's class may want OmegaConf's containers as they are

    @functools.wraps(init)
    def initialize(self: object, *args: Any, **given: Any) -> None:
        if converts:
            args = tuple(map(own_containers, args))
            given = {name: own_containers(value) for name, value in given.items()}
        try:
            init(self, *args, **given)
        except TypeError:
            _refuse_unknown(type(self), owner, init, given)
            raise

    return initialize


def _refuse_unknown(kind: type, owner: type, init: Callable[..., None], given: dict[str, Any]) -> None:
    """Raises for the first name of ``given`` that ``init`` of ``owner`` does not take; the message names the called class."""
    if _takes_any(init):
        return
    unknown = [name for name in given if name not in _keywords(init)]
    if not unknown:
        return
    inits = list(_inits(kind, owner))
    if all(map(_takes_any, inits)):
        known = [name for each_init in (*inits, init) for name in _keywords(each_init)]
    else:  # the called class, not its caller, chose the keyword and passed it on
        kind = owner
        known = list(_keywords(init))
    name = unknown[0]
    by_meaning = (meant(base.__name__, name, given[name]) for base in kind.__mro__)
    cure = next(filter(None, by_meaning), nearest(name, known)) or f" (known: {', '.join(known)})"
    raise UnknownArgumentError(f"{kind.__name__} has no argument {name!r}{cure}") from None


def _inits(kind: type, owner: type) -> Iterator[Callable[..., None]]:
    """Yields the constructors of ``kind`` and of its parents, up to ``owner`` and without it."""
    for base in kind.__mro__:
        if base is owner:
            return
        if "__init__" in vars(base):
            yield vars(base)["__init__"]


def _takes_any(init: Callable[..., None]) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in inspect.signature(init).parameters.values())


def _keywords(init: Callable[..., None]) -> Iterator[str]:
    parameters = list(inspect.signature(init).parameters.values())[1:]
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return (parameter.name for parameter in parameters if parameter.kind in kinds)
