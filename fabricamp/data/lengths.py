"""Numbers of batches: of a loader, under a limit, and the check that all ranks have the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricamp.arguments.checks import whole_number
from fabricamp.data.samplers import EvalSampler, TrainSampler
from fabricamp.errors import ArgumentTypeError, ConfigError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Sized

    from fabricamp._utils.types import Loader
    from fabricamp.strategies.base import Strategy


def loader_length(loader: Loader, name: str) -> int | float:
    """Returns the number of batches, inf for a loader without a length; raises if there are none or if it is no loader.

    ``name`` is the argument for the error message (``train_dataloaders``, ``val_dataloaders`` ...).  Returns 0 only for an
    evaluation loader if other ranks have all its samples.
    """
    _check_iterable(loader, name)
    length = known_length(loader)
    if length == 0 and not _all_elsewhere(loader):
        dataset = getattr(loader, "dataset", None)
        over = "" if dataset is None else f" over {type(dataset).__name__}"
        raise ConfigError(
            f"{name}: {type(loader).__name__}{over} has no batches; give it at least one "
            f"(an empty dataset, or drop_last=True with fewer samples than a batch?){without(name)}"
        )
    return length


def without(name: str) -> str:
    """Returns how a run goes without the loader that the argument ``name`` gives; an empty string if it needs it."""
    if name == "val_dataloaders":
        return "; to go without validation: limit_val_batches=0, or leave the loader out"
    return "; or leave it out of the collection" if name.startswith("CombinedLoader[") else ""


def known_length(loader: object) -> int | float:
    """Returns ``len(loader)``, of a loader or a dataset; inf if it has none."""
    try:
        return len(cast("Sized", loader))
    except (TypeError, NotImplementedError):
        return math.inf


def is_sized_stream(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether ``loader`` is torch's DataLoader over a stream with a ``len()``, whose number of batches is an estimate."""
    over_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return over_stream and known_length(loader) < math.inf


def ends_by_samples(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether an epoch over ``loader`` has as many samples as a stream's ``len()`` says, in a number of batches not known before.

    Workers share the stream, and each of them may end with an incomplete batch.
    """
    return is_sized_stream(loader) and loader.num_workers > 0


def most_batches_of(loader: object) -> int | float:
    """Returns ``len(loader)``; if its workers share a stream, the most batches that as many samples make; inf if it has none."""
    if not ends_by_samples(loader):
        return known_length(loader)
    samples = known_length(loader.dataset)
    if type(loader).__len__ is not DataLoader.__len__ or samples == math.inf:
        return known_length(loader) + loader.num_workers
    if loader.batch_size is None or loader.drop_last:
        return known_length(loader)
    return (int(samples) + loader.num_workers * (loader.batch_size - 1)) // loader.batch_size


def batch_sizes(loader: Loader) -> list[int] | None:
    """Returns the batch size of each loader that ``loader`` is combined from; None if any of them is unknown."""
    sizes = []
    for member in getattr(loader, "flattened", [loader]):
        batch_sampler = getattr(member, "batch_sampler", None)
        size = getattr(member if batch_sampler is None else batch_sampler, "batch_size", None)
        if type(size) is not int or size < 1:
            return None
        sizes.append(size)
    return sizes or None


def check_limit(limit: object, name: str, *, optional: bool = False) -> int | float | None:
    """Returns ``limit``; raises :class:`ConfigError` unless it is a number of batches (int) or a fraction (float)."""
    if limit is None and optional:
        return None
    whole = whole_number(limit)
    if whole is not None:
        limit = whole
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        allowed = "an int (number of batches) or a float from 0.0 to 1.0 (fraction)"
        raise ConfigError(f"{name}={limit!r} is a {type(limit).__name__}; it has to be {allowed}")
    if isinstance(limit, float) and not 0.0 <= limit <= 1.0:
        raise ConfigError(f"{name}={limit!r} is a fraction outside 0.0 to 1.0; for a number of batches pass an int")
    if limit < 0:
        raise ConfigError(f"{name}={limit!r} is negative; pass 0 for none, or leave it out for all batches")
    number: int | float = limit
    return number


def limit_batches(length: float, limit: float, name: str, *, most: float | None = None) -> int | float:
    """Returns the number of batches under ``limit`` out of ``length``: at most that number (int), or that fraction (float).

    ``most``: how many there may be instead, if ``length`` is an estimate; a fraction is one of the estimate.
    """
    check_limit(limit, name)
    whole = length if most is None else most
    if isinstance(limit, int):
        return limit if whole == math.inf else min(int(whole), limit)
    if limit == 0.0:
        return 0
    if limit == 1.0:
        return whole
    if length == math.inf:
        raise ConfigError(
            f"{name}={limit!r} is a fraction of a loader that has no len(); pass a number of batches, or 1.0"
        )
    wanted = int(length * limit)
    if wanted == 0 < length:
        smallest = math.ceil(1e4 / length) / 1e4
        raise ConfigError(
            f"{name}={limit!r} of {int(length)} batches is less than one batch; "
            f"pass at least {smallest}, or a number of batches (int)"
        )
    return wanted


def check_equal_lengths(strategy: Strategy, length: float, name: str, loader: Loader | None = None) -> None:
    """Raises :class:`DistributedError` on every rank if the ranks would train on different numbers of batches.

    With ``loader``, also if its :class:`TrainSampler` has another number of samples or another seed on another rank.
    """
    samplers = [getattr(member, "sampler", None) for member in getattr(loader, "members", [loader])]
    shared = [
        (sampler.dataset_size, getattr(sampler.order, "seed", None))
        for sampler in samplers
        if isinstance(sampler, TrainSampler) and sampler.world_size > 1
    ]
    ranks = strategy.all_gather_object((length, shared))
    if len({rank_length for rank_length, _ in ranks}) > 1:
        counts = ", ".join(f"rank {rank}: {_count(rank_length)}" for rank, (rank_length, _) in enumerate(ranks))
        raise DistributedError(
            f"{name} has different numbers of batches on the ranks ({counts}), and some ranks would wait for ever for "
            "others; give each rank the same number of samples, or set a limit (int) that is at most the smallest number"
        )
    if any(rank_shared != shared for _, rank_shared in ranks):
        samples = ", ".join(f"rank {rank}: {_sharing(rank_shared)}" for rank, (_, rank_shared) in enumerate(ranks))
        raise DistributedError(
            f"{name} cannot be sharded over the ranks: they have different datasets or seeds ({samples}); "
            "give every rank the same dataset and seed_everything the same seed, "
            "or pass use_distributed_sampler=False if each rank has its own shard"
        )


def _check_iterable(loader: object, name: str) -> None:
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ArgumentTypeError(
            f"{name}: {type(loader).__name__} is a dataset; wrap it: DataLoader(dataset, batch_size=...)"
        )
    by_index = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    if isinstance(loader, str | bytes | Tensor) or not (hasattr(loader, "__iter__") or by_index):
        raise ArgumentTypeError(
            f"{name}: {type(loader).__name__} gives no batches; "
            "pass a DataLoader or another iterable of batches, or a DataModule"
        )


def _all_elsewhere(loader: Loader) -> bool:
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, EvalSampler) and sampler.dataset_size > 0


def _count(length: float) -> str:
    return "unknown" if length == math.inf else str(int(length))


def _sharing(shared: list[tuple[int, int | None]]) -> str:
    return " and ".join(f"{size} samples, seed {seed}" for size, seed in shared) or "its own sampler"
