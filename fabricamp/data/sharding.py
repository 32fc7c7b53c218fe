"""Sharding of streams among ranks and workers, a check for ranks or workers that read the same, and one for equal orders."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fabricamp._utils.containers import tensors_within
from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.types import Batch, Loader
from fabricamp.data.feed import Feed
from fabricamp.data.lengths import known_length
from fabricamp.errors import ConfigError
from fabricamp.rng import capture_rng, isolate_rng, restore_rng
from fabricamp.strategies.base import Strategy

_COMPARED = 1 << 20
"""Bytes of an order, pickled, that ranks compare: all of a usual order, and the beginning of a long or endless one."""
_CHUNK = 1 << 12


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
        self._rank = 0
        self._world_size = 1
        self._whole_rounds = False

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        worker = 0 if info is None else info.id
        readers = self._world_size * workers
        reader = self._rank * workers + worker
        if not self._whole_rounds:
            yield from itertools.islice(self.dataset, reader, None, readers)
            return
        own = None
        for number, sample in enumerate(self.dataset):
            if number % readers == reader:
                own = sample
            if number % readers == readers - 1:  # only now is the round complete
                yield own

    def set_epoch(self, epoch: int) -> None:
        """Calls the stream's ``set_epoch``, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def share_out(self, rank: int, world_size: int, *, train: bool) -> None:
        """Sets this rank's share; called by the Trainer.  ``train`` leaves out an incomplete last round."""
        self._rank = rank
        self._world_size = world_size
        self._whole_rounds = train


def look_for_doubles(feed: Feed, loader: Loader, strategy: Strategy, *, among_ranks: bool) -> None:
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
    starting_at = feed.starting_at
    is_first = True

    def first_pass(count: int) -> Iterator[Batch]:
        nonlocal is_first
        if not is_first:
            return starting_at(count)
        is_first = False
        name = type(dataset).__name__
        return _compared(starting_at(count), loader.num_workers, strategy if exchanges else None, name)

    feed.starting_at = first_pass  # type: ignore[method-assign]  # of this instance


def _compared(batches: Iterator[Batch], workers: int, strategy: Strategy | None, name: str) -> Iterator[Batch]:
    """Yields ``batches``, and compares the first one with those of the other ranks and workers."""
    first = next(batches, None)
    digests = [None if first is None else _digest(first)]
    if strategy is not None:
        everywhere = strategy.all_gather_object(digests[0])[:: strategy.tensor_parallel]
        equal = [rank for rank, digest in enumerate(everywhere) if digest is not None and everywhere.count(digest) > 1]
        if equal:
            raise _doubles(f"ranks {equal} begin with the same batch", name)
    if first is None:
        return
    yield first
    del first
    for batch in itertools.islice(batches, max(workers - 1, 0)):  # the workers deliver in turn: one batch of each
        digest = _digest(batch)
        if digest is not None and digest in digests:
            raise _doubles(f"workers {digests.index(digest)} and {len(digests)} begin with the same batch", name)
        digests.append(digest)
        yield batch
    yield from batches


def _doubles(what: str, name: str) -> ConfigError:
    return ConfigError(
        f"{what} of {name}: each sample would be seen several times. Give DataLoader(Sharded({name}(...))) of fabricamp.data, or "
        "let the stream shard itself by rank and get_worker_info(); with use_distributed_sampler=False every rank reads all"
    )


def _digest(batch: Batch) -> bytes | None:
    """Returns a hash of ``batch``; None if all its numbers are equal or it cannot be pickled."""
    digest = hashlib.sha256()
    tensors = [tensor.detach() for tensor in tensors_within(batch) if tensor.layout is torch.strided]
    if tensors:
        if all(map(_is_uniform, tensors)):
            return None
        for tensor in tensors:
            digest.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()
    try:
        digest.update(pickle.dumps(batch))
    except Exception:  # noqa: BLE001 - a batch class may raise anything; there is nothing to compare then
        return None
    return digest.digest()


def _is_uniform(tensor: Tensor) -> bool:
    values = tensor.flatten()
    return values.numel() < 2 or bool((values == values[0]).all())


def orders_of_ranks(
    sampler: Iterable[Any], dataset: object, from_first: Callable[[Any], Any], gather: Callable[[Any], list[Any]]
) -> list[bytes | None]:
    """Returns a digest of the order that each rank's ``sampler`` yields first; None from a rank that can draw no order twice.

    All ranks draw from the RNG states of the first one, so that samplers differ by what they do, and not by the rank's seed.  They
    draw from copies, and the RNG states are restored: the passes that follow are not changed.
    """
    with isolate_rng():
        restore_rng({**from_first(capture_rng()), "cuda": []})
        digest = _order_digest(sampler, dataset)
    return gather(digest)


def _order_digest(sampler: Iterable[Any], dataset: object) -> bytes | None:
    digest = hashlib.sha256(repr(known_length(sampler)).encode())
    read = 0
    try:
        if hasattr(sampler, "__next__"):  # an iterator, which this would use up
            return None
        items = iter(_copied(sampler, dataset))
        while read < _COMPARED and (chunk := list(itertools.islice(items, _CHUNK))):
            pickled = pickle.dumps([item.tolist() if hasattr(item, "tolist") else item for item in chunk])
            digest.update(pickled)
            read += len(pickled)
    except Exception:  # noqa: BLE001 - a sampler may need what the run makes later; an error in earnest is raised by the first pass
        return None
    return digest.digest()


def _copied(sampler: Iterable[Any], dataset: object) -> Iterable[Any]:
    """Returns a copy of ``sampler`` with its state, but with the same data; a shallow one if something cannot be copied."""
    parts = (sampler, getattr(sampler, "sampler", None))
    values = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    kept = [dataset, *(value for value in values if isinstance(value, Dataset | nn.Module))]
    try:
        return copy.deepcopy(sampler, {id(one): one for one in kept})
    except Exception:  # noqa: BLE001 - locks, files, process groups ... each raises its own
        return copy.copy(sampler)
