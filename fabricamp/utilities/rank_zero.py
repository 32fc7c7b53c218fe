"""What is done, said or warned of on rank 0 only: lightning-utilities' own functions, told which rank this is."""

from __future__ import annotations

import logging
from typing import Any

from lightning_utilities.core.rank_zero import WarningCache as WarningCache
from lightning_utilities.core.rank_zero import rank_prefixed_message as rank_prefixed_message
from lightning_utilities.core.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn as rank_zero_warn

import fabricamp.first_rank  # noqa: F401 - sets the rank that these functions look at

_LOG = logging.getLogger(__name__)


class _UntilConfigured(logging.StreamHandler[Any]):
    """Shows messages on stderr as long as nobody has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


_LOG.addHandler(_UntilConfigured())
_LOG.setLevel(logging.INFO)


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 3, **options: Any) -> None:
    """Logs a message on rank 0, on stderr where logging is not configured; arguments are those of ``logging.info``."""
    _LOG.info(*args, stacklevel=stacklevel, **options)


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 3, **options: Any) -> None:
    """Logs a message on rank 0 that is shown where the level of this module's logger is set to DEBUG."""
    _LOG.debug(*args, stacklevel=stacklevel, **options)
