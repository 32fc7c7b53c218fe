"""What is done, said or warned of on rank 0 only: lightning-utilities' own functions, told which rank this is."""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning_utilities.core.rank_zero import (
    WarningCache,
    rank_prefixed_message,
    rank_zero_deprecation,
    rank_zero_only,
    rank_zero_warn,
)

__all__ = [
    "WarningCache",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

_LOG = logging.getLogger(__name__)


class _UntilConfigured(logging.StreamHandler[Any]):
    """Shows messages on stderr as long as nobody has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


_LOG.addHandler(_UntilConfigured())
_LOG.setLevel(logging.INFO)

if getattr(rank_zero_only, "rank", None) is None:
    # Before a Trainer takes its place among the processes, which sets it: as torchrun, SLURM or a Trainer started this one.
    rank_zero_only.rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)  # type: ignore[attr-defined]


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 3, **options: Any) -> None:
    """Logs a message on rank 0, on stderr where logging is not configured; arguments are those of ``logging.info``."""
    _LOG.info(*args, stacklevel=stacklevel, **options)


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 3, **options: Any) -> None:
    """Logs a message on rank 0 that is shown where the level of this module's logger is set to DEBUG."""
    _LOG.debug(*args, stacklevel=stacklevel, **options)
