"""A batch sampler that groups samples of similar length, to save padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from fabricamp._utils.keywords import NamesKeywords
from fabricamp.arguments.checks import check_count, check_number
from fabricamp.errors import ConfigError


class LengthGroups(NamesKeywords, Sampler[list[int]]):
    """A batch sampler for samples of different lengths: ``DataLoader(dataset, batch_sampler=LengthGroups(lengths, ...))``.

    Shuffles the samples, sorts them by length within groups of ``group`` batches, cuts them into batches, and shuffles the
    batches.  The order follows from (seed, epoch).  The Trainer gives each rank the same number of batches, and a resumed run
    continues in the same order.

    Args:
        lengths: the length of each sample.
        batch_size: number of samples in a batch; or
        max_tokens: the largest size of a padded batch: its number of samples times its longest length.
        group: number of batches that are sorted together; a larger number saves padding, a smaller one shuffles better.
        shuffle: False keeps samples of equal length, and batches, in order.
        drop_last: leaves out batches of fewer than ``batch_size`` samples.
        seed: the seed of the order.

    Raises:
        ConfigError: unless exactly one of ``batch_size`` and ``max_tokens`` is given; for a sample longer than ``max_tokens``.

    Example:
        >>> sorted(map(sorted, LengthGroups([3, 9, 4, 8], batch_size=2)))
        [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        group: int = 50,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.lengths = [int(length) for length in lengths]
        if (batch_size is None) == (max_tokens is None):
            raise ConfigError(
                f"LengthGroups(batch_size={batch_size}, max_tokens={max_tokens}): give one of them: the samples of a batch, or "
                "the most tokens of a padded batch"
            )
        self.batch_size = check_count("batch_size", batch_size, owner="LengthGroups", least=1, optional=True)
        self._max_tokens = check_count("max_tokens", max_tokens, owner="LengthGroups", least=1, optional=True)
        self._group = check_number("group", group, owner="LengthGroups", least=1)
        if self._max_tokens is not None and self.lengths and max(self.lengths) > self._max_tokens:
            longest = self.lengths.index(max(self.lengths))
            raise ConfigError(
                f"LengthGroups: sample {longest} is {self.lengths[longest]} long, more than max_tokens={max_tokens}; leave it out, "
                "cut it, or allow more"
            )
        self.shuffle = shuffle
        """Whether each epoch has a different order."""
        self._drop_last = drop_last
        self._seed = seed
        self._epoch = 0
        self.start = 0
        """Number of batches, of all ranks together, that the next iteration skips; ``len`` leaves them out until then, too."""
        self.rank = 0
        self.num_replicas = 1
        self._even = False
        self._planned: tuple[int, list[list[int]]] | None = None

    def share_out(self, rank: int, world_size: int, *, train: bool) -> None:
        """Sets this rank's share; called by the Trainer.  With ``train``, every rank gets the same number of batches."""
        self.rank = rank
        self.num_replicas = world_size
        self._even = train

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._own())

    def __iter__(self) -> Iterator[list[int]]:
        own = self._own()
        self.start = 0
        return iter(own)

    def _own(self) -> list[list[int]]:
        """Returns this rank's batches; in training, the epoch's first batches are repeated until all ranks have equally many."""
        if self._planned is None or self._planned[0] != self._epoch:
            self._planned = (self._epoch, self._batches())
        batches = self._planned[1]
        ranks = self.num_replicas
        left = max(len(batches) - self.start, 0)
        if self._even:
            left = -(-left // ranks) * ranks  # rounded up
        return list(itertools.islice(itertools.cycle(batches), self.start + self.rank, self.start + left, ranks))

    def _batches(self) -> list[list[int]]:
        count = len(self.lengths)
        generator = torch.Generator("cpu").manual_seed(self._seed + self._epoch)
        order = _permuted(count, generator) if self.shuffle else list(range(count))
        # With max_tokens, the number of samples of a batch of average length.
        batch_size = self.batch_size or max(1, (self._max_tokens or 1) * count // max(sum(self.lengths), 1))
        samples = self._group * batch_size
        batches: list[list[int]] = []
        for first in range(0, count, samples):
            batches += self._cut(sorted(order[first : first + samples], key=self.lengths.__getitem__))
        if self._drop_last and self.batch_size is not None:
            batches = [batch for batch in batches if len(batch) == self.batch_size]
        if not self.shuffle:
            return batches
        return [batches[index] for index in _permuted(len(batches), generator)]

    def _cut(self, samples: list[int]) -> Iterator[list[int]]:
        """Yields batches of ``samples``, which are sorted by length, shortest first."""
        if self.batch_size is not None:
            for first in range(0, len(samples), self.batch_size):
                yield samples[first : first + self.batch_size]
            return
        batch: list[int] = []
        for sample in samples:
            # Sorted by length, so this sample would be the longest: the others are padded to it.
            if batch and (len(batch) + 1) * self.lengths[sample] > (self._max_tokens or 0):
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch


def _permuted(count: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu").tolist()
    return order
