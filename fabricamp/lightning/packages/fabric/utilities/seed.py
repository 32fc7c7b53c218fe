"""Functions that seed the random generators, and read and restore their states."""

from __future__ import annotations

import os
from typing import Any

import torch

from fabricamp.rng import capture_rng, restore_rng, seed_worker
from fabricamp.rng import seed_everything as seed_everything
from fabricamp.utilities.rank_zero import rank_zero_only

max_seed_value = 2**32 - 1
min_seed_value = 0


def reset_seed() -> None:
    """Seeds again with the seed of the last ``seed_everything``; does nothing if there was no such call."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is not None:
        seed_everything(int(seed), workers=os.environ.get("PL_SEED_WORKERS", "0") == "1", verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seeds Python's and NumPy's generators in a loader's worker, differently in each worker and rank."""
    own_rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    seed_worker(worker_id, own_rank if rank is None else rank)


def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    state = capture_rng()
    return state if include_cuda or not torch.cuda.is_available() else {**state, "cuda": []}


def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
    restore_rng(rng_state_dict)
