"""apex's FusedNovoGrad."""

from __future__ import annotations

from typing import Any

import torch

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import StepInGroup


class FusedNovoGrad(StepInGroup, optimizers.FusedNovoGrad):
    """:class:`fabricamp.optimizers.FusedNovoGrad` with apex's layout.

    ``state_dict()`` has the norms of a group in ``exp_avg_sq`` too: [those of fp16 parameters, those of the others].
    """

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, with the norms in the groups as well as for each parameter."""
        result = super().state_dict()
        for own, saved in zip(self.param_groups, result["param_groups"], strict=True):
            norms: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for parameter in own["params"]:
                state = self.state.get(parameter)
                if state:
                    norms[parameter.dtype is not torch.float16].append(state["exp_avg_norm"].detach())
            if norms[0] or norms[1]:
                nothing = torch.zeros(0, dtype=torch.float32, device="cpu")
                saved["exp_avg_sq"] = [torch.stack(one) if one else nothing for one in norms]
        return result
