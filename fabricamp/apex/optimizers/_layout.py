"""apex's layout of an optimizer: ``step`` in the parameter groups, and the attributes that scripts read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.rows import DeviceParams


class OverflowBuffer:
    """Gives an optimizer ``_dummy_overflow_buf``, the flag that apex's optimizers pass to ``amp_C``."""

    param_groups: list[dict[str, Any]]

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        parameters = self.param_groups[0]["params"]
        return torch.zeros(1, dtype=torch.int32, device=parameters[0].device if parameters else "cpu")


class StepInGroup(OverflowBuffer, FusedOptimizer):
    """Adds ``group["step"]`` as in apex; the steps themselves are counted per parameter.

    The entry is a 0-dim tensor, the count of the group's first parameter with state: it does not count skipped steps, and reading
    it waits for the device.  In ``state_dict()`` it is an int, the largest count of the group.
    """

    def _build(self, *arguments: Any) -> list[DeviceParams]:
        parts = super()._build(*arguments)
        self._show_steps()
        return parts

    def _show_steps(self) -> None:
        for group in self.param_groups:
            steps = self._steps_of(group)
            if steps:
                group["step"] = steps[0]
            else:
                group.pop("step", None)

    def _steps_of(self, group: dict[str, Any]) -> list[Tensor]:
        states = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
        return [state["step"] for state in states if "step" in state]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, with ``step`` in the groups as well as for each parameter."""
        result: dict[str, Any] = super().state_dict()
        for own, saved in zip(self.param_groups, result["param_groups"], strict=True):
            steps = self._steps_of(own)
            if steps:
                saved["step"] = int(torch.stack([step.detach() for step in steps]).max())
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, of apex's, or of torch's optimizer with the same rule."""
        super().load_state_dict(state_dict)
        self._show_steps()
