"""Small tensors into others that stay where they are, by one launch: a batch on its way into a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, kernel, runs_kernels
from fabricamp.ops.layouts import is_dense

_MOST: Final = 4
_BYTES: Final = 2**16
"""Of all tensors together, at most: larger ones are copied at the speed of memory by torch, whose launches do not count then."""
_BLOCKS: Final = 8
_THREADS: Final = 256


class Copies:
    """Copies tensors into ``targets``, on one device: by one launch where these are few, small and dense, else one a dtype.

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
        """Copies each of ``sources`` into its target, whose shape it has, without a wait."""
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
    """Returns the tensors of each dtype, and their places among all."""
    places: dict[torch.dtype, list[int]] = {}
    for place, one in enumerate(tensors):
        places.setdefault(one.dtype, []).append(place)
    return [(own, [tensors[place] for place in own]) for own in places.values()]


def _kind(one: Tensor) -> tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]] | None:
    """What has to be as its target's for the bytes to be; None for what may stand for a tensor that is elsewhere."""
    return (one.device, one.dtype, one.shape, one.stride()) if type(one) is Tensor else None
