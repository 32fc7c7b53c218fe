"""Loaders made ready for a run: shared out between the ranks, in an order that a resumed run can enter anywhere."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

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

from fabricamp.data.combined import CombinedLoader, leaves_of
from fabricamp.data.length_groups import LengthGroups
from fabricamp.data.orders import DrawnOrder, SeededOrder
from fabricamp.data.position import draw_seed
from fabricamp.data.resident import ResidentLoader
from fabricamp.data.samplers import DrawingSampler, EvalSampler, SharingSampler, TrainSampler
from fabricamp.data.seeding import SeededDataset
from fabricamp.data.sharding import Sharded
from fabricamp.errors import ConfigError
from fabricamp.rng import seed_worker, seeds_workers
from fabricamp.say_once import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_AHEAD = 2
"""Batches that may be read and moved ahead of the one that is trained on."""


def wire_loader(
    loader: Any,
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
) -> Any:
    """Returns ``loader`` rebuilt with :class:`TrainSampler` or :class:`EvalSampler`, or as it is.

    Rebuilt is exactly torch's ``DataLoader`` with a plain Random- or SequentialSampler; its other options are kept.  One
    process draws the order that the loader's own sampler would; several share the one of ``DistributedSampler`` with ``seed``.
    Evaluation on several ranks reads in order, samples dealt out one by one, or ``in_batches``. Any other loader is used as it
    is, which is said once where ranks could read the same data. With ``distributed_sampler`` False every rank reads the whole
    dataset. With ``overfit`` nothing is shuffled, so that the first batches are the same in each epoch: a DataLoader with a
    sampler of its own is rebuilt too, and :class:`ConfigError` raised for one that may shuffle and cannot be. ``per_sample_seed``
    seeds each sample that is trained on, see :class:`SeededDataset`; raises :class:`ConfigError` for a loader that is not
    rebuilt. The data of a :class:`ResidentLoader` come to ``device``. ``at_once``: how many batches may be read together. Where
    there are several ranks ``from_first`` returns the first one's value on each of them: a run that one process began goes on in
    the order that its generator draws.
    """
    options = {name: value for name, value in locals().items() if name != "loader"}
    if isinstance(loader, CombinedLoader):
        return loader.map(functools.partial(wire_loader, **options))
    place, places = (rank, world_size) if distributed_sampler else (0, 1)
    sampler = _plain_sampler(loader)
    if sampler is None and overfit:
        sampler = _in_order(loader, overfit, speaks=rank == 0)
    if sampler is None:
        if per_sample_seed and train:
            raise ConfigError(
                f"per_sample_seed=True seeds the samples of a dataset with indices, and this loader is a {_kind(loader)}; pass "
                "torch's DataLoader with its default sampler over such a dataset, or leave per_sample_seed out"
            )
        if isinstance(loader, ResidentLoader):
            sharing = _resident_sampler(
                loader, place, places, seed, train=train, shuffle=not overfit, in_batches=in_batches
            )
            return loader.shared_out(sharing, device)
        shared = (getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None))
        if part := next((one for one in shared if isinstance(one, Sharded | LengthGroups)), None):
            part.share_out(place, places, train=train)
        elif rank == 0:
            unshared = world_size > 1 and distributed_sampler
            _say_used_as_it_is(loader, unshared=unshared, overfit=overfit > 0, train=train)
        return loader
    if train:
        common = from_first if distributed_sampler else None
        options = {"shuffle": not overfit, "tags": per_sample_seed, "at_once": at_once, "from_first": common}
        return _rebuilt(loader, _train_sampler(loader, sampler, place, places, seed, **options), rank, device)
    if places == 1:
        return loader
    block = (loader.batch_size or 1) if in_batches else 1
    return _rebuilt(loader, EvalSampler(len(loader.dataset), rank=place, world_size=places, block=block), rank, device)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells the epoch to whatever in ``loader`` takes it: samplers, batch samplers, datasets, the loader itself."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts += [getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    for part in {id(part): part for part in parts}.values():
        take = getattr(part, "set_epoch", None)
        if callable(take):
            take(epoch)
    if isinstance(loader, CombinedLoader):
        for member in loader.members:
            set_epoch(member, epoch)


def release_workers(loader: Any) -> None:
    """Ends the persistent workers of ``loader``; its next pass would start others."""
    if isinstance(loader, CombinedLoader):
        for member in loader.members:
            release_workers(member)
    elif isinstance(loader, DataLoader) and loader.persistent_workers:  # others may know by it where they stand
        loader._iterator = None


def draw_a_pass(loader: Any) -> None:
    """Draws what beginning a pass over ``loader`` draws: the seed that torch gives to workers, of each loader in it."""
    for one in leaves_of(loader):
        if isinstance(one, DataLoader):
            draw_seed(one)


def _plain_sampler(loader: Any) -> RandomSampler | SequentialSampler | None:
    """The sampler to replace: torch's own over all of the dataset, shuffled or in order; None where it is another."""
    if type(loader) is not DataLoader:
        return None
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return None
    sampler: Any = loader.sampler if batches is None else batches.sampler
    if type(sampler) not in {RandomSampler, SequentialSampler} or not hasattr(loader.dataset, "__len__"):
        return None
    return sampler if len(sampler.data_source) == len(loader.dataset) else None


