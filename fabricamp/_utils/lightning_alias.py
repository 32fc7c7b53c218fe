"""Records whether this process has fabricamp under Lightning's names (``python -m fabricamp.lightning``); logs differences."""

from __future__ import annotations

import logging

from fabricamp._utils.first_rank import started_rank
from fabricamp._utils.say_once import say_once

_installed = False


def note_installed() -> None:
    """Called when the import hook for Lightning's names is installed."""
    global _installed  # noqa: PLW0603 - a process has one import system
    _installed = True


def is_installed() -> bool:
    """Returns whether the program was written for Lightning and imports its names.

    Such a program gets Lightning's results, also where fabricamp's own differ on purpose.
    """
    return _installed


def say_difference(message: str) -> None:
    """Logs once, on rank 0 of a program written for Lightning, why its results differ from Lightning's."""
    if _installed and started_rank() == 0:
        say_once(f"{message} (fabricamp help from-lightning)", logging.INFO)
