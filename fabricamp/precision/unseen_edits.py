"""Finds edits of half weights that no version counter shows: through ``.data``, or by a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fabricamp.ops.shards import local
from fabricamp.ops.tensors import note_differences
from fabricamp.torch_private import stream_in_use

WHOLE_LOOKS: Final = 5
"""The number of looks that compare all weights: most programs that edit do so in every step."""
_SHARES: Final = 8
"""A later look compares about one part in as many of the weights: reading all takes a fifth of an update's time."""
_LEAST: Final = 2**20
"""Elements up to which a look always compares all of them."""


class UnseenEdits:
    """Compares half weights with their masters, on their device; with kernels the host never waits for the result.

    The memory for the result is allocated at the first comparison.
    """

    def __init__(self) -> None:
        self._whole_looks = WHOLE_LOOKS
        self._elements = 0
        """The number of elements in all weights."""
        self._begin = 0
        self._end = 0
        """The weights that were compared last: from one index to another."""
        self._flags: Tensor | None = None
        """For each half weight whether it differs, in host memory, which a GPU writes only if one does."""
        self._device: torch.device | None = None
        """That of the weights."""
        self._arrived: torch.cuda.Event | None = None
        """Recorded behind each result, on a GPU."""
        self._is_on_its_way = False
        """Whether a result is on its way to the host."""

    def begin(self, halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Begins a comparison, unless the result of another one is on its way."""
        if self._is_on_its_way:
            return
        device = halves[0].device
        if self._flags is None or self._device != device or len(self._flags) != len(halves):
            self._device = device
            self._flags = torch.zeros(len(halves), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            self._elements = sum(local(half).numel() for half in halves)
            self._end = len(halves)
            self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self._choose(halves)
        compared = slice(self._begin, self._end)
        note_differences(list(map(local, masters[compared])), list(map(local, halves[compared])), self._flags[compared])
        if self._arrived is not None:
            self._arrived.record(stream_in_use(device))
            self._is_on_its_way = True

    def _choose(self, halves: Sequence[Tensor]) -> None:
        """Sets the weights for the next comparison: all at first, then a share that follows the last one."""
        if self._whole_looks > 0 or self._elements <= _LEAST:
            self._whole_looks -= 1
            self._begin = 0
            self._end = len(halves)
            return
        self._begin = self._end if self._end < len(halves) else 0
        self._end = self._begin
        share = max(self._elements // _SHARES, _LEAST)
        elements = 0
        while self._end < len(halves) and elements < share:
            elements += local(halves[self._end]).numel()
            self._end += 1

    def found(self) -> int | None:
        """Returns the index of the first half weight that differs from its master; None if none does, or it is not known yet."""
        if self._flags is None or (self._arrived is not None and not self._arrived.query()):
            return None
        self._is_on_its_way = False
        flags = self._flags.tolist()
        if 1 not in flags:
            return None
        self._flags.zero_()  # the next look may compare others
        return flags.index(1)
