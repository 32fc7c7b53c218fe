"""Prepares loaders for a run: shares them among the ranks, in an order that a resumed run can enter at any position."""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fabricamp._utils.say_once import say_once
from fabricamp.data.combined import CombinedLoader, leaves_of
from fabricamp.data.length_groups import LengthGroups
from fabricamp.data.lengths import known_length
from fabricamp.data.orders import DrawnOrder, GivenOrder, SeededOrder
from fabricamp.data.position import batch_size_of, draw_seed
from fabricamp.data.resident import ResidentLoader
from fabricamp.data.sample_seeds import SeededDataset
from fabricamp.data.samplers import (
    DrawingSampler,
    EvalSampler,
    GivenEvalSampler,
    GivenSampler,
    SharingSampler,
    TrainSampler,
)
from fabricamp.data.sharding import Sharded, orders_of_ranks
from fabricamp.data.unrepeatable import unrepeatable_order
from fabricamp.errors import ConfigError
from fabricamp.habits import habits
from fabricamp.rng import seed_worker, seeds_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized

    from fabricamp._utils.types import Loader

MOST_AHEAD = 2
"""The largest number of batches that are read and moved ahead of the current step."""


def wire_loader(
    loader: Loader,
    *,
    train: bool,
    rank: int,
    world_size: int,
    seed: int,
    distributed_sampler: bool = True,
    overfit: float = 0,
    per_sample_seed: bool = False,
    device: torch.device | None = None,
    in_batches: bool = False,
    at_once: int = 1,
    from_first: Callable[[Any], Any] | None = None,
    gather: Callable[[Any], list[Any]] | None = None,
) -> Loader:
    """Returns ``loader`` rebuilt with :class:`TrainSampler` or :class:`EvalSampler`, or unchanged.

    Rebuilds exactly torch's ``DataLoader`` (no subclass) with a plain Random- or SequentialSampler, and keeps its other options.
    A single process draws the order that the loader's own sampler would draw; several ranks share the order of
    ``DistributedSampler`` with ``seed``.  Evaluation on several ranks reads in order; samples are dealt out one by one, or in
    batches (``in_batches``).  A ``DataLoader`` with another sampler or batch sampler, or of a subclass, is copied: several ranks
    share the first rank's order, if all would draw the same one.  Any other loader is used unchanged, with one message if ranks
    could read the same data.  The data of a :class:`ResidentLoader` are moved to ``device``.

    Args:
        loader: the loader, or a :class:`CombinedLoader`, whose loaders are treated one by one.
        train: whether the run trains on the loader.
        rank: this rank.
        world_size: the number of ranks that share the data.
        seed: the seed of the shared orders.
        distributed_sampler: False lets every rank read the complete dataset.
        overfit: if not 0, nothing is shuffled, so that the first batches are the same in each epoch; a DataLoader with another
            sampler is rebuilt, too.
        per_sample_seed: seeds each training sample, see :class:`SeededDataset`.
        device: the device of the run.
        in_batches: deals out an evaluation's samples in batches.
        at_once: the number of batches that may be read together.
        from_first: returns the first rank's value on every rank, if there are several.  With it, several ranks can resume a run of
            a single process in the order that its generator draws.
        gather: returns every rank's value on every rank.  Without it, a user's sampler is used as it is.

    Raises:
        ConfigError: with ``overfit``, for a loader that may shuffle and cannot be rebuilt; with ``per_sample_seed``, for a loader
            that is not rebuilt; for a user's sampler to train with, if ``gather`` does not reach all that share the data.
    """
    if isinstance(loader, CombinedLoader):
        options = {name: value for name, value in locals().items() if name != "loader"}
        return loader.map(functools.partial(wire_loader, **options))
    unrepeatable = unrepeatable_order(loader) if train and rank == 0 else None
    if unrepeatable is not None:
        say_once(
            f"{unrepeatable}: as it is, a run that is resumed within an epoch cannot repeat the epoch's order, and "
            "reads some samples twice and others never"
        )
    # The rank and the number of ranks among which the samples are shared.
    data_rank = rank if distributed_sampler else 0
    data_ranks = world_size if distributed_sampler else 1
    sampler = _plain_sampler(loader)
    if sampler is None and overfit:
        sampler = _in_order(loader, overfit, speaks=rank == 0)
    if sampler is not None:  # a DataLoader to rebuild
        assert isinstance(loader, DataLoader)
        new_sampler: TrainSampler | EvalSampler
        if train:
            new_sampler = _train_sampler(
                loader,
                sampler,
                data_rank,
                data_ranks,
                seed,
                shuffle=not overfit,
                tags=per_sample_seed,
                at_once=at_once,
                from_first=from_first if distributed_sampler else None,
            )
        elif data_ranks == 1:
            return loader
        else:
            block = batch_size_of(loader) if in_batches else 1
            new_sampler = EvalSampler(
                len(cast("Sized", loader.dataset)), rank=data_rank, world_size=data_ranks, block=block
            )
        return _rebuilt(loader, new_sampler, rank, device)
    if per_sample_seed and train:
        raise ConfigError(
            f"per_sample_seed=True seeds the samples of a dataset with indices, and this loader is a {_kind(loader)}; pass "
            "torch's DataLoader with its default sampler over such a dataset, or leave per_sample_seed out"
        )
    if isinstance(loader, ResidentLoader):
        resident_sampler = _resident_sampler(
            loader, data_rank, data_ranks, seed, train=train, shuffle=not overfit, in_batches=in_batches
        )
        return loader.shared_out(resident_sampler, device)
    if _share_out(loader, data_rank, data_ranks, train=train):
        return loader
    if data_ranks > 1 and gather is not None:
        shared = _share_given(
            loader,
            rank,
            data_rank,
            data_ranks,
            seed,
            train=train,
            in_batches=in_batches,
            from_first=from_first or _same,
            gather=gather,
        )
        if shared is not None:
            return shared
    if rank == 0:
        unshared = world_size > 1 and distributed_sampler
        _say_used_as_it_is(loader, unshared=unshared, overfit=overfit > 0, train=train)
    return loader


