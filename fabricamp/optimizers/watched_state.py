"""Optimizer state that counts its changes, so that a step knows at once whether anybody has replaced a tensor in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Changes:
    """How often a state and what it holds were written to; apart from both, which so have no way to each other."""

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
    """A dict whose every change is counted."""

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
    """The state of one parameter; copies and pickles of it are plain dicts."""

    def __init__(self, entries: dict[str, Any], changes: Changes) -> None:
        self.changes = changes
        super().__init__(entries)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


class WatchedState(_Counts, defaultdict[Any, Any]):
    """The state of an optimizer; copies and pickles of it are plain."""

    def __init__(self, *args: Any) -> None:
        self.changes = Changes()
        super().__init__(*args)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def watched(state: Any) -> WatchedState:
    """Returns ``state`` so that it counts its changes: itself where it does, else a copy with the same tensors."""
    own = state if type(state) is WatchedState else WatchedState(dict, state)
    for key, entry in own.items():
        if isinstance(entry, dict) and getattr(entry, "changes", None) is not own.changes:
            own[key] = ParameterState(entry, own.changes)
    return own
