"""What became of each update window: decided on the device, read by the host two windows later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.precision.loss_scaler import SLOTS, LossScaler, Overflow, Verdict
from fabricamp.precision.nonfinite import described
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp.precision.gradients import Binding


class Verdicts:
    """The verdicts of a Precision that may skip a window: for overflow, or by ``policy`` for any non-finite gradient.

    ``policy`` is the Trainer's ``nan_policy``: "skip", "stop" or "raise"; None: what the level does by itself.
    ``dynamic``: whether the loss scale moves.
    ``schedules_follow``: learning-rate schedules follow applied windows; not where the first one that is not applied is the end.
    """

    def __init__(self, scaler: LossScaler, policy: str | None, *, dynamic: bool) -> None:
        self.scaler = scaler
        self.policy = policy
        self.dynamic = dynamic
        self.schedules_follow = dynamic or policy == "skip"
        self._module: nn.Module | None = None
        self._strategy = Strategy()
        self._bindings: Sequence[Binding] = ()
        self._numbers_each = 1
        self._first: tuple[int, Tensor | None] | None = None

    @property
    def scale(self) -> float:
        """The loss scale, as far as the host knows without waiting."""
        return self.scaler.known.scale

    @property
    def applied_steps(self) -> int:
        """Windows applied, as far as the host knows without waiting."""
        return self.scaler.known.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Windows skipped, as far as the host knows without waiting."""
        return self.scaler.known.skipped_steps

    @property
    def applied_on_device(self) -> Tensor:
        """The number of windows applied, on the device, known there before the host knows; a later window changes it."""
        return self.scaler.state.applied

    @property
    def window_tensors(self) -> list[Tensor]:
        """What an open window has on the device beside its gradients: what is known of each of several losses."""
        losses = self.scaler.losses
        return [one.words for one in losses] if len(losses) > 1 else []

    def follow(self, module: nn.Module, strategy: Strategy, bindings: Sequence[Binding], numbers_each: int) -> None:
        """Takes note of whose gradients are judged; the statistics of each binding have so many numbers of their own."""
        self._module, self._strategy, self._bindings, self._numbers_each = module, strategy, bindings, numbers_each
        self._first = None

    def widen(self, steps: int) -> None:
        """Keeps the verdicts of so many windows that are launched together; before the first batch."""
        self.scaler.widen(steps + SLOTS)
        for binding in self._bindings:
            binding.blame.widen(steps + SLOTS)

    def leave(self) -> None:
        """Forgets module and optimizers, after a run; what is known of the windows stays."""
        self._module, self._bindings = None, ()

    def close_window(self, loss: Tensor | None) -> Verdict | None:
        """Ends an update window; returns what became of the one two windows ago, None before there is one."""
        self.launch_close(loss)
        return self.note_closed()

    def launch_close(self, loss: Tensor | None) -> None:
        """Moves the scales and records the verdict, on the device, where no step has done so in its own launch."""
        losses = self.scaler.losses
        if len(losses) > 1 and self._strategy.distributed:
            _agree([one.finite for one in losses], self._strategy)
        self.scaler.launch_close(loss)

    def repeated(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Returns what notes, behind each repetition of the last step of ``optimizer``, what its statistics are of."""
        scaler = self.scaler
        blame = next(binding.blame for binding in self._bindings if binding.optimizer is optimizer)
        looked = blame.looked
        return None if looked is None else lambda: blame.note(scaler.windows, looked)

    def keep_statistics(self, optimizer: Optimizer) -> None:
        """Copies what the last step of ``optimizer`` looked at, while it is captured, to where no other graph writes."""
        next(binding.blame for binding in self._bindings if binding.optimizer is optimizer).keep()

    def note_closed(self) -> Verdict | None:
        """Counts the window and reads the verdict that is due; nothing is launched."""
        verdict = self.scaler.note_closed()
        if verdict is not None and not verdict.applied:
            self._look_at(self.scaler.overflow)
        return verdict

    def drain(self) -> list[Verdict]:
        """Reads, waiting, the verdicts that :meth:`close_window` has not told yet; they stay to be told."""
        return self.scaler.pending()

    def explain(self, global_step: int) -> str:
        """Returns which gradients were not finite first, in the overflow for which the run has to end; waits for the device."""
        scaler = self.scaler
        if self._module is None:
            return ""
        if self.policy == "stop":
            scaler.settle()
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        blamed = [names[id(one)] for one in self._blamed(scaler.overflow) if id(one) in names]
        return described(scaler.overflow, blamed, global_step - 1 - scaler.windows_since(scaler.overflow))

    def _look_at(self, overflow: Overflow) -> None:
        """Finds, while that is known, whose gradient had the lowest bad chunk of an overflow."""
        if self._first is not None and self._first[0] == overflow.window:
            return
        first = None
        if self._bindings and overflow.chunk >= 0:
            number, index = divmod(overflow.chunk, self._numbers_each)
            first = self._bindings[number].blame.target(index, self.scaler.slot_of(overflow))
        self._first = overflow.window, first

    def _blamed(self, overflow: Overflow) -> list[Tensor]:
        """Returns what backward filled with non-finite gradients: the first of that overflow, then the last window's."""
        self._look_at(overflow)
        found = [self._first[1]] if self._first is not None and self._first[1] is not None else []
        found += [target for binding in self._bindings for target in binding.blame.last_targets()]
        holders = {
            id(target): holder
            for binding in self._bindings
            for holder, target in zip(binding.holders, binding.targets, strict=True)
        }
        return list({id(target): holders.get(id(target), target) for target in found}.values())


def _agree(flags: Sequence[Tensor], strategy: Strategy) -> None:
    """Makes the ranks agree which of several losses overflowed, before their scales move (one small exchange)."""
    finite = strategy.reduce(torch.stack(list(flags)), "min")
    for flag, agreed in zip(flags, finite, strict=True):
        flag.copy_(agreed)
