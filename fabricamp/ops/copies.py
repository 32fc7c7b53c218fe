"""Copies small tensors into fixed target tensors by one launch: the batch of a CUDA graph."""

from __future__ import annotations

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


class Copies:
    """Copies tensors into ``targets``, on one device: by one launch if these are few, small and dense, else by one per dtype.

    >>> targets = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    >>> Copies(targets)([torch.ones(2), torch.tensor([3])])
    >>> targets
    [tensor([1., 1.]), tensor([3])]
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = _by_dtype(targets)
        self._kernel: Kernel | None = None
        few = 0 < len(targets) <= _MOST and {torch.strided} == {one.layout for one in targets}
        few = few and {Tensor} == set(map(type, targets)) and sum(one.nbytes for one in targets) <= _BYTES
        if few and runs_kernels(targets[0].device) and all(map(is_dense, targets)):
            self._kernel = kernel("copies", "copies", (), targets[0].device)
        self._kinds = list(map(_kind, targets))
        self._places = [one.data_ptr() for one in targets] if self._kernel is not None else []
        self._sizes = [one.nbytes for one in targets]
        self._rest = (0,) * (3 * (_MOST - len(targets)))

    def __call__(self, sources: Sequence[Tensor]) -> None:
        """Copies each of ``sources`` into its target (of the same shape), without waiting."""
        run = self._kernel
        if run is None or [_kind(one) for one in sources] != self._kinds:
            self._copy_by_torch(sources)
            return
        numbers = self._rest
        for source, place, size in zip(sources, self._places, self._sizes, strict=True):
            numbers = (source.data_ptr(), place, size, *numbers)
        run.launch(_BLOCKS * len(self._places), _THREADS, *numbers)

    @torch.no_grad()
    def _copy_by_torch(self, sources: Sequence[Tensor]) -> None:
        for places, own in self._targets:  # torch copies tensors of mixed dtypes one by one
            torch._foreach_copy_(own, [sources[place] for place in places], non_blocking=True)


def _by_dtype(tensors: Sequence[Tensor]) -> list[tuple[list[int], list[Tensor]]]:
    """Returns, for each dtype, the positions of its tensors in ``tensors`` and the tensors."""
    places: dict[torch.dtype, list[int]] = {}
    for place, one in enumerate(tensors):
        places.setdefault(one.dtype, []).append(place)
    return [(own, [tensors[place] for place in own]) for own in places.values()]


def _kind(one: Tensor) -> tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]] | None:
    """Returns what source and target must have in common to be copied as bytes; None for a subclass without memory of its own."""
    return (one.device, one.dtype, one.shape, one.stride()) if type(one) is Tensor else None
