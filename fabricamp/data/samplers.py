"""Which samples a rank reads, and in what order: pure functions of (seed, epoch, rank)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["EvalSampler", "TrainSampler"]

_CHUNK = 1 << 16
"""Indices turned into Python integers at a time: a list of all of them takes five times the memory of the tensor."""


class TrainSampler(Sampler[int]):
    """This rank's share of an epoch: torch ``DistributedSampler``'s order, which a resumed run can enter at any place.

    Every rank gets the same number of samples: the first ones are repeated at the end, or (``drop_last``) the last ones
    left out.  ``start`` is how many of this rank's samples the next iteration leaves out (and ``len``, until then); no
    data is read for them.
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
    ) -> None:
        self.dataset_size = dataset_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.start = 0
        rounding = 0 if drop_last else world_size - 1
        self._num_samples = (dataset_size + rounding) // world_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(self._num_samples - self.start, 0)

    def __iter__(self) -> Iterator[int]:
        indices = self._indices()[self.start :]
        self.start = 0
        return itertools.chain.from_iterable(chunk.tolist() for chunk in torch.split(indices, _CHUNK))

    def _indices(self) -> Tensor:
        """This rank's samples of the whole epoch, int64."""
        places = torch.arange(self._num_samples) * self.world_size + self.rank
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
