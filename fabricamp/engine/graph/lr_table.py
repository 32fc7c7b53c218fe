"""Learning rates of steps that are launched together: predicted on the host, selected on the device by each step's status.

The methods of :class:`LrTable` are called in this order: ``predict`` before a launch; within it ``begin``, and ``write`` and
``note_applied`` for each step; after it ``restore``, and ``check`` once the schedules have advanced.
"""

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

    from fabricamp._utils.types import ParamGroup
    from fabricamp.engine.schedules import Schedules
    from fabricamp.precision.step_results import StepResults
    from fabricamp.state import RunState

_APPLIED: Final = ops.StepState.word("applied")
_ROWS_BEFORE: Final = LAG + 1
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
        self._targets = _device_values(optimizer)
        # One table per tensor that a step reads: a row per step, and one for after the last.
        self._tables = [
            torch.zeros(steps + 1, one.numel(), dtype=one.dtype, device=one.device) for one in self._targets
        ]
        self._uploaded = b""
        self._predicted: list[list[Any]] = []
        """The values of each row; None for a learning rate in a tensor, which only the tables have."""
        self._compared_tensors = False
        self._steps_before = 0
        """The number of steps that the schedules knew of before the launch."""
        if self._verdicts is not None:
            device = self._verdicts.scaler.ring.device
            self._slots_back = torch.arange(-_ROWS_BEFORE, 0, dtype=torch.int32, device=device)
            self._rows = torch.zeros(_ROWS_BEFORE + steps, dtype=torch.int32, device=device)
            self._first_applied = torch.zeros((), dtype=torch.int32, device=device)

    def is_valid(self) -> bool:
        """Whether schedules still follow steps, and the optimizer's values on the device still have the same addresses."""
        targets = _device_values(self._optimizer)
        return (
            self._schedules.follow_steps
            and len(targets) == len(self._targets)
            and all(map(operator.eq, map(Tensor.data_ptr, targets), map(Tensor.data_ptr, self._targets)))
        )

    # -- on the host, before and after a launch ----------------------------------------------------------------------------------

    def predict(self) -> None:
        """Uploads the values of the next steps, computed with copies of the schedulers, which themselves advance as usual."""
        self._steps_before = self._known_steps()
        self._predicted = []
        numbers = _numbers_of(self._optimizer)
        for row, groups in enumerate(self._future_groups()):
            values = numbers(groups)
            self._predicted.append([None if isinstance(value, Tensor) else value for value in values])
            for table, value in zip(self._tables, values, strict=False):
                if isinstance(value, Tensor):
                    table[row].copy_(value.reshape(1), non_blocking=True)
        if None not in self._predicted[0]:
            self._upload(np.asarray(self._predicted[: self._steps], np.float64))

    def _upload(self, values: np.ndarray) -> None:
        """Uploads the rows, unless the tables have them."""
        content = values.tobytes()
        if content != self._uploaded:
            self._uploaded = content
            for table in self._tables:
                upload(values, table[: self._steps])

    def _future_groups(self) -> Iterator[Sequence[ParamGroup]]:
        """Yields the optimizer's groups before each of the next steps and after the last, if all of these are applied."""
        schedulers, groups = _copies(self._optimizer, self._schedules)
        yield groups
        for done in range(self._steps_before + 1, self._steps_before + self._steps + 1):
            for scheduler, frequency in schedulers:
                if done % frequency == 0:
                    scheduler.step()
            yield groups

    def _known_steps(self) -> int:
        """Returns the number of steps that the schedules know of."""
        return self._state.global_step if self._verdicts is None else self._verdicts.applied_steps

    def restore(self) -> None:
        """Restores the device's values from before the launch, which has overwritten them: the schedules advance from those."""
        if isinstance(self._optimizer, FusedOptimizer):
            for table in self._optimizer.tables:
                table.forget_scalars()
            return
        for target, rows in zip(self._targets, self._tables, strict=True):
            target.copy_(rows[0])

    def check(self) -> None:
        """Raises if the schedules, advanced by the steps of a launch, differ from the prediction.

        Learning rates in tensors are only compared after the first launch, since that waits for the device.
        """
        row = self._known_steps() - self._steps_before
        values = _numbers_of(self._optimizer)(self._optimizer.param_groups)
        same = [None if isinstance(value, Tensor) else value for value in values] == self._predicted[row]
        if not self._compared_tensors and None in self._predicted[row]:
            same = same and all(
                torch.equal(target, table[row]) for target, table in zip(self._targets, self._tables, strict=True)
            )
        self._compared_tensors = True
        if not same:
            raise ConfigError(
                "cuda_graph: a schedule gave other learning rates than its copy did before the launch: it depends on more than its "
                "own steps; give CudaGraph(steps=1)"
            )

    # -- on the device, captured in the launch -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first step, reads how many steps were applied before each step that the schedules do not know of yet."""
        if self._verdicts is None:
            return
        state = self._verdicts.scaler.state
        ring = self._verdicts.scaler.ring
        slots = (self._slots_back + (state.applied + state.skipped)) % len(ring)
        applied = ring[:, _APPLIED].index_select(0, slots)
        self._first_applied.copy_(applied[0])
        torch.sub(applied, self._first_applied, out=self._rows[:_ROWS_BEFORE])

    def write(self, number: int) -> None:
        """Copies the values for a step of the launch to the optimizer."""
        for target, table in zip(self._targets, self._tables, strict=True):
            if self._verdicts is None:
                target.copy_(table[number])
            else:
                torch.index_select(table, 0, self._rows[number : number + 1], out=target.view(1, -1))

    def note_applied(self, number: int) -> None:
        """Records, after a step, the number of applied steps."""
        if self._verdicts is not None:
            applied = self._verdicts.scaler.state.applied
            torch.sub(applied, self._first_applied, out=self._rows[number + _ROWS_BEFORE])


def _device_values(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors, flat, from which a step reads its hyper-parameters on the device."""
    if isinstance(optimizer, FusedOptimizer):
        return [table.scalars.view(-1) for table in optimizer.tables]
    return [group["lr"].view(1) for group in optimizer.param_groups]


def _numbers_of(optimizer: Optimizer) -> Any:
    """Returns the function from an optimizer's groups to the values that a step reads on the device."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.numbers
    return lambda groups: [group["lr"] for group in groups]


def _copies(optimizer: Optimizer, schedules: Schedules) -> tuple[list[tuple[Any, int]], list[dict[str, Any]]]:
    """Returns (copies of the step schedulers with their frequencies, copies of the optimizer's groups that they work on).

    The module is not copied; a schedule may call its methods.
    """
    groups = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    stand_in = SimpleNamespace(param_groups=groups, step=optimizer.step, _opt_called=True)
    memo: dict[int, Any] = {id(getattr(one.scheduler, "optimizer", optimizer)): stand_in for one in schedules.by_step}
    memo[id(schedules.module)] = schedules.module
    return [(copy.deepcopy(one.scheduler, memo), one.frequency) for one in schedules.by_step], groups
