"""Copies gradients, at whatever addresses backward left them, into slots with fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.table import Table
from fabricamp.ops.tensors import scale


class Gather:
    """Writes tensors, cast and multiplied, into ``slots`` on one device, by one launch for all of them.

    The slots are laid out once; the source tensors may have new addresses in each call.

    >>> slots = torch.zeros(4).split([3, 1])
    >>> Gather(slots)([torch.ones(3), None], 0.5)
    >>> slots[0].tolist(), slots[1].tolist()
    ([0.5, 0.5, 0.5], [0.0])
    """

    def __init__(self, slots: Sequence[Tensor]) -> None:
        self._slots = list(slots)
        self._table: Table | None = None
        if self._slots and runs_kernels(self._slots[0].device):
            self._table = Table([[None] * len(self._slots), self._slots], device=self._slots[0].device)

    def __call__(self, sources: Sequence[Tensor | None], multiplier: float = 1.0) -> None:
        """Writes ``multiplier`` times each source into its slot, in at least fp32 arithmetic; None leaves its slot unchanged.

        A source may be its slot.
        """
        if self._table is not None:
            self._table.refresh(sources)
            self._table.launch("tensors", "scale", None, float(multiplier), -1.0)
            self._table.release()
            return
        pairs = [(source, slot) for source, slot in zip(sources, self._slots, strict=True) if source is not None]
        scale([source for source, _ in pairs], [slot for _, slot in pairs], multiplier)