def set_epoch(loader: Loader, epoch: int) -> None:
    """Calls ``set_epoch`` on the loader, its samplers, batch samplers and datasets, on those that have it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts += [getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    for part in {id(part): part for part in parts}.values():
        own_set_epoch = getattr(part, "set_epoch", None)
        if callable(own_set_epoch):
            own_set_epoch(epoch)
    if isinstance(loader, CombinedLoader):
        for member in loader.members:
            set_epoch(member, epoch)


def set_sampler_epoch(loader: Loader, epoch: int) -> None:
    """Calls ``set_epoch`` on the samplers of ``loader`` alone: an evaluation may shuffle, but reads the same data each time."""
    for leaf in leaves_of(loader):
        samplers = [getattr(leaf, "sampler", None), getattr(getattr(leaf, "batch_sampler", None), "sampler", None)]
        for sampler in {id(sampler): sampler for sampler in samplers}.values():
            own_set_epoch = getattr(sampler, "set_epoch", None)
            if callable(own_set_epoch):
                own_set_epoch(epoch)


def release_workers(loader: Loader | None) -> None:
    """Ends the persistent workers of ``loader``; its next pass starts new ones."""
    if isinstance(loader, CombinedLoader):
        for member in loader.members:
            release_workers(member)
    elif isinstance(loader, DataLoader) and loader.persistent_workers:  # others may keep their position in _iterator
        loader._iterator = None


def draw_a_pass(loader: Loader) -> None:
    """Consumes the random numbers that the beginning of a pass consumes: torch's base seed of the workers, for each DataLoader."""
    for leaf in leaves_of(loader):
        if isinstance(leaf, DataLoader):
            draw_seed(leaf)
    try_loaders(loader)


def try_loaders(loader: Loader) -> None:
    """Begins a pass over each loader that is no DataLoader, and drops it, as Lightning does, in a program written for it."""
    if not habits().loaders_are_tried:
        return
    for leaf in leaves_of(loader):
        if not isinstance(leaf, DataLoader) and hasattr(leaf, "__iter__"):
            iter(leaf)


