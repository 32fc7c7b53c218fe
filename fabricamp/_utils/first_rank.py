"""The rank that this process was started as, for rank zero functions, known before a Trainer sets up its environment."""

from __future__ import annotations

import os
from typing import Final

from lightning_utilities.core.rank_zero import rank_zero_only

STARTED_BY: Final = "FABRICAMP_STARTED_BY"
"""Variable with the start method, set in workers that fabricamp started itself."""


def started_rank() -> int:
    """Returns the rank that torchrun, SLURM or a Trainer started this process as; 0 if none of them did."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


if getattr(rank_zero_only, "rank", None) is None:
    # The functions of lightning-utilities refuse to run until the rank is set, and scripts import them from there too.
    rank_zero_only.rank = started_rank()  # type: ignore[attr-defined]
