"""The effects of a captured step's ``self.log`` calls on the host, and their repetition for a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.engine.graph.batches import NotCapturableError
from fabricamp.metrics.slots import MetricTable
from fabricamp.metrics.values import is_metric

if TYPE_CHECKING:
    from fabricamp.metrics import Metrics
    from fabricamp.metrics.slots import Cell


class LogWatch:
    """Replaces the metrics of a run while a step is watched, and refuses logged values that are not on the device."""

    def __init__(self, metrics: Metrics, step: str) -> None:
        self._metrics = metrics
        self._step = step

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Forwards a tensor on the device or a torchmetrics object to the metrics; raises for any other value."""
        if not is_metric(value) and (not isinstance(value, Tensor) or value.is_cpu):
            kind = "a tensor on the CPU" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise NotCapturableError(
                f"{self._step} calls self.log({call[0]!r}, ...) with {kind}, which a captured step would log for ever; log a "
                "tensor on the device, or log it in the hook after the batch"
            )
        self._metrics.keep(call, value, batch_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)


class LogReplay:
    """Records the weights that a step's ``self.log`` calls give to the values of ``table``, and repeats them for a replay.

    The values themselves are copied by launches of the graph.
    """

    def __init__(self, metrics: Metrics, name: str = MetricTable.TRAINING) -> None:
        self.table = metrics.table(name)
        self._before = {cell: cell.weight for cell in self.table.cells.values()}
        for cell in self._before:
            if _is_set(cell):
                cell.weight = 0
        self._set: list[Cell] = []
        self._added: list[tuple[Cell, int]] = []
        self._bank: Tensor | None = None

    def take(self) -> None:
        """Records the weights that the step has changed since this tape was created."""
        self._bank = self.table.bank
        for cell in self.table.cells.values():
            before = self._before.get(cell, 0)
            if _is_set(cell):
                if cell.weight:
                    self._set.append(cell)
                else:
                    cell.weight = before
            elif cell.weight != before:
                self._added.append((cell, cell.weight - before))

    def undo(self) -> None:
        """Restores the weights from before the step, which did not run on the device."""
        for cell in self.table.cells.values():
            cell.weight = self._before.get(cell, 0)

    def holds(self) -> bool:
        """Whether the table still uses the tensor that the graph writes to."""
        return self.table.bank is self._bank

    @property
    def cells(self) -> list[Cell]:
        """The cells that the step has logged to."""
        return [*self._set, *(cell for cell, _ in self._added)]

    def sums(self) -> list[int]:
        """Returns the weights of the cells that accumulate."""
        return [cell.weight for cell, _ in self._added]

    def sums_behind(self) -> list[int]:
        """Returns the weights of the cells that accumulate, as :meth:`play` will leave them."""
        return [cell.weight + weight for cell, weight in self._added]

    def play(self) -> None:
        """Updates the weights on the host as ``self.log`` does in an eager step."""
        for cell in self._set:
            cell.weight = 1
        for cell, weight in self._added:
            cell.weight += weight


def _is_set(cell: Cell) -> bool:
    """Whether a call sets the weight instead of adding to it: for a per-step value, and for a torchmetrics object."""
    return cell.per_step or cell.metric is not None
