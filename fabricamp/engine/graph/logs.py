"""What the ``self.log`` calls of a captured step leave on the host, and how a replay leaves the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.engine.graph.batches import NotCapturableError

if TYPE_CHECKING:
    from fabricamp.metrics import Metrics
    from fabricamp.metrics.slots import Cell


class LogWatch:
    """Stands before the metrics of a run while a step is watched: what it logs has to lie on the device."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Keeps a tensor on the device, and refuses anything else."""
        if not isinstance(value, Tensor) or value.is_cpu:
            kind = "a tensor on the CPU" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise NotCapturableError(
                f"training_step calls self.log({call[0]!r}, ...) with {kind}, which a captured step would log for ever; log a "
                "tensor on the device, or log it in on_train_batch_end"
            )
        self._metrics.keep(call, value, batch_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)


class LogTape:
    """The weights that a step's ``self.log`` calls give to values: its copies into them are launches of the graph."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before = {cell: cell.weight for cell in metrics.training_table.cells.values()}
        for cell in self._before:
            if cell.per_step:
                cell.weight = 0
        self._steps: list[Cell] = []
        self._epochs: list[tuple[Cell, int]] = []
        self._bank: Tensor | None = None

    def take(self) -> None:
        """Notes what the step has logged since."""
        table = self._metrics.training_table
        self._bank = table.bank
        for cell in table.cells.values():
            before = self._before.get(cell, 0)
            if not cell.per_step and cell.weight != before:
                self._epochs.append((cell, cell.weight - before))
            elif cell.per_step and cell.weight:
                self._steps.append(cell)
            elif cell.per_step:
                cell.weight = before

    def undo(self) -> None:
        """Forgets what the step has logged: it did not run."""
        for cell in self._metrics.training_table.cells.values():
            cell.weight = self._before.get(cell, 0)

    def holds(self) -> bool:
        """Whether the values still lie where the graph writes them."""
        return self._metrics.training_table.bank is self._bank

    def play(self) -> None:
        """Does on the host what ``self.log`` does in an eager step."""
        for cell in self._steps:
            cell.weight = 1
        for cell, weight in self._epochs:
            cell.weight += weight