def _plain_sampler(loader: Loader) -> RandomSampler | SequentialSampler | None:
    """Returns the sampler to replace: torch's Random- or SequentialSampler over the complete dataset; None for any other."""
    if type(loader) is not DataLoader:
        return None
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return None
    sampler: Any = loader.sampler if batch_sampler is None else batch_sampler.sampler
    if type(sampler) not in {RandomSampler, SequentialSampler} or not hasattr(loader.dataset, "__len__"):
        return None
    return sampler if len(sampler.data_source) == len(loader.dataset) else None


def _in_order(loader: Loader, overfit: float, *, speaks: bool) -> SequentialSampler | None:
    """Returns a sampler in the order of the dataset, to replace the loader's own sampler; None if the loader does not shuffle.

    ``speaks`` reports the replacement.  Raises :class:`ConfigError` for a loader that may shuffle and cannot be rebuilt.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    dataset: Any = loader.dataset
    sampler = loader.sampler
    batch_sampler = loader.batch_sampler
    if isinstance(batch_sampler, LengthGroups):
        if batch_sampler.shuffle:
            raise ConfigError(_refusal(overfit, "LengthGroups(shuffle=True)"))
        return None
    if type(batch_sampler) is BatchSampler:
        sampler = batch_sampler.sampler
    elif batch_sampler is not None:
        raise ConfigError(_refusal(overfit, f"{type(batch_sampler).__name__}, a batch sampler of its own,"))
    if type(sampler) is SequentialSampler:
        return None
    if type(loader) is not DataLoader or not hasattr(dataset, "__len__"):
        raise ConfigError(_refusal(overfit, _kind(loader)))
    if speaks:
        say_once(
            f"overfit_batches reads {_kind(loader)} in the order of its dataset, without its {type(sampler).__name__}"
        )
    return SequentialSampler(dataset)


def _refusal(overfit: float, what: str) -> str:
    return (
        f"overfit_batches={overfit!r} reads the same batches in each epoch, and {what} may shuffle them; give torch's DataLoader "
        "with batch_size and shuffle=False, or limit_train_batches and limit_val_batches"
    )


def _train_sampler(
    loader: DataLoader[Any],
    sampler: RandomSampler | SequentialSampler,
    rank: int,
    world_size: int,
    seed: int,
    *,
    shuffle: bool,
    tags: bool,
    at_once: int,
    from_first: Callable[[Any], Any] | None,
) -> TrainSampler:
    """Returns a rank's sampler; it also has the order of a single process or of several ranks, in which the run may have begun."""
    dataset: Any = loader.dataset
    size = len(dataset)
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "tags": tags}
    if not (shuffle and isinstance(sampler, RandomSampler)):
        order = SeededOrder(size, shuffle=False, seed=seed)
        return TrainSampler(order, **options) if world_size == 1 else SharingSampler(dataset, order, **options)
    # The largest number of samples requested but not yet in a step: those of the workers and of prefetched batches.
    batches_ahead = at_once + MOST_AHEAD + loader.num_workers * (loader.prefetch_factor or 0)
    window = (loader.batch_size or 1) * batches_ahead
    # Workers ask for indices ahead, and so for those behind the last: also in Lightning.
    to_end = loader.num_workers > 0 or not habits().loaders_end_at_their_last_batch
    drawn = DrawnOrder(sampler, window=window, from_first=from_first, is_first=rank == 0, reads_to_end=to_end)
    # A sampler with replacement, or of another number of samples, has no counterpart in DistributedSampler.
    seeded = [SeededOrder(size, shuffle=True, seed=seed)] if drawn.once else []
    if world_size == 1:
        return DrawingSampler(sampler, drawn, *seeded, **options)
    if not seeded:
        drawn.draw_apart(torch.Generator().manual_seed(seed).get_state())
    return SharingSampler(dataset, *seeded, drawn, **options)


