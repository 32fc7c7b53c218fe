"""Lightning's path to the base class of loggers, and to a decorator for their ``experiment``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fabricamp.loggers.base import Logger as Logger
from fabricamp.loggers.dummy import DummyLogger as DummyLogger
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.run_folder import writes


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorates a logger's ``experiment``, below ``@property``: on ranks other than 0, calls on the result do nothing."""

    @functools.wraps(experiment)
    def on_rank_zero(logger: Any) -> Any:
        return experiment(logger) if writes() else Silent()

    return on_rank_zero
