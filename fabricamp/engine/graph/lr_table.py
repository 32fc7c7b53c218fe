"""Learning rates of steps that are launched together: predicted on the host, selected on the device by each step's status."""

from __future__ import annotations

import copy
import operator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.uploads import upload
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.loss_scaler import LAG

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer

    from fabricamp.engine.schedules import Schedules
    from fabricamp.precision.step_results import StepResults
    from fabricamp.state import RunState

_APPLIED: Final = ops.StepState.word("applied")
_BEHIND: Final = LAG + 1
"""Number of rows before those of the launch's steps: before a step, schedules know the status of all steps but the last ``LAG``."""


class LrTable:
    """A table of the optimizer's values (learning rate and others) in each of the next ``steps`` steps, from the schedules.

    If the schedules follow applied steps, ``verdicts`` has the run's step statuses, and a step's row is the number of applied
    steps, since the launch, that the schedulers know of.  Else the row is the number of the step in the launch.
    """

    def __init__(
        self, optimizer: Optimizer, schedules: Schedules, state: RunState, verdicts: StepResults | None, steps: int
    ) -> None:
        self._optimizer = optimizer
        self._schedules = schedules
        self._state = state
        self._verdicts = verdicts if verdicts is not None and verdicts.schedules_follow else None
        self._steps = steps
        self._places = _places(optimizer)
        self._tables = [torch.zeros(steps + 1, one.numel(), dtype=one.dtype, device=one.device) for one in self._places]
        self._uploaded = b""
        self._looked = False
        self._foreseen: list[list[Any]] = []
        self._begun = 0
        if self._verdicts is not None:
            device = self._verdicts.scaler.ring.device
            self._behind = torch.arange(-_BEHIND, 0, dtype=torch.int32, device=device)
            self._rows = torch.zeros(_BEHIND + steps, dtype=torch.int32, device=device)
            self._first = torch.zeros((), dtype=torch.int32, device=device)

    def hold(self) -> bool:
        """Whether schedules still follow steps, and the optimizer's values on the device still have the same addresses."""
        places = _places(self._optimizer)
        return (
            self._schedules.follow_steps
            and len(places) == len(self._places)
            and all(map(operator.eq, map(Tensor.data_ptr, places), map(Tensor.data_ptr, self._places)))
        )

    # -- on the host, before and after a launch ----------------------------------------------------------------------------------

    def foresee(self) -> None:
        """Uploads the values of the next steps, computed with copies of the schedulers, which themselves advance as usual."""
        self._begun = self._stepped()
        self._foreseen = []
        numbers = _numbers_of(self._optimizer)
        for row, groups in enumerate(self._groups()):
            found = numbers(groups)
            self._foreseen.append([None if isinstance(one, Tensor) else one for one in found])
            self._bring_tensors(row, found)
        if None not in self._foreseen[0]:
            self._upload(np.asarray(self._foreseen[: self._steps], np.float64))

    def _upload(self, values: np.ndarray) -> None:
        content = values.tobytes()
        if content != self._uploaded:
            self._uploaded = content
            for table in self._tables:
                upload(values, table[: self._steps])

    def _bring_tensors(self, row: int, found: list[float | Tensor]) -> None:
        for table, one in zip(self._tables, found, strict=False):
            if isinstance(one, Tensor):
                table[row].copy_(one.reshape(1), non_blocking=True)

    def _groups(self) -> Iterator[Sequence[dict[str, Any]]]:
        """Yields the optimizer's groups before each of the next steps and after the last, if all of these are applied."""
        twins, groups = _twins(self._optimizer, self._schedules)
        yield groups
        for done in range(self._begun + 1, self._begun + self._steps + 1):
            for scheduler, frequency in twins:
                if done % frequency == 0:
                    scheduler.step()
            yield groups

    def _stepped(self) -> int:
        """Returns the number of steps that the schedules know of."""
        return self._state.global_step if self._verdicts is None else self._verdicts.applied_steps

    def leave(self) -> None:
        """Resets the values on the device after a launch, which has overwritten them: the schedules advance from those before."""
        if isinstance(self._optimizer, FusedOptimizer):
            for table in self._optimizer.tables:
                table.forget_scalars()
            return
        for place, rates in zip(self._places, self._tables, strict=True):
            place.copy_(rates[0])

    def check(self) -> None:
        """Raises if the schedules, advanced by the steps of a launch, differ from the prediction.

        Learning rates in tensors are only compared after the first launch, since that waits for the device.
        """
        row = self._stepped() - self._begun
        found = _numbers_of(self._optimizer)(self._optimizer.param_groups)
        same = [None if isinstance(one, Tensor) else one for one in found] == self._foreseen[row]
        if not self._looked and None in self._foreseen[row]:
            same = same and all(
                torch.equal(one, table[row]) for one, table in zip(self._places, self._tables, strict=True)
            )
        self._looked = True
        if not same:
            raise ConfigError(
                "cuda_graph: a schedule came to other numbers than its copy did before the launch, so it depends on more than its "
                "own steps; give CudaGraph(steps=1)"
            )

    # -- on the device, captured in the launch -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reads, before the first step, the number of applied steps before each of the steps that schedules do not know of yet."""
        if self._verdicts is None:
            return
        state, ring = self._verdicts.scaler.state, self._verdicts.scaler.ring
        slots = (self._behind + (state.applied + state.skipped)) % len(ring)
        applied = ring[:, _APPLIED].index_select(0, slots)
        self._first.copy_(applied[0])
        torch.sub(applied, self._first, out=self._rows[:_BEHIND])

    def bring(self, number: int) -> None:
        """Copies the values for a step of the launch to the optimizer."""
        for place, table in zip(self._places, self._tables, strict=True):
            if self._verdicts is None:
                place.copy_(table[number])
            else:
                torch.index_select(table, 0, self._rows[number : number + 1], out=place.view(1, -1))

    def note(self, number: int) -> None:
        """Records, after a step, the number of applied steps."""
        if self._verdicts is not None:
            torch.sub(self._verdicts.scaler.state.applied, self._first, out=self._rows[number + _BEHIND])


def _places(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors, flat, from which a step reads its hyper-parameters on the device."""
    if isinstance(optimizer, FusedOptimizer):
        return [one.scalars.view(-1) for one in optimizer.tables]
    return [group["lr"].view(1) for group in optimizer.param_groups]


def _numbers_of(optimizer: Optimizer) -> Any:
    return optimizer.numbers if isinstance(optimizer, FusedOptimizer) else lambda groups: [one["lr"] for one in groups]


def _twins(optimizer: Optimizer, schedules: Schedules) -> tuple[list[tuple[Any, int]], list[dict[str, Any]]]:
    """Returns (copies of the step schedulers with their frequencies, copies of the optimizer's groups that they work on).

    The module is not copied; a schedule may call its methods.
    """
    groups = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    stand_in = SimpleNamespace(param_groups=groups, step=optimizer.step, _opt_called=True)
    memory: dict[int, Any] = {id(getattr(one.scheduler, "optimizer", optimizer)): stand_in for one in schedules.by_step}
    memory[id(schedules.module)] = schedules.module
    return [(copy.deepcopy(one.scheduler, memory), one.frequency) for one in schedules.by_step], groups
