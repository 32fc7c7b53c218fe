"""Refuses classes that override a private method of Lightning: fabricamp would silently never call it."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Iterable, Iterator
from importlib import resources
from types import CodeType, FunctionType
from typing import Any, Final, NoReturn

from fabricamp.errors import ConfigError
from fabricamp.habits import habits

_HONOURED: Final = ("EarlyStopping", "ModelCheckpoint")
"""Classes that call Lightning's private methods as Lightning does."""

_LIGHTNINGS_NAMES: Final = {
    "DDP": "DDPStrategy",
    "DataModule": "LightningDataModule",
    "TrainingModule": "LightningModule",
}
_OURS: Final = "fabricamp"
_OTHERS: Final = ("builtins", "torch")  # they define no method of Lightning


@functools.cache
def _methods() -> dict[str, list[str]]:
    text = resources.files(__package__).joinpath("lightning_methods.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def refuse_private_methods(kind: type) -> None:
    """Makes it an error to construct a class of a program that overrides a private method of Lightning that nothing here calls.

    To define it is none, as in a library that a program imports for other classes.

    Private names that Lightning does not have are allowed.  A name that another method of the program's classes calls is allowed
    too, because the method runs then.  It is still refused in a program written for Lightning, which may rely on Lightning's calls.
    """
    packages = {base: base.__module__.partition(".")[0] for base in kind.__mro__}
    if packages[kind] == _OURS:
        return
    of_program = [base for base in kind.__mro__ if packages[base] != _OURS and packages[base] not in _OTHERS]
    private: dict[str, type] = {}
    for base in of_program:
        for name, value in vars(base).items():
            if name.startswith("_") and not name.startswith("__") and hasattr(value, "__get__"):
                private.setdefault(name, base)
    if not private:
        return
    for base in kind.__mro__:
        if packages[base] != _OURS or base.__name__ in _HONOURED:
            continue
        lightnings = _LIGHTNINGS_NAMES.get(base.__name__, base.__name__)
        for name in _methods().get(lightnings, ()):
            if name in private and (habits().private_names_are_lightnings or not _calls(of_program, name)):
                kind.__new__ = _refusing(  # type: ignore[method-assign]
                    f"{private[name].__qualname__}.{name} overrides a private method of Lightning's {lightnings}, which fabricamp "
                    "never calls: use a public method or a hook instead; if the method is your own, give it another name"
                )
                return


def _refusing(message: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(message)

    return refuse


def _calls(kinds: Iterable[type], name: str) -> bool:
    """Returns whether a method of these classes, other than ``name`` itself, names it."""
    return any(
        name in _names_in(code)
        for kind in kinds
        for other, value in vars(kind).items()
        if other != name
        for code in _codes_of(value)
    )


def _codes_of(value: object) -> Iterator[CodeType]:
    parts = [getattr(value, part, None) for part in ("__func__", "func", "fget", "fset")]
    for part in (value, *parts):
        function = inspect.unwrap(part) if callable(part) else None
        if isinstance(function, FunctionType):
            yield function.__code__


def _names_in(code: CodeType) -> set[str]:
    within = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*within)
