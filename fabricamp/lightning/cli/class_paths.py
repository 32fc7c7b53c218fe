"""Class paths under Lightning's names: a configuration that a run writes names the classes that the program imports."""

from __future__ import annotations

import importlib
from typing import Any, Final

from jsonargparse import Namespace

from fabricamp.lightning import aliases, names
from fabricamp.loggers.run_folder import DefaultName, name_of_runs

_OWN: Final = "fabricamp."


def lightnings_names(config: Namespace) -> Namespace:
    """Returns a copy of ``config`` with Lightning's paths of fabricamp's classes, where there are any, and its folder of runs.

    The copy starts a run under Lightning too, as far as Lightning has the arguments.
    """
    renamed: Namespace = _renamed(config.clone())
    return renamed


def _renamed(value: Any) -> Any:
    if isinstance(value, Namespace):
        for key, one in vars(value).items():
            is_path = key == "class_path" and isinstance(one, str)
            setattr(value, key, _lightnings_path(one) if is_path else _renamed(one))
    elif isinstance(value, list):
        value[:] = map(_renamed, value)
    elif isinstance(value, DefaultName):
        return name_of_runs(value)
    return value


def _lightnings_path(path: str) -> str:
    """Returns ``lightning.pytorch.callbacks.Timer`` for ``fabricamp.callbacks.Timer``; ``path`` if Lightning has no such name."""
    if not (path.startswith(_OWN) and names.is_installed()):
        return path
    inner = f"{aliases.HOME}."
    name = (
        f"lightning.{path.removeprefix(inner)}"
        if path.startswith(inner)
        else f"lightning.pytorch.{path.removeprefix(_OWN)}"
    )
    return name if (found := _found(name)) is not None and found is _found(path) else path


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:  # no module of Lightning's name, or another package in its place
        return None
