"""Functions that run, log or warn on rank zero only: those of lightning-utilities, with the rank set."""

from __future__ import annotations

import logging
from typing import Any

from lightning_utilities.core.rank_zero import WarningCache as WarningCache
from lightning_utilities.core.rank_zero import rank_prefixed_message as rank_prefixed_message
from lightning_utilities.core.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn as rank_zero_warn

import fabricamp._utils.first_rank  # noqa: F401 - sets the rank that these functions read

_LOG = logging.getLogger("fabricamp")


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 3, **options: Any) -> None:
    """Logs a message on rank 0 through logger ``fabricamp``; arguments are those of ``logging.info``."""
    _LOG.info(*args, stacklevel=stacklevel, **options)


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 3, **options: Any) -> None:
    """Logs a message on rank 0 through logger ``fabricamp`` at level DEBUG."""
    _LOG.debug(*args, stacklevel=stacklevel, **options)
