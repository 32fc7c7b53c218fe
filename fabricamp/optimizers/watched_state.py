"""Optimizer state that counts its changes, so that a step sees at once whether a tensor in the state may have been replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Changes:
    """Counts the writes to a state and its entries; an object of its own, so that an entry needs no reference to the state."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def _counted(name: str) -> Any:
    method: Callable[..., Any] = getattr(dict, name)

    def change(self: Any, *args: Any, **options: Any) -> Any:
        self.changes.count += 1
        return method(self, *args, **options)

    change.__name__ = name
    return change


class _Counts:
    """Mixin for a dict: counts every change."""

    changes: Changes
    __setitem__ = _counted("__setitem__")
    __delitem__ = _counted("__delitem__")
    __ior__ = _counted("__ior__")
    clear = _counted("clear")
    pop = _counted("pop")
    popitem = _counted("popitem")
    setdefault = _counted("setdefault")
    update = _counted("update")


class ParameterState(_Counts, dict[str, Any]):
    """The state of one parameter; its copies and pickles are plain dicts."""

    def __init__(self, entries: dict[str, Any], changes: Changes) -> None:
        self.changes = changes
        super().__init__(entries)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


class WatchedState(_Counts, defaultdict[Any, Any]):
    """The state of an optimizer; its copies and pickles are plain defaultdicts."""

    def __init__(self, *args: Any) -> None:
        self.changes = Changes()
        super().__init__(*args)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def watched(state: Any) -> WatchedState:
    """Returns ``state`` itself if it counts its changes, else a counting copy with the same tensors."""
    own = state if type(state) is WatchedState else WatchedState(dict, state)
    for key, entry in own.items():
        if isinstance(entry, dict) and getattr(entry, "changes", None) is not own.changes:
            own[key] = ParameterState(entry, own.changes)
    return own
