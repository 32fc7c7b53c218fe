"""Loaders made ready for a run: shared out between the ranks, in an order that a resumed run can enter anywhere."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from fabricamp.data.combined import CombinedLoader
from fabricamp.data.samplers import EvalSampler, TrainSampler
from fabricamp.data.seeding import SeededDataset
from fabricamp.errors import ConfigError
from fabricamp.rng import seed_worker, seeds_workers

__all__ = ["release_workers", "set_epoch", "wire_loader"]

_LOG = logging.getLogger(__name__)


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
) -> Any:
    """Returns ``loader`` rebuilt with :class:`TrainSampler` or :class:`EvalSampler`, or as it is.

    Rebuilt is exactly torch's ``DataLoader`` with a plain Random- or SequentialSampler; its other options are kept, its
    generator's seed takes the place of ``seed``, and its workers stay alive between epochs.  Evaluation reads in order,
    on any number of ranks.  Any other loader is used as it is, which is said once where ranks could read the same data.
    With ``distributed_sampler`` False every rank reads the whole dataset; with ``overfit`` nothing is shuffled, so that
    the first batches are the same in each epoch.  ``per_sample_seed`` seeds each sample that is trained on, see
    :class:`SeededDataset`; raises :class:`ConfigError` for a loader that is not rebuilt.
    """
    if isinstance(loader, CombinedLoader):
        options: dict[str, Any] = {"distributed_sampler": distributed_sampler, "overfit": overfit}
        options["per_sample_seed"] = per_sample_seed
        wire = functools.partial(wire_loader, train=train, rank=rank, world_size=world_size, seed=seed, **options)
        return loader.map(wire)
    sampler = _plain_sampler(loader)
    if sampler is None:
        if per_sample_seed and train:
            raise ConfigError(
                f"per_sample_seed=True seeds the samples of a dataset with indices, and this loader is a {_kind(loader)}; pass "
                "torch's DataLoader with its default sampler over such a dataset, or leave per_sample_seed out"
            )
        if rank == 0:
            _say_used_as_it_is(loader, unshared=world_size > 1 and distributed_sampler, overfit=overfit > 0)
        return loader
    size = len(loader.dataset)
    place, places = (rank, world_size) if distributed_sampler else (0, 1)
    if not train:
        return _rebuilt(loader, EvalSampler(size, rank=place, world_size=places), rank)
    shuffle = isinstance(sampler, RandomSampler) and not overfit
    own_generator = loader.generator or getattr(sampler, "generator", None)
    if own_generator is not None:
        seed = own_generator.initial_seed()
    order = TrainSampler(size, shuffle=shuffle, seed=seed, rank=place, world_size=places, tags_epoch=per_sample_seed)
    return _rebuilt(loader, order, rank)


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


def _plain_sampler(loader: Any) -> RandomSampler | SequentialSampler | None:
    """The sampler to replace, which gives all samples once, shuffled or in order; None where it is another."""
    if type(loader) is not DataLoader:
        return None
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return None
    sampler: Any = loader.sampler if batches is None else batches.sampler
    if type(sampler) not in {RandomSampler, SequentialSampler} or not hasattr(loader.dataset, "__len__"):
        return None
    draws_all_once = type(sampler) is SequentialSampler or not sampler.replacement
    covers_dataset = len(sampler) == len(sampler.data_source) == len(loader.dataset)
    return sampler if draws_all_once and covers_dataset else None


def _rebuilt(loader: DataLoader[Any], sampler: TrainSampler | EvalSampler, rank: int) -> DataLoader[Any]:
    batches = loader.batch_sampler
    batching: dict[str, Any] = {"batch_size": None}
    if isinstance(batches, BatchSampler):
        batching = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    init = loader.worker_init_fn
    # Torch seeds worker i of every rank alike where the ranks have one seed; rank 0 keeps what a single process has.
    if init is None and rank > 0 and loader.num_workers > 0 and seeds_workers():
        init = functools.partial(seed_worker, rank=rank)
    # A worker that stays has its own copy of the dataset, which would not hear of the epoch.
    persistent = loader.persistent_workers or (loader.num_workers > 0 and not hasattr(loader.dataset, "set_epoch"))
    dataset = loader.dataset
    if isinstance(sampler, TrainSampler) and sampler.tags_epoch:
        dataset = SeededDataset(dataset, sampler.seed)
    return DataLoader(
        dataset,
        **batching,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=init,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=persistent,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _kind(loader: Any) -> str:
    """What ``loader`` is, with what makes it one that is used as it is."""
    parts = [getattr(loader, "dataset", None), getattr(loader, "sampler", None)]
    return " with ".join(type(part).__name__ for part in (loader, *parts) if part is not None)


def _say_used_as_it_is(loader: Any, *, unshared: bool, overfit: bool) -> None:
    if unshared and not _is_shared_out(loader):
        _say(
            f"{type(loader).__name__} is used as it is: each rank reads what it gives there; shard it by rank "
            "(a DistributedSampler does), or pass torch's DataLoader with its default sampler"
        )
    if overfit and isinstance(loader, DataLoader):
        _say(
            f"overfit_batches: {type(loader).__name__} is used as it is, in its own order; "
            "its first batches are the same in each epoch only if it does not shuffle"
        )


def _is_shared_out(loader: Any) -> bool:
    """Whether the loader's sampler looks as if it knew of ranks."""
    parts = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts += [getattr(part, "sampler", None) for part in parts]
    return any(isinstance(part, DistributedSampler) or hasattr(part, "num_replicas") for part in parts)


@functools.cache
def _say(message: str) -> None:
    _LOG.warning(message)
