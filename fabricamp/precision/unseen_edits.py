"""Finds edits of half weights that no version counter shows: through ``.data``, or by a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fabricamp.ops.shards import local
from fabricamp.ops.tensors import note_differences
from fabricamp.torch_private import stream_in_use


class UnseenEdits:
    """Compares half weights with their masters, on their device; the host never waits for the result.

    The memory for the result is allocated at the first comparison.
    """

    def __init__(self) -> None:
        self._flags: Tensor | None = None
        """For each half weight whether it differs, on its device."""
        self._on_host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        """Set on a GPU while a result is on its way to the host."""

    def begin(self, halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Begins a comparison, unless the result of another one is on its way."""
        if self._arrived is not None:
            return
        device = local(halves[0]).device
        if self._flags is None or self._flags.device != device or len(self._flags) != len(halves):
            self._flags = torch.zeros(len(halves), dtype=torch.int32, device=device)
            self._on_host = torch.zeros(len(halves), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        note_differences(list(map(local, masters)), list(map(local, halves)), self._flags)
        assert self._on_host is not None
        self._on_host.copy_(self._flags, non_blocking=True)
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream_in_use(device))

    def found(self) -> int | None:
        """Returns the index of the first half weight that differs from its master; None if none does, or it is not known yet."""
        if self._on_host is None or (self._arrived is not None and not self._arrived.query()):
            return None
        self._arrived = None
        flags = self._on_host.tolist()
        return flags.index(1) if 1 in flags else None
