"""The status of each step (applied or skipped): decided on the device, read by the host two steps later."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.precision.loss_scaler import SLOTS, LossScaler, Overflow, StepStatus
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp.precision.stepper import ParamGradMap


# ~~~ from precision.loss_watch: The policies for non-finite gradients and losses, and the messages about them.


logger = logging.getLogger("fabricamp")

NAN_POLICIES: Final = ("skip", "stop", "raise")
_MOST_NAMES: Final = 5


def described(overflow: Overflow, names: Sequence[str], step: int) -> str:
    """Returns a sentence that names the parameters, the ``step`` (a ``global_step``), the loss and the scale of an overflow."""
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return (
        f"the gradients{' of ' if names else ''}{shown} were not finite at step {step} (loss {overflow.loss:g}, "
        f"loss scale {overflow.scale:g})"
    )


class LossWatch:
    """Receives logged values and warns once per loss if it is not finite; used if nothing checks the gradients.

    A logged value counts as a loss if its name contains "loss".
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        """Checks the values of a flush."""
        for name, value in values.items():
            if math.isfinite(value) or "loss" not in name.lower() or name in self._told:
                continue
            self._told.add(name)
            logger.warning(
                "%s is %g at step %d, and training goes on; Trainer(nan_policy='stop') or 'raise' ends it at the first "
                "gradient that is not finite, with the weights from before and the parameter's name",
                name, value, step,
            )  # fmt: skip


class StepResults:
    """The step statuses of a Precision that may skip steps: for overflow, or by ``policy`` for any non-finite gradient.

    ``policy`` is the Trainer's ``nan_policy``: "skip", "stop" or "raise"; None: the level's own behaviour.
    ``dynamic``: whether the loss scale is dynamic.
    ``schedules_follow``: learning-rate schedules count applied steps; False if the first skipped step ends the run.
    """

    def __init__(self, scaler: LossScaler, policy: str | None, *, dynamic: bool) -> None:
        self.scaler = scaler
        self.policy = policy
        self.dynamic = dynamic
        self.schedules_follow = dynamic or policy == "skip"
        self._module: nn.Module | None = None
        self._strategy = Strategy()
        self._bindings: Sequence[ParamGradMap] = ()
        self._numbers_each = 1
        self._first: tuple[int, Tensor | None] | None = None

    @property
    def scale(self) -> float:
        """The loss scale in the last status that the host has read; does not wait."""
        return self.scaler.known.scale

    @property
    def applied_steps(self) -> int:
        """The number of applied steps in the last status that the host has read; does not wait."""
        return self.scaler.known.applied_steps

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps in the last status that the host has read; does not wait."""
        return self.scaler.known.skipped_steps

    @property
    def applied_on_device(self) -> Tensor:
        """The number of applied steps, as a device tensor, up to date before the host reads it; later steps change it."""
        return self.scaler.state.applied

    @property
    def window_tensors(self) -> list[Tensor]:
        """The device state of an accumulation in progress beside its gradients: one struct per loss if there are several."""
        losses = self.scaler.losses
        return [one.words for one in losses] if len(losses) > 1 else []

    def follow(
        self, module: nn.Module, strategy: Strategy, bindings: Sequence[ParamGradMap], numbers_each: int
    ) -> None:
        """Stores module, strategy and bindings; each binding has a range of ``numbers_each`` statistic numbers."""
        self._module, self._strategy, self._bindings, self._numbers_each = module, strategy, bindings, numbers_each
        self._first = None

    def widen(self, steps: int) -> None:
        """Makes room for the statuses of ``steps`` steps per launch; call it before the first batch."""
        self.scaler.widen(steps + SLOTS)
        for binding in self._bindings:
            binding.nonfinite_tracker.widen(steps + SLOTS)

    def leave(self) -> None:
        """Drops module and optimizers after a run; the step statuses stay."""
        self._module, self._bindings = None, ()

    def close_window(self, loss: Tensor | None) -> StepStatus | None:
        """Finishes a step; returns the status of the step two steps ago, None before there is one."""
        self.launch_close(loss)
        return self.note_closed()

    def launch_close(self, loss: Tensor | None) -> None:
        """Updates the scales and records the status on the device, unless an optimizer step did so in its own launch."""
        losses = self.scaler.losses
        if len(losses) > 1 and self._strategy.distributed:
            _agree([one.finite for one in losses], self._strategy)
        self.scaler.launch_close(loss)

    def repeated(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Returns a callback to run after each replay of the last step of ``optimizer``; None if it took no statistics.

        The callback records which parameters the statistics belong to.
        """
        scaler = self.scaler
        nonfinite_tracker = next(
            binding.nonfinite_tracker for binding in self._bindings if binding.optimizer is optimizer
        )
        stats_record = nonfinite_tracker.stats_record
        return None if stats_record is None else lambda: nonfinite_tracker.note(scaler.windows, stats_record)

    def keep_statistics(self, optimizer: Optimizer) -> None:
        """Copies the statistics of the last step of ``optimizer``, during capture, to memory that no other graph writes."""
        next(binding.nonfinite_tracker for binding in self._bindings if binding.optimizer is optimizer).keep()

    def note_closed(self) -> StepStatus | None:
        """Counts the step and returns the status that is due; launches nothing."""
        verdict = self.scaler.note_closed()
        if verdict is not None and not verdict.applied:
            self._look_at(self.scaler.overflow)
        return verdict

    def drain(self) -> list[StepStatus]:
        """Returns the statuses that :meth:`close_window` has not returned yet; waits for the device.

        :meth:`close_window` still returns them later.
        """
        return self.scaler.pending()

    def explain(self, global_step: int) -> str:
        """Returns a sentence that names the non-finite gradients of the overflow that ends the run; waits for the device."""
        scaler = self.scaler
        if self._module is None:
            return ""
        if self.policy == "stop":
            scaler.settle()
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        blamed = [names[id(one)] for one in self._blamed(scaler.overflow) if id(one) in names]
        return described(scaler.overflow, blamed, global_step - 1 - scaler.windows_since(scaler.overflow))

    def _look_at(self, overflow: Overflow) -> None:
        """Finds the parameter of an overflow's lowest non-finite statistic, before its ring slot is overwritten."""
        if self._first is not None and self._first[0] == overflow.window:
            return
        first = None
        if self._bindings and overflow.chunk >= 0:
            number, index = divmod(overflow.chunk, self._numbers_each)
            first = self._bindings[number].nonfinite_tracker.target(index, self.scaler.slot_of(overflow))
        self._first = overflow.window, first

    def _blamed(self, overflow: Overflow) -> list[Tensor]:
        """Returns the model parameters with non-finite gradients: the overflow's first, then those of the last step."""
        self._look_at(overflow)
        found = [self._first[1]] if self._first is not None and self._first[1] is not None else []
        found += [target for binding in self._bindings for target in binding.nonfinite_tracker.last_targets()]
        holders = {
            id(target): holder
            for binding in self._bindings
            for holder, target in zip(binding.holders, binding.targets, strict=True)
        }
        return list({id(target): holders.get(id(target), target) for target in found}.values())


def _agree(flags: Sequence[Tensor], strategy: Strategy) -> None:
    """Makes the ranks agree which of several losses overflowed, before their scales are updated (one small exchange)."""
    finite = strategy.reduce(torch.stack(list(flags)), "min")
    for flag, agreed in zip(flags, finite, strict=True):
        flag.copy_(agreed)
