"""A loader for a dataset in the memory of the run's device: batches are gathered there, without reads or copies from the host."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fabricamp._utils.containers import CONTAINERS, tensors_within, with_parts
from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.types import Batch, Loader
from fabricamp.arguments.checks import check_count, check_number
from fabricamp.data.orders import SeededOrder
from fabricamp.data.samplers import EvalSampler, TrainSampler
from fabricamp.data.transfer import move_to_device
from fabricamp.errors import ConfigError


class ResidentLoader(NamesKeywords):
    """A loader for tensors that fit into the memory of the run's device: they stay there, and batches are gathered there.

    A ``Trainer`` moves the tensors to its device once, and they stay there as long as the loader.  The order of an epoch follows
    from ``seed`` and epoch alone, as in torch's ``DistributedSampler``.  Ranks get their shares as from a DataLoader, and a
    resumed run continues at its sample.  Evaluations read in order.

    Args:
        *tensors: tensors with the same number of samples along the first dimension; a batch is a tuple of tensors, or a tensor if
            one is given.  With a single (nested) dict, list, tuple or data class of tensors, batches have that form.
        batch_size: number of samples in a batch of one rank.
        shuffle: shuffles, in another order for each epoch.
        drop_last: leaves out a shorter last batch.
        transform: called with each batch, on the device; returns the batch to use.
        seed: the seed of the orders; None: the seed of ``seed_everything``, else 0.

    Raises:
        ConfigError: for anything but tensors with the same number of samples, and for tensors that do not fit on the device.

    Example:
        >>> loader = ResidentLoader(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2]), batch_size=2)
        >>> [y.tolist() for x, y in loader]
        [[0, 1], [2]]
    """

    def __init__(
        self,
        *tensors: Any,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        transform: Callable[[Batch], Batch] | None = None,
        seed: int | None = None,
    ) -> None:
        data = tensors[0] if len(tensors) == 1 else tensors
        with_parts([data], _checked)
        if transform is not None and not callable(transform):
            raise ConfigError(f"ResidentLoader: transform={transform!r} is not a function; give one that takes a batch")
        self.batch_size = check_number("ResidentLoader: batch_size", batch_size, least=1)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.transform = transform
        self.seed = check_count("ResidentLoader: seed", seed, least=0, optional=True)
        self.dataset_size = _common_size(data)
        self._device = next(tensors_within(data)).device
        self._together = 1
        self._placed: dict[torch.device, Any] = {}  # shared with the copies that shared_out makes
        self._given = data
        order = SeededOrder(self.dataset_size, shuffle=self.shuffle, seed=self.seed or 0)
        self.sampler: TrainSampler | EvalSampler = TrainSampler(order)
        """The samples of this rank and their order."""

    def shared_out(self, sampler: TrainSampler | EvalSampler, device: torch.device | None) -> ResidentLoader:
        """Returns a copy of this loader with ``sampler`` and with its data on ``device`` (None: their present device)."""
        loader = copy.copy(self)
        loader.sampler = sampler
        loader._device = device or self._device
        loader._data()  # data that do not fit raise here, before the first batch
        return loader

    def gather_together(self, batches: int) -> None:
        """Gathers ``batches`` batches at once from the next iteration on; each is a view of one tensor, with unchanged values."""
        self._together = batches

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        if isinstance(self.sampler, TrainSampler):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        samples = len(self.sampler) + (0 if self.drop_last else self.batch_size - 1)
        return samples // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        gather = _gatherer(self._data())
        indices = self.sampler.indices()
        size = self.batch_size
        transform = self.transform
        end = len(indices) - (len(indices) % size if self.drop_last else 0)
        if self._device.type == "cuda":  # from pinned memory, so that the host does not wait for the copy
            indices = indices.pin_memory().to(self._device, non_blocking=True)
        else:
            indices = indices.to(self._device)
        step = size * self._together
        for start in range(0, end, step):
            for batch in gather(indices[start : min(start + step, end)], size):
                yield batch if transform is None else transform(batch)

    def _data(self) -> Any:
        """Returns the data on the device; moves them there once."""
        if self._device not in self._placed:
            try:
                self._placed[self._device] = move_to_device(self._given, self._device)
            except torch.OutOfMemoryError:
                size = sum(tensor.nbytes for tensor in tensors_within(self._given)) / 2**30
                raise ConfigError(
                    f"ResidentLoader: {size:.2f} GiB of data do not fit on {self._device}; give a part of them, a smaller dtype, "
                    "or torch's DataLoader over a TensorDataset"
                ) from None
        return self._placed[self._device]


def is_resident(loader: Loader) -> bool:
    """Whether ``loader`` is a ResidentLoader, or a combined loader of only these."""
    members = getattr(loader, "flattened", [loader])
    return all(isinstance(member, ResidentLoader) for member in members)


def _gatherer(data: Any) -> Callable[[Tensor, int], Sequence[Any]]:
    """Returns a function (indices, batch size) -> batches of ``data``; the usual forms are recognised once, not per batch."""
    if isinstance(data, Tensor):
        return functools.partial(_gathered, data)
    if type(data) in (tuple, list):
        kind = type(data)
        columns = [_gatherer(part) for part in data]
        return lambda indices, size: [
            kind(batch) for batch in zip(*[gather(indices, size) for gather in columns], strict=True)
        ]
    if type(data) is dict:
        names = list(data)
        columns = [_gatherer(part) for part in data.values()]
        return lambda indices, size: [
            dict(zip(names, batch, strict=True))
            for batch in zip(*[gather(indices, size) for gather in columns], strict=True)
        ]
    return lambda indices, size: [_batch_of(data, indices_of_batch) for indices_of_batch in indices.split(size)]


def _gathered(data: Tensor, indices: Tensor, size: int) -> Sequence[Tensor]:
    samples = data.index_select(0, indices)
    return [samples] if len(indices) <= size else samples.unsafe_split(size)  # autograd does not track them as views


def _batch_of(data: object, indices: Tensor) -> Any:
    return with_parts(data, lambda part: _gatherer(part)(indices, len(indices))[0])


def _checked(value: object) -> Any:
    """Returns ``value``; raises unless it is a tensor with samples along its first dimension, or a collection of these."""
    if not isinstance(value, Tensor):
        if isinstance(value, CONTAINERS) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return with_parts(value, _checked)
        if hasattr(value, "tensors"):
            cure = "*dataset.tensors"
        elif hasattr(value, "__array__"):
            cure = "torch.as_tensor(array)"
        else:
            cure = "tensors, or a collection of tensors"
        raise ConfigError(f"ResidentLoader: {type(value).__name__} among its data is not a tensor; give {cure}")
    if value.layout is not torch.strided or value.is_nested:
        raise ConfigError(
            f"ResidentLoader got a tensor of layout {value.layout}, whose samples cannot be gathered; give a dense one"
        )
    if value.dim() == 0:
        raise ConfigError("ResidentLoader got a tensor without dimensions; the first one counts the samples")
    if value.requires_grad:
        raise ConfigError("ResidentLoader got a tensor that requires gradients; give tensor.detach()")
    return value


def _common_size(data: object) -> int:
    sizes = [len(tensor) for tensor in tensors_within(data)]
    if not sizes:
        raise ConfigError("ResidentLoader got no tensor; give at least one")
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"ResidentLoader got tensors of {sizes} samples; give tensors with equally many along their first dimension"
        )
    return sizes[0]
