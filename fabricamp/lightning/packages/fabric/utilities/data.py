"""Lengths of loaders, and numbers of workers."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import IterableDataset

from fabricamp.utilities import AttributeDict as AttributeDict
from fabricamp.utilities.rank_zero import rank_zero_warn


def has_iterable_dataset(dataloader: object) -> bool:
    """Returns whether a loader's dataset is an ``IterableDataset``."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: Any) -> int | None:
    """Returns the length, or None if there is none."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: object) -> bool:
    """Returns whether the loader has a length; warns if it is 0."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"{type(dataloader).__name__} has a length of 0")
    return length is not None


def suggested_max_num_workers(local_world_size: int) -> int:
    """Returns the CPU cores per process, for ``local_world_size`` processes, minus one for the process itself; at least 1."""
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size} is not a number of processes; give 1 or more")
    return max(1, _num_cpus_available() // local_world_size - 1)


def _num_cpus_available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of the loader's sampler and of its batch sampler's sampler, once each."""
    found = (getattr(dataloader, "sampler", None), getattr(getattr(dataloader, "batch_sampler", None), "sampler", None))
    for sampler in {id(one): one for one in found}.values():
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
