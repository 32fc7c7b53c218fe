"""apex's FusedAdam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import StepInGroup
from fabricamp.optimizers import FusedOptimizer, UnsupportedError


class FusedAdam(StepInGroup, optimizers.FusedAdam):
    """:class:`fabricamp.optimizers.FusedAdam` with apex's layout.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([weight], lr=0.1)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data, optimizer.state_dict()["param_groups"][0]["step"]
    (tensor([0.9000, 0.9000]), 1)
    """

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)

    @property
    def param_groups_master(self) -> list[dict[str, Any]] | None:
        """The parameter groups with masters in place of the parameters; None without ``master_weights``."""
        if not self.master_weights:
            return None
        return [
            {**group, "params": [self.state.get(one, {}).get("master_param") for one in group["params"]]}
            for group in self.param_groups
        ]

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        **options: Any,
    ) -> Any:
        """Updates the parameters that have a gradient; returns what ``closure`` returned.

        ``grad_scaler``, torch's GradScaler, is accepted and then decides on this step.  It is not in the signature: a GradScaler
        that finds the argument there warns, and passes itself instead of its result.
        """
        grad_scaler = options.pop("grad_scaler", None)
        if options:
            raise UnsupportedError(
                f"FusedAdam.step got {', '.join(map(repr, options))}; it takes closure and grad_scaler"
            )
        if grad_scaler is not None and grad_scaler.is_enabled():
            return grad_scaler.step(self)
        if not (grads is output_params is scale is grad_norms is None):
            raise UnsupportedError(
                "FusedAdam.step takes a closure only; grads, output_params, scale and grad_norms belonged to an old "
                "FP16_Optimizer: scale the loss with a precision instead (precision='O1' or 'O2')"
            )
        return FusedOptimizer.step(self, closure)  # the parent's step would call the hooks again
