"""The loss scale of an opt level: a constant, a constant under a ``nan_policy``, or dynamic, one a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.errors import ConfigError
from fabricamp.ops.dtypes import HALF_DTYPES
from fabricamp.precision.loss_scaler import LossScaler
from fabricamp.precision.verdicts import Verdicts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fabricamp.precision.opt_levels import Level
    from fabricamp.precision.stepper import OptimizerStepper
    from fabricamp.strategies.base import Strategy


class ConstantScale:
    """A constant scale; every window is applied."""

    verdicts: Verdicts | None = None
    scaler: LossScaler | None = None

    def __init__(self, level: Level, device: torch.device | None = None) -> None:
        self.device = device
        """Whose memory the scale is in; None before a module is there."""
        self.early: dict[str, Any] = {}
        """A state that was loaded before there were scalers: for those that come."""
        self._level = level
        self._factor = 1.0 if level.dynamic else float(level.loss_scale)

    def scaled(self, loss: Tensor, loss_id: int) -> Tensor:
        """Returns what backward runs on: the scaled loss, fp32 at least."""
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * self._factor

    def follow(self, module: nn.Module, strategy: Strategy, stepper: OptimizerStepper) -> None:
        """Takes note of whose gradients are judged."""

    def leave(self) -> None:
        """Forgets module and optimizers, after a run."""

    def state_dict(self) -> dict[str, Any]:
        """Scales, counters and the verdicts on their way."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self.early = state


class JudgedScale(ConstantScale):
    """A constant scale under a ``policy`` for what is not finite: each window has a verdict."""

    verdicts: Verdicts
    scaler: LossScaler

    def __init__(self, level: Level, device: torch.device, policy: str | None) -> None:
        super().__init__(level, device)
        self.scaler = LossScaler.for_level(level, device, sticky=policy in ("stop", "raise"))
        self.verdicts = Verdicts(self.scaler, policy, dynamic=level.dynamic)

    def follow(self, module: nn.Module, strategy: Strategy, stepper: OptimizerStepper) -> None:
        """Takes note of whose gradients are judged."""
        self.verdicts.follow(module, strategy, stepper.bindings, stepper.numbers_each)

    def leave(self) -> None:
        """Forgets module and optimizers, after a run; what is known of the windows stays."""
        self.verdicts.leave()

    def state_dict(self) -> dict[str, Any]:
        """Scales, counters and the verdicts on their way."""
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; a scale starts fresh where one of the two is a constant."""
        if "scaler" in state and (state.get("loss_scale") == "dynamic") == self._level.dynamic:
            self.scaler.load_state_dict(state["scaler"])


class DynamicScale(JudgedScale):
    """One scale per loss, which moves: each window has a verdict."""

    def scaled(self, loss: Tensor, loss_id: int) -> Tensor:
        """Returns what backward runs on: the loss times its own scale, fp32 at least."""
        losses = self.scaler.losses
        if not 0 <= loss_id < len(losses):
            name = self._level.name
            raise ConfigError(
                f"loss_id={loss_id} with precision {name!r} and num_losses={len(losses)}; "
                f"use OptLevel({name!r}, num_losses={loss_id + 1})"
            )
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * losses[loss_id].scale


def scale_for(level: Level, device: torch.device, policy: str | None) -> ConstantScale:
    """Returns what an opt level, with a policy for what is not finite, scales losses by."""
    if level.dynamic:
        return DynamicScale(level, device, policy)
    return ConstantScale(level, device) if policy is None else JudgedScale(level, device, policy)
