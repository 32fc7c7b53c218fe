"""Which samples a rank reads, and in what order: pure functions of (seed, epoch, rank)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["EvalSampler", "TrainSampler"]

_CHUNK = 1 << 16
"""Indices turned into Python integers at a time: a list of all of them takes five times the memory of the tensor."""


class TrainSampler(Sampler[Any]):
    """This rank's share of an epoch: torch ``DistributedSampler``'s order, which a resumed run can enter at any place.

    Every rank gets the same number of samples: the first ones are repeated at the end, or (``drop_last``) the last ones
    left out.  ``start`` is how many samples, those of all ranks together, the next iteration leaves out (and ``len``, until
    then); no data is read for them.  It may be any number, so another number of ranks can go on in the same order.
    With ``tags_epoch`` each index comes as (epoch, index): for :class:`SeededDataset`.
    """

    def __init__(
        self,
        dataset_size: int,
        *,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        tags_epoch: bool = False,
    ) -> None:
        self.dataset_size = dataset_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.tags_epoch = tags_epoch
        self.epoch = 0
        self.start = 0
        self._rounding = 0 if drop_last else world_size - 1

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(self.dataset_size - self.start + self._rounding, 0) // self.world_size

    def __iter__(self) -> Iterator[Any]:
        indices = self._indices()
        self.start = 0
        plain = itertools.chain.from_iterable(chunk.tolist() for chunk in torch.split(indices, _CHUNK))
        return zip(itertools.repeat(self.epoch), plain, strict=False) if self.tags_epoch else plain

    def _indices(self) -> Tensor:
        """This rank's samples of the epoch from ``start`` on, int64."""
        places = torch.arange(len(self)) * self.world_size + self.start + self.rank
        if self.dataset_size > 0:
            places %= self.dataset_size
        if not self.shuffle:
            return places
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.dataset_size, generator=generator)[places]


class EvalSampler(Sampler[int]):
    """This rank's share of an evaluation, in order: each sample is on one rank; one rank may get one less than another."""

    def __init__(self, dataset_size: int, *, rank: int, world_size: int) -> None:
        self.dataset_size = dataset_size
        self._indices = range(rank, dataset_size, world_size)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)
