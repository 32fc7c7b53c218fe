"""Replacements for loggers and their ``experiment`` where nothing is to be logged: calls do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fabricamp.loggers.base import Logger
from fabricamp.loggers.run_folder import writes


class Silent:
    """Accepts any call and does nothing; results of calls, attributes and items are such objects too."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        """Does nothing."""
        return self

    def __getitem__(self, key: object) -> Silent:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Keeps nothing."""


class DummyLogger(Logger):
    """Logs nothing, and accepts the calls of any other logger; used by ``fast_dev_run``."""

    @property
    def experiment(self) -> Any:
        """An object that accepts any call."""
        return Silent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Silent()


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorates a logger's ``experiment``, below ``@property``: on ranks other than 0, calls on the result do nothing."""

    @functools.wraps(experiment)
    def on_rank_zero(logger: Any) -> Any:
        return experiment(logger) if writes() else Silent()

    return on_rank_zero