def _in_order(loader: Any, overfit: float, *, speaks: bool) -> SequentialSampler | None:
    """What reads ``loader`` in the order of its dataset, in place of a sampler of its own; None where it does not shuffle.

    Raises :class:`ConfigError` for a loader that may shuffle and cannot be rebuilt.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    dataset: Any = loader.dataset
    batches, sampler = loader.batch_sampler, loader.sampler
    if isinstance(batches, LengthGroups):
        if batches.shuffle:
            raise ConfigError(_refusal(overfit, "LengthGroups(shuffle=True)"))
        return None
    if type(batches) is BatchSampler:
        sampler = batches.sampler
    elif batches is not None:
        raise ConfigError(_refusal(overfit, f"{type(batches).__name__}, a batch sampler of its own,"))
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
    """The sampler of a rank; it knows the orders of other numbers of ranks too, as a run may have begun with another."""
    dataset: Any = loader.dataset
    size = len(dataset)
    own_generator = loader.generator or getattr(sampler, "generator", None)
    earlier_seed = seed if own_generator is None else own_generator.initial_seed()
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "tags": tags, "earlier_seed": earlier_seed}
    if not (shuffle and isinstance(sampler, RandomSampler)):
        order = SeededOrder(size, shuffle=False, seed=seed)
        return TrainSampler(order, **options) if world_size == 1 else SharingSampler(loader.dataset, order, **options)
    window = _samples_ahead(loader, at_once)
    drawn = DrawnOrder(sampler, window=window, from_first=from_first, is_first=rank == 0)
    seeded = [SeededOrder(size, shuffle=True, seed=seed)] if drawn.once else []
    if world_size == 1:
        return DrawingSampler(sampler, drawn, *seeded, **options)
    if not seeded:
        drawn.draw_apart(torch.Generator().manual_seed(seed).get_state())
    return SharingSampler(loader.dataset, *seeded, drawn, **options)


def _resident_sampler(
    loader: ResidentLoader, rank: int, world_size: int, seed: int, *, train: bool, shuffle: bool, in_batches: bool
) -> TrainSampler | EvalSampler:
    size = loader.dataset_size
    if not train:
        return EvalSampler(size, rank=rank, world_size=world_size, block=loader.batch_size if in_batches else 1)
    seed = seed if loader.seed is None else loader.seed
    order = SeededOrder(size, shuffle=shuffle and loader.shuffle, seed=seed)
    return TrainSampler(order, rank=rank, world_size=world_size, earlier_seed=seed)


def _samples_ahead(loader: DataLoader[Any], at_once: int) -> int:
    """How many samples may have been asked for that no step has seen: those of the workers, and of batches that are read ahead."""
    return (loader.batch_size or 1) * (at_once + MOST_AHEAD + loader.num_workers * (loader.prefetch_factor or 0))


def _rebuilt(
    loader: DataLoader[Any], sampler: TrainSampler | EvalSampler, rank: int, device: torch.device | None
) -> DataLoader[Any]:
    batches = loader.batch_sampler
    batching: dict[str, Any] = {"batch_size": None}
    if isinstance(batches, BatchSampler):
        batching = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    init = loader.worker_init_fn
    # Torch seeds worker i of every rank alike where the ranks have one seed; rank 0 keeps what a single process has.
    if init is None and rank > 0 and loader.num_workers > 0 and seeds_workers():
        init = functools.partial(seed_worker, rank=rank)
    tags = isinstance(sampler, TrainSampler) and sampler.tags
    return DataLoader(
        SeededDataset(loader.dataset) if tags else loader.dataset,
        **batching,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or _gains_by_pinning(loader, device),
        timeout=loader.timeout,
        worker_init_fn=init,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers or (tags and _loses_nothing_by_keeping(loader)),
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _gains_by_pinning(loader: DataLoader[Any], device: torch.device | None) -> bool:
    """Whether a thread beside the workers should pin batches, so that their copy to the GPU waits for nothing.

    Not where workers are started in a way that lets them use the GPU: what lies there cannot be pinned.
    """
    on_gpu = device is not None and device.type == "cuda"
    return on_gpu and loader.num_workers > 0 and loader.multiprocessing_context is None


def _loses_nothing_by_keeping(loader: DataLoader[Any]) -> bool:
    """Whether workers may outlive an epoch where each sample is seeded by itself.

    Not those of a dataset that is told the epoch, nor where batches are put together by a function that may draw.
    """
    told = callable(getattr(loader.dataset, "set_epoch", None))
    return loader.num_workers > 0 and not told and loader.collate_fn is default_collate


def _kind(loader: Any) -> str:
    """What ``loader`` is, with what makes it one that is used as it is."""
    parts = [getattr(loader, "dataset", None), getattr(loader, "sampler", None)]
    return " with ".join(type(part).__name__ for part in (loader, *parts) if part is not None)


def _say_used_as_it_is(loader: Any, *, unshared: bool, overfit: bool, train: bool) -> None:
    dataset = getattr(loader, "dataset", None)
    if unshared and not train and isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset):
        # Training looks at what the ranks begin with.
        name = type(dataset).__name__
        say_once(
            f"{name} is evaluated as it is: each rank sees all that it gives there, which is every sample unless it shares itself "
            f"out by rank; DataLoader(Sharded({name}(...))) of fabricamp.data does that for any stream"
        )
    elif unshared and not _is_shared_out(loader):
        say_once(
            f"{type(loader).__name__} is used as it is: each rank reads what it gives there; shard it by rank "
            "(a DistributedSampler does), or pass torch's DataLoader with its default sampler"
        )
    if overfit and isinstance(loader, DataLoader):
        say_once(
            f"overfit_batches: {type(loader).__name__} is used as it is, in its own order; "
            "its first batches are the same in each epoch only if it does not shuffle"
        )


def _is_shared_out(loader: Any) -> bool:
    """Whether the loader's sampler looks as if it knew of ranks."""
    parts = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts += [getattr(part, "sampler", None) for part in parts]
    return any(isinstance(part, DistributedSampler) or hasattr(part, "num_replicas") for part in parts)
