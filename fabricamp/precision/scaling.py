"""The loss scale of an opt level: constant, constant with a ``nan_policy``, or dynamic with one scale per loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.errors import ConfigError
from fabricamp.ops.dtypes import HALF_DTYPES
from fabricamp.precision.loss_scaler import LossScaler
from fabricamp.precision.step_results import StepResults

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fabricamp.precision.opt_levels import Level
    from fabricamp.precision.stepper import OptimizerStepper
    from fabricamp.strategies.base import Strategy


class ConstantScale:
    """A constant scale; every step is applied."""

    verdicts: StepResults | None = None
    scaler: LossScaler | None = None

    def __init__(self, level: Level, device: torch.device | None = None) -> None:
        self.device = device
        """The device of the scale; None before a module is known."""
        self.early: dict[str, Any] = {}
        """A state that was loaded before the scalers existed; they load it when they are made."""
        self._level = level
        self._factor = 1.0 if level.dynamic else float(level.loss_scale)

    def scaled(self, loss: Tensor, loss_id: int) -> Tensor:
        """Returns the scaled loss, in fp32 or wider."""
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * self._factor

    def follow(self, module: nn.Module, strategy: Strategy, stepper: OptimizerStepper) -> None:
        """Stores the module and bindings, to name the parameters with non-finite gradients."""

    def leave(self) -> None:
        """Drops module and optimizers after a run."""

    def state_dict(self) -> dict[str, Any]:
        """Returns scales, counters and step statuses not read yet."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self.early = state


class JudgedScale(ConstantScale):
    """A constant scale with a ``policy`` for non-finite gradients: each step has a status (applied or skipped)."""

    verdicts: StepResults
    scaler: LossScaler

    def __init__(self, level: Level, device: torch.device, policy: str | None) -> None:
        super().__init__(level, device)
        self.scaler = LossScaler.for_level(level, device, sticky=policy in ("stop", "raise"))
        self.verdicts = StepResults(self.scaler, policy, dynamic=level.dynamic)

    def follow(self, module: nn.Module, strategy: Strategy, stepper: OptimizerStepper) -> None:
        """Stores the module and bindings, to name the parameters with non-finite gradients."""
        self.verdicts.follow(module, strategy, stepper.bindings, stepper.numbers_each)

    def leave(self) -> None:
        """Drops module and optimizers after a run; the step statuses stay."""
        self.verdicts.leave()

    def state_dict(self) -> dict[str, Any]:
        """Returns scales, counters and step statuses not read yet."""
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a :meth:`state_dict`; the scale starts fresh if only one of the saved and the current one is dynamic."""
        if "scaler" in state and (state.get("loss_scale") == "dynamic") == self._level.dynamic:
            self.scaler.load_state_dict(state["scaler"])


class DynamicScale(JudgedScale):
    """A dynamic scale per loss: each step has a status (applied or skipped)."""

    def scaled(self, loss: Tensor, loss_id: int) -> Tensor:
        """Returns the loss times its own scale, in fp32 or wider.

        Raises :class:`ConfigError` if ``loss_id`` is not below ``num_losses``.
        """
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
    """Returns the loss scale of an opt level, with ``policy`` for non-finite gradients."""
    if level.dynamic:
        return DynamicScale(level, device, policy)
    return ConstantScale(level, device) if policy is None else JudgedScale(level, device, policy)
