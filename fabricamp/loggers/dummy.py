"""What stands in the place of loggers where nothing is to be logged: calls for them do nothing."""

from __future__ import annotations

from typing import Any

from fabricamp.loggers.base import Logger


class Silent:
    """Takes any call and does nothing; what a call returns, and what an attribute holds, is such an object too."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        """Does nothing."""
        return self

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keeps nothing."""


class DummyLogger(Logger):
    """A logger that logs nothing, and takes what any other would: of ``fast_dev_run``."""

    @property
    def experiment(self) -> Any:
        """Takes any call."""
        return Silent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Silent()
