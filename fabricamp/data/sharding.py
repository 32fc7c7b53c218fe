"""Sharding of streams among ranks and workers, and a check for ranks or workers that read the same samples."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabricamp._utils.containers import tensors_within
from fabricamp._utils.keywords import NamesKeywords
from fabricamp.data.feed import Feed
from fabricamp.errors import ConfigError
from fabricamp.strategies.base import Strategy


class Sharded(NamesKeywords, IterableDataset[Any]):
    """A stream that is sharded among all workers of all ranks, each sample to exactly one of them.

    Each worker reads the complete stream and keeps one sample of every round; the stream must have the same order everywhere.  In
    training, an incomplete last round is left out, so that all workers get the same number of samples; validation sees every
    sample.  A stream that shards itself (WebDataset's ``split_by_node``, ``datasets``' ``split_dataset_by_node``) reads less, and
    needs no ``Sharded``.

    Args:
        dataset: an ``IterableDataset``, or another object that can be iterated repeatedly.

    Example:
        >>> list(Sharded([10, 11, 12]))
        [10, 11, 12]
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self._rank, self._world_size, self._whole_rounds = 0, 1, False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        places, place = self._world_size * workers, self._rank * workers + worker
        if not self._whole_rounds:
            yield from itertools.islice(self.dataset, place, None, places)
            return
        own = None
        for number, sample in enumerate(self.dataset):
            own = sample if number % places == place else own
            if number % places == places - 1:
                yield own

    def set_epoch(self, epoch: int) -> None:
        """Calls the stream's ``set_epoch``, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def share_out(self, rank: int, world_size: int, *, train: bool) -> None:
        """Sets this rank's share; called by the Trainer.  ``train`` leaves out an incomplete last round."""
        self._rank, self._world_size, self._whole_rounds = rank, world_size, train


def look_for_doubles(feed: Feed, loader: Any, strategy: Strategy, *, among_ranks: bool) -> None:
    """Makes the first pass of ``feed`` raise :class:`ConfigError` if two ranks or two workers begin with the same batch.

    Checks streams that are not a :class:`Sharded`.  A batch of all-equal numbers is never counted as the same.  ``among_ranks``:
    all ranks make this pass and compare their first batches; else each rank compares only its own workers.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not isinstance(dataset, IterableDataset) or isinstance(dataset, Sharded):
        return
    exchanges = among_ranks and strategy.data_ranks > 1
    if not exchanges and loader.num_workers < 2:
        return
    behind, looked = feed.behind, False

    def first_pass(count: int) -> Iterator[Any]:
        nonlocal looked
        if looked:
            return behind(count)
        looked = True
        words = _words(type(dataset).__name__)
        return _looked_at(behind(count), loader.num_workers, strategy if exchanges else None, words)

    feed.behind = first_pass  # type: ignore[method-assign]  # of this instance


def _looked_at(
    batches: Iterator[Any], workers: int, strategy: Strategy | None, words: Callable[[str], ConfigError]
) -> Iterator[Any]:
    first = next(batches, None)
    seen = [None if first is None else _digest(first)]
    if strategy is not None:
        everywhere = strategy.all_gather_object(seen[0])[:: strategy.tensor_parallel]
        equal = [rank for rank, one in enumerate(everywhere) if one is not None and everywhere.count(one) > 1]
        if equal:
            raise words(f"ranks {equal} begin with the same batch")
    if first is None:
        return
    yield first
    del first
    for batch in itertools.islice(batches, max(workers - 1, 0)):  # the workers deliver in turn: one batch of each
        seen.append(_digest(batch))
        if seen[-1] is not None and seen[-1] in seen[:-1]:
            raise words(f"workers {seen.index(seen[-1])} and {len(seen) - 1} begin with the same batch")
        yield batch
    yield from batches


def _words(name: str) -> Callable[[str], ConfigError]:
    return lambda found: ConfigError(
        f"{found} of {name}: each sample would be seen several times. Give DataLoader(Sharded({name}(...))) of fabricamp.data, or "
        "let the stream share itself out by rank and get_worker_info(); with use_distributed_sampler=False every rank reads all"
    )


def _digest(batch: Any) -> bytes | None:
    """Returns a hash of ``batch``; None if all its numbers are equal or it cannot be pickled."""
    digest = hashlib.sha256()
    tensors = [one.detach() for one in tensors_within(batch) if one.layout is torch.strided]
    if tensors:
        if all(_is_uniform(one) for one in tensors):
            return None
        for one in tensors:
            digest.update(one.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()
    try:
        digest.update(pickle.dumps(batch))
    except Exception:  # noqa: BLE001 - a batch class may raise anything; there is nothing to compare then
        return None
    return digest.digest()


def _is_uniform(tensor: Tensor) -> bool:
    values = tensor.flatten()
    return values.numel() < 2 or bool((values == values[0]).all())
