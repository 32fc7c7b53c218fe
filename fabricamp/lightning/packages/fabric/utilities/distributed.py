"""A sampler wrapper that divides samples among processes, and functions on the process group."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from fabricamp.lightning.packages.fabric.utilities.cloud_io import _is_local_file_protocol
from fabricamp.lightning.packages.fabric.utilities.types import ReduceOp as ReduceOp


def is_shared_filesystem(strategy: Any, path: Any = None, timeout: float = 3) -> bool:
    """Returns whether all processes see the same files in ``path``, by default the current folder; True for URLs.

    Every process has to call it: one writes a file, and the others look for it, for ``timeout`` seconds.
    """
    if not _distributed_is_initialized() or (path is not None and not _is_local_file_protocol(path)):
        return True
    given = Path.cwd() if path is None else Path(path).resolve()
    folder = given.parent if given.is_file() else given
    message: list[Any] = [None]
    with contextlib.ExitStack() as stack:
        if torch.distributed.get_rank() == 0:
            message[0] = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder)).name
        torch.distributed.broadcast_object_list(message)
        deadline = time.monotonic() + timeout
        while not Path(message[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        answers: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answers, Path(message[0]).exists())
    return all(answers)


def _distributed_is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _DatasetSamplerWrapper(Dataset[Any]):
    """A dataset of the values that a sampler yields."""

    def __init__(self, sampler: Any) -> None:
        if not hasattr(sampler, "__len__"):
            raise TypeError(
                f"{type(sampler).__name__} has no __len__, so it cannot be shared between processes; write one"
            )
        self._sampler = sampler
        self._values: list[Any] | None = None

    def __getitem__(self, index: int) -> Any:
        if self._values is None:
            self.reset()
        assert self._values is not None
        return self._values[index]

    def __len__(self) -> int:
        return len(self._sampler)

    def reset(self) -> None:
        """Iterates over the sampler again, and stores its values."""
        self._values = list(self._sampler)


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Divides the values of any sampler among the processes; shuffling is left to the sampler."""

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_DatasetSamplerWrapper(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the sampler again, and returns this process's share of its values."""
        wrapper: Any = self.dataset
        wrapper.reset()
        return (wrapper[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch here and in the sampler."""
        super().set_epoch(epoch)
        wrapper: Any = self.dataset
        if callable(getattr(wrapper._sampler, "set_epoch", None)):
            wrapper._sampler.set_epoch(epoch)
