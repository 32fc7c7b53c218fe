"""Several steps in one graph, each with separate inputs, outputs and logged values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.containers import with_parts
from fabricamp.engine.graph.batches import tensors_of
from fabricamp.engine.graph.captured_step import CapturedStep
from fabricamp.engine.graph.logs import LogReplay
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fabricamp.engine.graph.lr_table import LrTable
    from fabricamp.engine.graph.window import Role
    from fabricamp.metrics import Metrics


class CapturedGroup(CapturedStep):
    """The steps of one launch, captured in one graph.

    ``single`` is the graph of one such step; it has the host's work after each step.  ``rates`` is None unless a schedule follows
    steps.  ``shows_logs``: each step's logged values are restored before its hooks run.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: list[Any],
        role: Role,
        metrics: Metrics,
        single: CapturedStep,
        *,
        rates: LrTable | None,
        shows_logs: bool,
    ) -> None:
        super().__init__(module, inputs, role, LogReplay(metrics), None)
        self.rates = rates
        self.notes: list[Callable[[], None]] = []
        """One callback per step; it records which parameters the step's gradient statistics belong to."""
        self._single = single
        self._steps = len(inputs)
        self._each: list[list[Tensor]] = []
        self._stacked: list[Tensor] = []
        self._rows: list[tuple[Tensor, ...]] = []
        self._names: tuple[str, ...] | None = None
        """The keys of the outputs, if they are a dict of tensors: a fast path for the usual form."""
        self._metrics = metrics
        self._sums: list[int] = []
        self._number = self._shown = 0
        self._places: Tensor | None = None
        if shows_logs and single.tape.cells:
            table = single.tape.table
            index = {cell: number for number, cell in enumerate(table.cells.values())}
            places = [index[cell] for cell in single.tape.cells]
            self._places = torch.tensor(places, dtype=torch.int64, device=table.device)
            self._logged = torch.zeros(self._steps, len(places), dtype=torch.float64, device=table.device)

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which calls :meth:`keep` after each step; restores the host's state."""
        super().capture(run, stream, pool)
        self.tape.undo()
        self.metric_states.withdraw()
        if type(self.outputs) is dict and all(isinstance(one, Tensor) for one in self.outputs.values()):
            self._names = tuple(self.outputs)

    def keep(self, number: int, outputs: Any) -> None:
        """Captures copies of a step's outputs and logged values, which the next step overwrites."""
        self.metric_states.settle()
        if outputs is not None:
            self._each.append(tensors_of(outputs))
        if self._places is not None:
            torch.index_select(self._single.tape.table.bank, 0, self._places, out=self._logged[number])
        if number == self._steps - 1:  # stacked, so that launch() copies an output of all steps by one clone
            self._stacked = [torch.stack(column) for column in zip(*self._each, strict=True)]
            self._each.clear()

    def fits(self) -> bool:
        """Also checks that the learning-rate table is still valid."""
        return super().fits() and (self.rates is None or self.rates.hold())

    def launch(self, batch: list[Any]) -> None:
        """Runs one step per batch, all in one replay."""
        super().launch(batch)
        self._rows = list(zip(*[one.clone().unbind() for one in self._stacked], strict=True))

    def follow_one(self, number: int) -> Any:
        """Does the host's work after a step of the launch; returns the step's outputs."""
        if self.notes:
            self.notes[number]()
        if self._places is not None:
            self._follow_logs(number)
        self._single.count()
        return None if self.outputs is None else self._outputs_of(number)

    def _outputs_of(self, number: int) -> Any:
        row = self._rows[number] if self._rows else ()
        if self._names is not None:
            return dict(zip(self._names, row, strict=True))
        return _filled(self.outputs, iter(row))

    # -- logged values, one row a step -------------------------------------------------------------------------------------------

    def _follow_logs(self, number: int) -> None:
        tape = self._single.tape
        if number and tape.sums() != self._sums:
            names = ", ".join(sorted({repr(cell.published.key) for cell in tape.cells}))
            raise ConfigError(
                f"cuda_graph: a batch hook logs what training_step logs too (one of {names}), which would be in another order "
                "in a launch of several steps; log it under a name of its own, or give CudaGraph(steps=1)"
            )
        self._sums = tape.sums_behind()
        self._number = number
        if number == 0:
            self._shown, self._metrics.before_look = self._steps - 1, self._show_logs
        elif number == self._steps - 1:
            self._show_logs()
            self._metrics.before_look = None

    def _show_logs(self) -> None:
        """Writes the current step's logged values into the bank, where a launch leaves those of its last step."""
        if self._shown != self._number and self._places is not None:
            self._single.tape.table.bank.index_copy_(0, self._places, self._logged[self._number])
            self._shown = self._number


def _filled(outputs: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns ``outputs`` with its tensors replaced, in the order of :func:`~fabricamp.engine.graph.batches.tensors_of`."""
    if isinstance(outputs, Tensor):
        return next(tensors)
    return with_parts(outputs, lambda part: _filled(part, tensors))
