"""Messages that a process logs at most once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("fabricamp")


@functools.cache
def say_once(message: str, level: int = logging.WARNING) -> None:
    """Logs ``message``, unless this process has logged it before."""
    logger.log(level, message)
