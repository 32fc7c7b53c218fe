"""Random numbers of a logger's package, which are not the run's."""

from __future__ import annotations

import random
import sys

_NUMBERS = random.SystemRandom()


def give_numbers_of_its_own(*packages: str) -> None:
    """Lets the loaded modules of these packages draw from the system what they draw from Python's generator.

    Their threads and ours draw at any time, for names and for the pauses between attempts, and that generator is the run's: each
    draw would change what a user's code draws next.  A run that was resumed or seeded would also draw the names of the run before.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "__dict__", {}).get("random") is random:
            module.random = _NUMBERS  # type: ignore[attr-defined]