def _share_given(
    loader: Loader,
    rank: int,
    data_rank: int,
    data_ranks: int,
    seed: int,
    *,
    train: bool,
    in_batches: bool,
    from_first: Callable[[Any], Any],
    gather: Callable[[Any], list[Any]],
) -> Loader | None:
    """Returns a DataLoader that shares the order of a user's sampler, or of its subclass; unchanged if the ranks' orders differ.

    None for a loader whose order cannot be shared.
    """
    given = None if _shards_itself(loader) else _given_sampler(loader)
    if given is None:
        return None
    loader = cast("DataLoader[Any]", loader)
    orders = orders_of_ranks(given, loader.dataset, from_first, gather)
    if len(orders) < data_ranks:
        raise ConfigError(
            f"{_kind(loader)}: groups that exchange nothing before their first step cannot compare the orders of a sampler of your "
            "own; give torch's DataLoader with its default sampler, or share the samples among the groups yourself and pass "
            "use_distributed_sampler=False"
        )
    if len(set(orders)) > 1:
        if rank == 0:
            say_once(
                f"{_kind(loader)} is used as it is: its order is another one on each rank, as that of a sampler that shards itself "
                "(one that yields the same order on all ranks is shared among them)"
            )
        return loader
    # Without a length there is no end at which each sample has been evaluated on exactly one rank.
    if orders[0] is None or not (train or known_length(given) < math.inf):
        return None
    if train:
        order = GivenOrder(given, from_first=from_first, is_first=rank == 0)
        return _with_sampler(
            loader, GivenSampler(given, loader.dataset, order, rank=data_rank, world_size=data_ranks), rank
        )
    # The items of a batch sampler are batches already.
    block = batch_size_of(loader) if in_batches and given is not loader.batch_sampler else 1
    evaluated = GivenEvalSampler(given, rank=data_rank, world_size=data_ranks, block=block, seed=seed)
    return _with_sampler(loader, evaluated, rank)


def _given_sampler(loader: Loader) -> Iterable[Any] | None:
    """Returns what decides a loader's order: its sampler, or a batch sampler of the user; None if its class reads otherwise."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        return None
    given: Iterable[Any] = loader.sampler
    if type(loader.batch_sampler) is BatchSampler:
        given = loader.batch_sampler.sampler
    elif loader.batch_sampler is not None:
        given = loader.batch_sampler
    return given


def _with_sampler(loader: DataLoader[Any], sampler: GivenSampler | GivenEvalSampler, rank: int) -> DataLoader[Any]:
    """Returns a copy of ``loader``, of its class, with ``sampler`` in the place of the user's sampler or batch sampler."""
    batch_sampler = loader.batch_sampler
    changes: dict[str, Any] = {"_iterator": None, "worker_init_fn": _worker_init_fn(loader, rank)}
    if batch_sampler is None:
        changes["sampler"] = sampler
    elif type(batch_sampler) is BatchSampler:
        size = batch_sampler.batch_size
        drop_last = batch_sampler.drop_last
        changes |= {"sampler": sampler, "batch_size": size, "drop_last": drop_last}
        changes["batch_sampler"] = BatchSampler(sampler, size, drop_last)
    else:
        changes["batch_sampler"] = sampler
    copied = copy.copy(loader)
    vars(copied).update(changes)  # bypasses DataLoader's __setattr__, which refuses another sampler
    return copied


def _same(value: Any) -> Any:
    return value


def _resident_sampler(
    loader: ResidentLoader, rank: int, world_size: int, seed: int, *, train: bool, shuffle: bool, in_batches: bool
) -> TrainSampler | EvalSampler:
    size = loader.dataset_size
    if not train:
        return EvalSampler(size, rank=rank, world_size=world_size, block=loader.batch_size if in_batches else 1)
    seed = seed if loader.seed is None else loader.seed
    order = SeededOrder(size, shuffle=shuffle and loader.shuffle, seed=seed)
    return TrainSampler(order, rank=rank, world_size=world_size)


