"""The error messages for names that Lightning has and fabricamp does not, and for objects of an installed Lightning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Final

from fabricamp.arguments.migration import not_offered, not_offered_paths
from fabricamp.errors import nearest


def words_for(name: str) -> str | None:
    """Returns the message that ``name``, such as "fabricamp.loops", is not offered and what to do instead; None for other names."""
    below = name.removeprefix("fabricamp.")
    below = not_offered_paths().get(below, below)
    words = not_offered().get(below)
    if words is None:
        return None
    return f"Lightning's {below} is not offered by fabricamp: {words} (fabricamp help from-lightning)"


_PARTS: Final = ("callbacks", "loggers", "profilers", "strategies", "tuner")
_HOMES: Final = ("fabricamp", *(f"fabricamp.{part}" for part in _PARTS))
"""The packages that have classes with Lightning's names."""

_LIGHTNING: Final = ("lightning", "pytorch_lightning", "lightning_fabric")


def lightnings(value: object) -> str | None:
    """Returns the message for an object or class that is, or derives from, one of Lightning's; None for any other."""
    kind = value if isinstance(value, type) else type(value)
    bases = [one for one in kind.__mro__ if one.__module__.split(".")[0] in _LIGHTNING]
    if not bases:
        return None
    for base in bases:
        path = next((path for path in _HOMES if base.__name__ in importlib.import_module(path).__all__), None)
        if path is not None:
            whose = "is Lightning's" if base is kind else f"derives from Lightning's {base.__name__}"
            return f"{kind.__name__} {whose}; change the import: from {path} import {base.__name__}"
        section = base.__module__.split(".")[2:3]
        if words := words_for(".".join([*section, base.__name__])):
            return words
    return f"{kind.__name__} is Lightning's, of {bases[0].__module__}, and is not known here (fabricamp help from-lightning)"


def is_lightnings(value: object) -> bool:
    """Returns whether the class of ``value`` is, or derives from, one of Lightning's."""
    return any(one.__module__.split(".")[0] in _LIGHTNING for one in type(value).__mro__)


def mixed_with_lightnings_trainer(callback: str) -> str:
    """Returns the message for Lightning's Trainer that got fabricamp's callback class named ``callback``."""
    home = importlib.import_module("fabricamp.callbacks")
    own = "fabricamp.callbacks" if callback in home.__all__ else "fabricamp"
    theirs = sys.modules.get("lightning.pytorch.callbacks") or sys.modules.get("pytorch_lightning.callbacks")
    other = ""
    if theirs is not None and hasattr(theirs, callback):
        other = f", or {callback} of Lightning: from {theirs.__name__} import {callback}"
    return (
        f"{callback} of {own} was given to Lightning's Trainer, and both have to come from one package; change the import of "
        f"the Trainer: from fabricamp import Trainer (and of the module: LightningModule){other}"
    )


def refuse_import(name: str) -> None:
    """Raises :class:`ModuleNotFoundError` if the module ``name``, which no other finder has found, is not offered."""
    words = words_for(name)
    # A caller of importlib.util.find_spec only asks whether the module exists, and expects None.
    if words is None or sys._getframe(3).f_globals.get("__name__") == "importlib.util":
        return
    # The error has another name than the module: `from fabricamp.callbacks import Timer` swallows an error of the module's name.
    raise ModuleNotFoundError(words, name=name.removeprefix("fabricamp."))


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the AttributeError for a name that ``module`` does not have."""
    words = words_for(f"{module}.{name}".removeprefix("fabricamp."))
    return AttributeError(words or f"module {module!r} has no attribute {name!r}{nearest(name, known)}")


def part_of(package: str, name: str, known: Iterable[str] = ()) -> ModuleType:
    """Imports and returns the module ``package.name``; raises AttributeError if there is none.

    Packages call it on attribute access, because Lightning's packages import their submodules.
    """
    if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
        return importlib.import_module(f"{package}.{name}")
    raise missing(package, name, known)
