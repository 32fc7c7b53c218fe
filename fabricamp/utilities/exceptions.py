"""Lightning's names of errors."""

from __future__ import annotations

from fabricamp.errors import ConfigError as MisconfigurationException


class SIGTERMException(SystemExit):
    """Raised in Lightning when SIGTERM has ended a run; a name for ``except`` and ``isinstance``.

    Here the run saves a checkpoint, ``on_exception`` gets a KeyboardInterrupt, and the process exits with code 143.
    """


class _TunerExitException(Exception):  # noqa: N818 - Lightning's name
    """Raised in Lightning to end a search; a name for ``except``."""


__all__ = ["MisconfigurationException", "SIGTERMException"]
