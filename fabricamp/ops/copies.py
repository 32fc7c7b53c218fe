"""Copies small tensors into fixed target tensors by one launch: the batch of a CUDA graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, kernel, runs_kernels
from fabricamp.ops.layouts import is_dense

_MOST: Final = 4
_BYTES: Final = 2**16
"""Most bytes of all tensors together: torch copies larger ones at the speed of memory, and its launches do not matter then."""
_BLOCKS: Final = 8
_THREADS: Final = 256
_kind: Final = operator.attrgetter("__class__", "device", "dtype", "shape")
"""What source and target have in common, beside their strides, to be copied as bytes: a subclass may have no memory of its own."""


class Copies:
    """Copies tensors into ``targets``, on one device: by one launch if these are few, small and dense, else by one per dtype.

    >>> targets = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    >>> Copies(targets)([torch.ones(2), torch.tensor([3])])
    >>> targets
    [tensor([1., 1.]), tensor([3])]
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        indices_of: dict[torch.dtype, list[int]] = {}
        for index, target in enumerate(targets):
            indices_of.setdefault(target.dtype, []).append(index)
        # For each dtype, the positions of its tensors in targets, and the tensors.
        self._targets = [(indices, [targets[index] for index in indices]) for indices in indices_of.values()]
        self._kernel: Kernel | None = None
        if _are_small(targets) and runs_kernels(targets[0].device):
            self._kernel = kernel("copies", "copies", (), targets[0].device)
        self._kinds = list(map(_kind, targets))
        self._strides: list[tuple[int, ...]] = []
        self._addresses: list[int] = []
        if self._kernel is not None:
            self._strides = list(map(Tensor.stride, targets))
            self._addresses = list(map(Tensor.data_ptr, targets))
        self._sizes = [target.nbytes for target in targets]
        self._unused = (0,) * (3 * (_MOST - len(targets)))

    def __call__(self, sources: Sequence[Tensor]) -> None:
        """Copies each of ``sources`` into its target (of the same shape), without waiting."""
        run = self._kernel
        if (
            run is None
            or list(map(_kind, sources)) != self._kinds
            or list(map(Tensor.stride, sources)) != self._strides
        ):
            self._copy_by_torch(sources)
            return
        numbers = self._unused
        for source, address, size in zip(sources, self._addresses, self._sizes, strict=True):
            numbers = (source.data_ptr(), address, size, *numbers)
        run.launch(_BLOCKS * len(self._addresses), _THREADS, *numbers)

    @torch.no_grad()
    def _copy_by_torch(self, sources: Sequence[Tensor]) -> None:
        for indices, targets in self._targets:  # torch copies tensors of mixed dtypes one by one
            torch._foreach_copy_(targets, [sources[index] for index in indices], non_blocking=True)


def _are_small(targets: Sequence[Tensor]) -> bool:
    """Whether ``targets`` are few, plain, dense, and small together."""
    if not 0 < len(targets) <= _MOST:
        return False
    if any(type(target) is not Tensor or target.layout is not torch.strided for target in targets):
        return False
    return sum(target.nbytes for target in targets) <= _BYTES and all(map(is_dense, targets))
