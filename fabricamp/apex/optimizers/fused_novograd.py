"""apex's name for FusedNovoGrad; its checkpoints also have apex's entry, the norms of a group."""

from __future__ import annotations

from typing import Any

import torch

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import StepInGroup


class FusedNovoGrad(StepInGroup, optimizers.FusedNovoGrad):
    """:class:`fabricamp.optimizers.FusedNovoGrad` with apex's layout.

    ``state_dict()`` also has the norms of a group in ``exp_avg_sq``, apex's key: two tensors, of fp16 and of the other parameters.
    ``load_state_dict`` of the base class reads this form.
    """

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, with the norms in the groups as well as for each parameter."""
        result = super().state_dict()
        for own, saved in zip(self.param_groups, result["param_groups"], strict=True):
            halves: list[torch.Tensor] = []
            others: list[torch.Tensor] = []
            for parameter in own["params"]:
                state = self.state.get(parameter)
                if not state:
                    continue
                norms = halves if parameter.dtype is torch.float16 else others
                norms.append(state["exp_avg_norm"].detach())
            if halves or others:
                empty = torch.zeros(0, dtype=torch.float32, device="cpu")
                saved["exp_avg_sq"] = [torch.stack(norms) if norms else empty for norms in (halves, others)]
        return result
