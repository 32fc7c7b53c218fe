"""Registration of classes and of callbacks from entry points."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from lightning_utilities import is_overridden


def _load_external_callbacks(group: str) -> list[Any]:
    """Returns the callbacks that the functions of an entry-point group return."""
    made = [point.load()() for point in entry_points(group=group)]
    return [one for part in made for one in (part if isinstance(part, list) else [part])]


def _register_classes(registry: Any, method: str, module: ModuleType, parent: type) -> None:
    """Calls ``method`` of each class in ``module`` that derives from ``parent`` and overrides it."""
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if issubclass(kind, parent) and hasattr(parent, method) and is_overridden(method, kind, parent):
            getattr(kind, method)(registry)