def _rebuilt(
    loader: DataLoader[Any], sampler: TrainSampler | EvalSampler, rank: int, device: torch.device | None
) -> DataLoader[Any]:
    batch_sampler = loader.batch_sampler
    batching: dict[str, Any] = {"batch_size": None}
    if isinstance(batch_sampler, BatchSampler):
        batching = {"batch_size": batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
    tags = isinstance(sampler, TrainSampler) and sampler.tags
    return DataLoader(
        SeededDataset(loader.dataset) if tags else loader.dataset,
        **batching,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or _can_pin(loader, device),
        timeout=loader.timeout,
        worker_init_fn=_worker_init_fn(loader, rank),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers or (tags and _can_persist(loader)),
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _worker_init_fn(loader: DataLoader[Any], rank: int) -> Callable[[int], None] | None:
    """Returns the loader's own function; else, one that gives the workers of each rank other random numbers.

    With one seed for all ranks, torch gives worker i the same seed on every rank; rank 0 keeps that of a single process.
    """
    if loader.worker_init_fn is None and rank > 0 and loader.num_workers > 0 and seeds_workers():
        return functools.partial(seed_worker, rank=rank)
    return loader.worker_init_fn


def _can_pin(loader: DataLoader[Any], device: torch.device | None) -> bool:
    """Whether torch's thread should pin the workers' batches, so that their copy to the GPU is asynchronous.

    False with a ``multiprocessing_context``: such workers may use the GPU, and tensors on the GPU cannot be pinned.
    """
    on_gpu = device is not None and device.type == "cuda"
    return on_gpu and loader.num_workers > 0 and loader.multiprocessing_context is None


def _can_persist(loader: DataLoader[Any]) -> bool:
    """Whether workers may persist across epochs, given that each sample is seeded by itself.

    False for a dataset with ``set_epoch``, and for a custom ``collate_fn``, which may consume random numbers.
    """
    knows_epoch = callable(getattr(loader.dataset, "set_epoch", None))
    return loader.num_workers > 0 and not knows_epoch and loader.collate_fn is default_collate


def _kind(loader: Loader) -> str:
    """Returns the type names of ``loader``, its dataset and its sampler, for messages."""
    parts = [getattr(loader, "dataset", None), getattr(loader, "sampler", None)]
    return " with ".join(type(part).__name__ for part in (loader, *parts) if part is not None)


def _share_out(loader: Loader, rank: int, world_size: int, *, train: bool) -> bool:
    """Sets this rank's share of a :class:`Sharded` or :class:`LengthGroups` in ``loader``; returns whether there is one."""
    for part in (getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)):
        if isinstance(part, Sharded | LengthGroups):
            part.share_out(rank, world_size, train=train)
            return True
    return False


def _say_used_as_it_is(loader: Loader, *, unshared: bool, overfit: bool, train: bool) -> None:
    dataset = getattr(loader, "dataset", None)
    if unshared and not train and isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset):
        # In training, look_for_doubles compares the first batches of the ranks.
        name = type(dataset).__name__
        say_once(
            f"{name} is evaluated as it is: each rank evaluates every sample that it yields there, so all of them unless it shards "
            f"itself by rank; DataLoader(Sharded({name}(...))) of fabricamp.data shards any stream"
        )
    elif unshared and not _shards_itself(loader):
        say_once(
            f"{type(loader).__name__} is used as it is: each rank reads all batches that it yields there; shard it by rank "
            "(a DistributedSampler does), or pass torch's DataLoader with its default sampler"
        )
    if overfit and not isinstance(loader, list | tuple):
        say_once(
            f"overfit_batches: {type(loader).__name__} is used as it is, in its own order; "
            "its first batches are the same in each epoch only if it does not shuffle"
        )


def _shards_itself(loader: Loader) -> bool:
    """Whether one of the loader's samplers seems to shard by rank."""
    parts = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts += [getattr(part, "sampler", None) for part in parts]
    return any(isinstance(part, DistributedSampler) or hasattr(part, "num_replicas") for part in parts)
