"""Separates the random numbers of loggers' packages from the run's."""

from __future__ import annotations

import random
import sys

_NUMBERS = random.SystemRandom()


def give_numbers_of_its_own(*packages: str) -> None:
    """Makes the loaded modules of these packages use the system's random generator instead of Python's.

    Their threads and ours consume random numbers at any time, for names and for the pauses between attempts.  Python's generator
    belongs to the run: each such draw would change the user's next random numbers.  A resumed or seeded run would also generate
    the names of the previous run again.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "__dict__", {}).get("random") is random:
            module.random = _NUMBERS  # type: ignore[attr-defined]
