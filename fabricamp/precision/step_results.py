"""The status of each step (applied, or skipped for overflow): decided on the device, read by the host two steps later.

:class:`StepResults` joins the loss scaler's ring of statuses with the parameters that the statistics of each step belong to, so
the host can name the gradients of an overflow.  :class:`LossWatch` looks at logged losses.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.habits import habits
from fabricamp.precision.loss_scaler import SLOTS, LossScaler, Overflow, StepStatus
from fabricamp.precision.nonfinite_tracker import overflow_message
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp.precision.nonfinite_tracker import NonFiniteTracker
    from fabricamp.precision.param_grads import ParamGradMap

logger = logging.getLogger("fabricamp")

NAN_POLICIES: Final = ("skip", "stop", "raise")


class StepResults:
    """The step statuses of a Precision that may skip steps: for overflow, or by ``policy`` for any non-finite gradient.

    ``policy`` is the Trainer's ``nan_policy``: "skip", "stop" or "raise"; None: the level's own behaviour.
    ``dynamic``: whether the loss scale is dynamic.
    ``schedules_follow``: learning-rate schedules count applied steps; False if the first skipped step ends the run, and in a
    program written for Lightning, where schedules move with every step.
    """

    def __init__(self, scaler: LossScaler, policy: str | None, *, dynamic: bool) -> None:
        self.scaler = scaler
        self.policy = policy
        self.dynamic = dynamic
        self.schedules_follow = (dynamic or policy == "skip") and not habits().schedules_move_with_each_step
        self._module: nn.Module | None = None
        self._strategy = Strategy()
        self._param_maps: Sequence[ParamGradMap] = ()
        self._stats_per_optimizer = 1
        self.empty_steps = 0
        """The steps of this process in which no micro-batch had a loss: the run counts them, but the device does not make them."""
        self._empty_since: deque[int] = deque(maxlen=1000)
        """For each of the last such steps, the number of steps on the device by then."""
        self._first: tuple[int, Tensor | None] | None = None
        """The step of the last overflow, and the parameter of its lowest non-finite statistic (None: not known)."""

    @property
    def scale(self) -> float:
        """The loss scale in the last status that the host has read; does not wait."""
        return self.scaler.known.scale

    @property
    def at_lowest_scale(self) -> bool:
        """Whether the loss scale in the last status that the host has read is the lowest allowed one; does not wait."""
        return self.scaler.is_lowest

    @property
    def applied_steps(self) -> int:
        """The number of applied steps in the last status that the host has read; does not wait."""
        return self.scaler.known.applied_steps

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps in the last status that the host has read; does not wait."""
        return self.scaler.known.skipped_steps

    @property
    def scale_moves(self) -> bool:
        """Whether the scale of the gradients in ``.grad`` may move at the end of a step: it is dynamic and there is one.

        With several losses, backward leaves no gradients there: they are unscaled and summed elsewhere.
        """
        return self.dynamic and len(self.scaler.losses) == 1 and self.scaler.can_move

    def scale_change_since(self, steps: int) -> Tensor | None:
        """Returns, on the device, the loss scale of now divided by that of ``steps`` ended steps ago; None if it is not exact."""
        return self.scaler.change_since(steps)

    @property
    def known_is_inherited(self) -> bool:
        """Whether the last status that :meth:`note_end` returned is of a step before the checkpoint that the run continues."""
        return self.scaler.known_is_inherited

    @property
    def inherited_pending(self) -> int:
        """The number of the oldest statuses of :meth:`drain` that are of steps before the checkpoint that the run continues."""
        return self.scaler.inherited_pending

    @property
    def applied_on_device(self) -> Tensor:
        """The number of applied steps, as a device tensor, up to date before the host reads it; later steps change it."""
        return self.scaler.state.applied

    @property
    def window_tensors(self) -> list[Tensor]:
        """The device state of an accumulation in progress beside its gradients: one struct per loss if there are several."""
        losses = self.scaler.losses
        return [state.words for state in losses] if len(losses) > 1 else []

    def follow(
        self, module: nn.Module, strategy: Strategy, param_maps: Sequence[ParamGradMap], stats_per_optimizer: int
    ) -> None:
        """Stores what naming an overflow's parameters needs; each optimizer has a range of ``stats_per_optimizer`` statistics."""
        self._module = module
        self._strategy = strategy
        self._param_maps = param_maps
        self._stats_per_optimizer = stats_per_optimizer
        self._first = None

    def resize_ring(self, steps: int) -> None:
        """Makes room for the statuses of ``steps`` steps per launch; call it before the first batch."""
        self.scaler.resize_ring(steps + SLOTS)
        for param_map in self._param_maps:
            param_map.nonfinite_tracker.resize_ring(steps + SLOTS)

    def leave(self) -> None:
        """Drops module and optimizers after a run; the step statuses stay."""
        self._module = None
        self._param_maps = ()

    def launch_end(self, loss: Tensor | None) -> None:
        """Ends a step on the device: updates the scales and records the status, unless an optimizer's own launch did so."""
        losses = self.scaler.losses
        if len(losses) > 1 and self._strategy.distributed:
            # With several losses each rank has checked its own gradients before the exchange, so the ranks agree here which losses
            # overflowed.  With one loss the exchanged gradients are checked, and inf and nan have reached every rank.
            flags = torch.stack([state.finite for state in losses])
            for state, agreed in zip(losses, self._strategy.reduce(flags, "min"), strict=True):
                state.finite.copy_(agreed)
        self.scaler.launch_end(loss)

    def repeated(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Returns a callback to run after each replay of the last step of ``optimizer``; None if it took no statistics.

        The callback records which parameters the statistics belong to.
        """
        scaler = self.scaler
        tracker = self._tracker(optimizer)
        stats_record = tracker.stats_record
        return None if stats_record is None else lambda: tracker.note(scaler.steps, stats_record, replayed=True)

    def keep_statistics(self, optimizer: Optimizer) -> None:
        """Copies the statistics of the last step of ``optimizer``, during capture, to memory that no other graph writes."""
        self._tracker(optimizer).keep()

    def _tracker(self, optimizer: Optimizer) -> NonFiniteTracker:
        return next(param_map.nonfinite_tracker for param_map in self._param_maps if param_map.optimizer is optimizer)

    def note_end(self) -> StepStatus | None:
        """Counts the step that has ended; returns the status of the step two steps ago, None before there is one.

        Launches nothing.
        """
        status = self.scaler.note_end()
        if status is not None and not status.applied:
            self._find_first(self.scaler.overflow)
        return status

    def note_empty_step(self) -> None:
        """Counts a step of which no micro-batch had a loss."""
        self.empty_steps += 1
        self._empty_since.append(self.scaler.steps)

    def drain(self) -> list[StepStatus]:
        """Returns the statuses that :meth:`note_end` has not returned yet; waits for the device.

        :meth:`note_end` still returns them later.
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
        parameters, complete = self._nonfinite(scaler.overflow)
        nonfinite = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
        empty_since = sum(steps > scaler.overflow.step for steps in self._empty_since)
        steps_since = scaler.steps_since(scaler.overflow) + empty_since
        return overflow_message(scaler.overflow, nonfinite, global_step - 1 - steps_since, complete=complete)

    def _find_first(self, overflow: Overflow) -> None:
        """Finds the parameter of an overflow's lowest non-finite statistic, before its ring slot is overwritten."""
        if self._first is not None and self._first[0] == overflow.step:
            return
        parameter = None
        if self._param_maps and overflow.chunk >= 0:
            number, index = divmod(overflow.chunk, self._stats_per_optimizer)
            tracker = self._param_maps[number].nonfinite_tracker
            parameter = tracker.parameter(index, self.scaler.slot_of(overflow))
        self._first = (overflow.step, parameter)

    def _nonfinite(self, overflow: Overflow) -> tuple[list[Tensor], bool]:
        """Returns the model parameters with non-finite gradients in the overflow's step, and whether these are all of them."""
        self._find_first(overflow)
        first = None if self._first is None else self._first[1]
        found = [] if first is None else [first]
        complete = True
        model_params: dict[int, Tensor] = {}
        for param_map in self._param_maps:
            nonfinite = param_map.nonfinite_tracker.nonfinite_at(overflow.step)
            if nonfinite is None:
                complete = False
            else:
                found += nonfinite
            for model_param, master in zip(param_map.model_params, param_map.master_params, strict=True):
                model_params[id(master)] = model_param
        # Without the record of its step, the first parameter is known by its index alone.
        if first is not None and all(first is not parameter for parameter in found[1:]):
            complete = False
        return list({id(updated): model_params.get(id(updated), updated) for updated in found}.values()), complete


class LossWatch:
    """Warns once if a logged value of training that the host has read is not finite, and once for validations.

    A logged value counts as a loss if its name contains "loss".  Once training's was told, the validations' that follow from it are
    not.  If gradients are ``checked``, an overflow in training is told by
    the :class:`StepResults`, and only losses of validations are looked at here.
    """

    def __init__(self, *, checked: bool) -> None:
        self._checked = checked
        self._told_of: set[bool] = set()
        """Of training (True), of validations (False)."""

    @property
    def told(self) -> bool:
        """Whether a loss that is not finite was told."""
        return bool(self._told_of)

    def __call__(self, name: str, value: float, step: int, training: bool) -> None:
        """Checks a value of ``training``, or of a validation, that was read when ``step`` steps were done."""
        if math.isfinite(value) or "loss" not in name.lower() or not self._told_of.isdisjoint((training, True)):
            return
        if training and self._checked:
            return
        self._told_of.add(training)
        if self._checked:
            logger.warning(
                "%s is %g at step %d, and training continues: steps with such gradients are skipped, or end the run; look at "
                "the batches of the validation, and at what overflows there",
                name, value, step,
            )  # fmt: skip
            return
        logger.warning(
            "%s is %g at step %d, and training continues; Trainer(nan_policy='stop') or 'raise' ends it at the first "
            "gradient that is not finite, keeps the weights from before and names the parameter",
            name, value, step,
        )  # fmt: skip
