"""Distributed samplers that repeat no sample, and a batch sampler that records the indices of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Self

import torch
from torch.utils.data import DistributedSampler

from fabricamp.lightning.packages.fabric.utilities.distributed import _DatasetSamplerWrapper


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """Gives each process every n-th sample, without repetitions: a process may have one sample more than another.

    For predictions: in training all processes need the same number of batches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} has no __len__; write one")
        self.total_size = len(self.dataset)
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        assert self.num_samples or not self.total_size, "fewer samples than processes: a process has none"

    def __iter__(self) -> Iterator[Any]:
        """Returns this process's indices, in the dataset's order or, with ``shuffle``, in a random order seeded by the epoch."""
        order = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(self.total_size, generator=generator, dtype=torch.int64, device="cpu").tolist()
        return iter(order[self.rank :: self.num_replicas])


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """Divides the values of any sampler among the processes, without repetitions."""

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_DatasetSamplerWrapper(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the sampler again, and returns this process's share of its values."""
        wrapper: Any = self.dataset
        wrapper.reset()
        return (wrapper[index] for index in super().__iter__())


class _IndexBatchSamplerWrapper:
    """A batch sampler that records the batches that it has yielded in ``seen_batch_indices``."""

    def __init__(self, batch_sampler: Any) -> None:
        vars(self).update(vars(batch_sampler))
        self.seen_batch_indices: list[list[int]] = []
        self._batch_sampler = batch_sampler
        self._iterator: Iterator[list[int]] | None = None

    def __next__(self) -> list[int]:
        assert self._iterator is not None
        batch = next(self._iterator)
        self.seen_batch_indices.append(batch)
        return batch

    def __iter__(self) -> Self:
        self.seen_batch_indices = []
        self._iterator = iter(self._batch_sampler)
        return self

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None}
