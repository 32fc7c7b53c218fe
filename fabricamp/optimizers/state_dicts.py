"""Optimizer state from elsewhere: torch's, apex's; and state that stays in full precision on its way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

__all__ = ["restore_full_precision", "with_steps_by_parameter"]

_TORCHS_OWN: Final = {"foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay"}
"""What only torch's optimizers have in their groups; ``fused=None`` would even deny that a step skips by itself."""


def with_steps_by_parameter(state_dict: dict[str, Any], name: str, *, cells: Sequence[str]) -> dict[str, Any]:
    """Returns ``state_dict`` with a ``step`` for each parameter where apex keeps one a group; refuses what would be lost.

    Options that only torch's optimizers have are left out.
    """
    result = {**state_dict, "state": dict(state_dict["state"]), "param_groups": []}
    for group in state_dict["param_groups"]:
        if group.get("amsgrad", False):
            raise CheckpointError(
                f"this state was saved with amsgrad=True, which {name} does not have; load it into torch.optim.Adam"
            )
        own = {key: value for key, value in group.items() if key not in _TORCHS_OWN}
        step = own.pop("step", None)
        result["param_groups"].append(own)
        if "step" not in cells:
            continue
        for key in own["params"]:
            entry = result["state"].get(key)
            if not entry or "step" in entry:
                continue
            if step is None:
                raise CheckpointError(
                    f"the state of parameter {key} has no 'step', nor has its group; {name} needs one"
                )
            result["state"][key] = {**entry, "step": step}
    return result


def restore_full_precision(optimizer: Optimizer, state_dict: dict[str, Any], cells: Sequence[str]) -> None:
    """Puts what ``Optimizer.load_state_dict`` rounded to half back as it was saved: fp32 at least, on the parameter's device."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(saved, parameters, strict=True):
        wide = torch.promote_types(parameter.dtype, torch.float32)
        for name, value in state_dict["state"].get(key, {}).items():
            if name in cells:
                number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
                loaded = number.reshape(()).to(parameter.device, torch.float32, copy=True)
            elif isinstance(value, Tensor) and value.is_floating_point():
                loaded = value.detach().to(parameter.device, wide, copy=True)
            else:
                continue
            optimizer.state[parameter][name] = loaded
