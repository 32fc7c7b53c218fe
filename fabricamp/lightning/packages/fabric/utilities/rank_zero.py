"""Functions that run, log or warn on rank zero only, and this process's rank."""

from __future__ import annotations

import os

from fabricamp.utilities.rank_zero import WarningCache as WarningCache
from fabricamp.utilities.rank_zero import rank_prefixed_message as rank_prefixed_message
from fabricamp.utilities.rank_zero import rank_zero_debug as rank_zero_debug
from fabricamp.utilities.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from fabricamp.utilities.rank_zero import rank_zero_info as rank_zero_info
from fabricamp.utilities.rank_zero import rank_zero_only as rank_zero_only
from fabricamp.utilities.rank_zero import rank_zero_warn as rank_zero_warn


class LightningDeprecationWarning(DeprecationWarning):
    """A deprecation warning."""


def _get_rank() -> int | None:
    """Returns the rank of this process from the environment variables; None if none of them is set."""
    # LOCAL_RANK before SLURM's variable, which is set in a job even if SLURM does not start the processes.
    found = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    return next((int(rank) for rank in found if rank is not None), None)
