"""Which rank this process was started as: what is known before a Trainer takes its place among the processes."""

from __future__ import annotations

import os

from lightning_utilities.core.rank_zero import rank_zero_only


def started_rank() -> int:
    """Returns the rank that torchrun, SLURM or a Trainer started this process as; 0 where none did."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


if getattr(rank_zero_only, "rank", None) is None:
    # lightning-utilities' own functions, which scripts import from there too, refuse to run until it is set.
    rank_zero_only.rank = started_rank()  # type: ignore[attr-defined]
