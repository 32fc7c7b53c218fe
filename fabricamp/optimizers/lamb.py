"""LAMB in two passes: Adam's directions, with step sizes proportional to the norms of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops import LambRule, Steering
from fabricamp.ops.lamb import gradient_norm, launch_norm
from fabricamp.optimizers.base import FusedOptimizer
from fabricamp.optimizers.refusals import UnsupportedError
from fabricamp.optimizers.rows import DeviceParams

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import ParamGroup


class FusedLAMB(FusedOptimizer):
    """LAMB; with ``use_nvlamb`` the norms also scale the steps of parameters without weight decay.

    The norm of all gradients, of all groups, is compared with each group's own ``max_grad_norm`` (0 or None: no clipping).
    ``adam_w_mode=False`` adds weight decay to the gradient.  ``grad_averaging=False`` adds the full gradient to its average,
    without the factor ``1 - beta1``.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedLAMB([weight], lr=0.1)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data
    tensor([0.9000, 0.9000])
    """

    rule: ClassVar[type[LambRule]] = LambRule
    options: ClassVar[tuple[str, ...]] = (*FusedOptimizer.options, "adam_w_mode", "use_nvlamb")
    reads_scale: ClassVar[bool] = True
    _measured: tuple[Tensor, float] | None = None  # scale and divisor of the statistics of this step's gradients

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise UnsupportedError(f"{name} has no amsgrad; leave it False")
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ConfigError(
                f"{name} got max_grad_norm={max_grad_norm!r}; it has to be more than 0, or 0 or None for no clipping"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        super().__init__(params, defaults)

    def _rule(self, group: ParamGroup) -> LambRule:
        beta1, beta2 = group["betas"]
        return self.rule(
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            bias_correction=bool(group["bias_correction"]),
            decoupled=bool(self.adam_w_mode),
            grad_averaging=bool(group["grad_averaging"]),
            max_norm=group["max_grad_norm"] or 0.0,
            nvlamb=self.use_nvlamb,
        )

    def _before_rows(self) -> None:
        self._measured = None

    def statistics(self, scale: Tensor, divisor: float = 1.0) -> Tensor:
        """Returns the input of ``ops.finish``; the norm that ``ops.finish`` computes is also used for the clipping here."""
        self._measured = scale, divisor
        return super().statistics(scale, divisor)

    def _measure(self, steering: Steering) -> Mapping[torch.device, Tensor]:
        """Returns the norm of all gradients as this step reads them: from a Precision's statistics, else by an extra pass."""
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return {}
        parts = self._parts or []
        # Clamped values have another norm than the measured one.
        measured = self._measured if steering.state is not None and steering.limit is None else None
        norms = [self._norm_of(part, steering, measured) for part in parts]
        if len(parts) > 1 and measured is None:
            total = torch.linalg.vector_norm(torch.stack([norm.to(parts[0].device) for norm in norms]))
            norms = [total.to(part.device) for part in parts]
        return {part.device: norm for part, norm in zip(parts, norms, strict=True)}

    def _norm_of(self, part: DeviceParams, steering: Steering, measured: tuple[Tensor, float] | None) -> Tensor:
        state = None if steering.state is None else steering.state.seen_from(part.device)
        own = Steering(state, steering.limit)
        if measured is not None:
            measured = measured[0].to(part.device, non_blocking=True), measured[1]
        if part.table is not None:
            return launch_norm(part.table, own, measured)
        if measured is not None and state is not None:
            return state.norm.double() * measured[0] * measured[1] * state.multiplier
        norms = [gradient_norm(part.of_group(index), own) for index in range(len(self.param_groups))]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(part.device) for norm in norms]))
        return total
