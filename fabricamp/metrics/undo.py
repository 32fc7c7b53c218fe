"""What ``self.log`` and torchmetrics objects keep, noted before a part of a micro-batch, and put back if the part fails.

:class:`LogUndo` also joins the step values of the parts: they are those of the whole micro-batch then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.metrics.slots import MetricTable
from fabricamp.metrics.values import is_metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fabricamp.metrics.collection import Metrics
    from fabricamp.metrics.slots import Cell
    from fabricamp.metrics.values import TorchMetric

_COUNTS: Final = ("_update_count", "_computed", "_forward_cache", "_cache")


class LogUndo:
    """The logged values of training, and the states of the torchmetrics objects in ``module``, before a part of a micro-batch."""

    def __init__(self, metrics: Metrics, module: nn.Module) -> None:
        self._table = metrics.table(MetricTable.TRAINING)
        self._objects: list[TorchMetric] = [one for one in module.modules() if is_metric(one)]
        self._bank: Tensor | None = None
        self._cells: dict[Cell, tuple[Any, ...]] = {}
        self._states: list[tuple[TorchMetric, str, Any, Any]] = []
        self._counts: list[dict[str, Any]] = []
        self._of_parts: dict[Cell, list[tuple[float, Any]]] = {}
        self._weights: dict[Cell, int] = {}

    @torch.no_grad()
    def note(self) -> None:
        """Notes the present values; on a GPU a copy of some hundred bytes, and of each object's states."""
        bank = self._table.bank
        if self._bank is None or self._bank.shape != bank.shape:
            self._bank = bank.clone()
        else:
            self._bank.copy_(bank)
        cells = self._table.cells.values()
        self._cells = {cell: (cell.number, cell.weight, cell.sent, cell.computed) for cell in cells}
        self._states = [
            (metric, name, state, list(state) if isinstance(state, list) else state.clone())
            for metric in self._objects
            for name in metric._defaults
            for state in (getattr(metric, name),)
        ]
        self._counts = [
            {name: vars(metric)[name] for name in _COUNTS if name in vars(metric)} for metric in self._objects
        ]

    @torch.no_grad()
    def undo(self) -> None:
        """Puts the noted values back; values that were logged for the first time since count as not logged."""
        assert self._bank is not None
        for place, cell in enumerate(self._table.cells.values()):
            noted = self._cells.get(cell)
            if noted is None:
                cell.clear()
                continue
            cell.number, cell.weight, cell.sent, cell.computed = noted
            cell.tensor.copy_(self._bank[place])
        for metric, name, state, noted_state in self._states:
            if isinstance(state, list):
                state[:] = noted_state
            else:
                state.copy_(noted_state)
            setattr(metric, name, state)
        for metric, counts in zip(self._objects, self._counts, strict=True):
            vars(metric).update(counts)

    # -- the step values of several parts ----------------------------------------------------------------------------------------

    def begin_parts(self) -> None:
        """Begins a micro-batch that is run in parts."""
        self._of_parts = {}
        self._weights = {cell: cell.weight for cell in self._step_cells()}
        self._hide()

    def take_part(self, share: float) -> None:
        """Takes the step values that a part has logged, which is this ``share`` of the samples."""
        for cell in self._step_cells():
            if cell.weight:
                value = cell.tensor.clone() if cell.weight > 0 else cell.number
                self._of_parts.setdefault(cell, []).append((share, value))
        self._hide()

    @torch.no_grad()
    def join_parts(self) -> None:
        """Sets the step values to those of the whole micro-batch: means by samples, sums, or extremes."""
        for cell in self._step_cells():
            parts = self._of_parts.get(cell)
            if parts is None:
                cell.weight = self._weights.get(cell, 0)
                continue
            joined = _joined(cell.published.mode, parts)
            if isinstance(joined, Tensor):
                cell.tensor.copy_(joined)
                cell.weight = 1
            else:
                cell.number = joined
                cell.weight = -1
        self._of_parts = {}

    def _step_cells(self) -> list[Cell]:
        return [cell for cell in self._table.cells.values() if cell.per_step]

    def _hide(self) -> None:
        """Marks step values as not logged: whatever is logged from here on is the next part's."""
        for cell in self._step_cells():
            cell.weight = 0


def _joined(mode: str, parts: Sequence[tuple[float, Any]]) -> Any:
    values = [value for _, value in parts]
    if mode == "sum":
        return sum(values[1:], values[0])
    if mode in ("min", "max"):
        if not any(isinstance(value, Tensor) for value in values):
            return min(values) if mode == "min" else max(values)
        stacked = torch.stack([torch.as_tensor(one, dtype=torch.float64, device=_device_of(values)) for one in values])
        return stacked.amin() if mode == "min" else stacked.amax()
    whole = sum(share for share, _ in parts)
    weighted = [value * (share / whole) for share, value in parts]
    return sum(weighted[1:], weighted[0])


def _device_of(values: Sequence[Any]) -> torch.device:
    return next(value.device for value in values if isinstance(value, Tensor))
