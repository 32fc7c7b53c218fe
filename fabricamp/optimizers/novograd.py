"""NovoGrad: each gradient, or its running average, is divided by a running average of the gradient's norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch import Tensor

from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.ops import NovoGradRule, Rule
from fabricamp.optimizers.base import FusedOptimizer
from fabricamp.optimizers.refusals import UnsupportedError

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import ParamGroup, StateDict

_IS_MAX_NORM: Final = {2: False, 0: True, math.inf: True}
"""The allowed values of ``norm_type``, and whether the norm is the largest absolute value."""


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: the update is divided by a running average of the gradient's norm (``exp_avg_norm`` in the state).

    ``norm_type`` is 2, or 0 (or ``math.inf``) for the largest absolute value.  With ``reg_inside_moment`` the division and the
    weight decay come before the running average of gradients, else after it.  ``grad_averaging=False`` adds the full gradient to
    that average, without the factor ``1 - beta1``.  The norm's average starts at the first norm, or with ``init_zero`` at 0.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedNovoGrad([weight], lr=0.1, bias_correction=False, grad_averaging=False)
    >>> (3 * weight[0] + 4 * weight[1]).backward(); optimizer.step()
    >>> weight.data
    tensor([0.9400, 0.9200])
    """

    rule: ClassVar[type[Rule]] = NovoGradRule
    options: ClassVar[tuple[str, ...]] = (*FusedOptimizer.options, "moment_mode")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise UnsupportedError("FusedNovoGrad has no amsgrad; leave it False")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group of parameters; also possible during training."""
        norm_type = param_group.get("norm_type", self.defaults["norm_type"])
        if norm_type not in _IS_MAX_NORM:
            raise ConfigError(f"FusedNovoGrad got norm_type={norm_type!r}; give 2, or 0 for the largest absolute value")
        super().add_param_group(param_group)

    def _rule(self, group: ParamGroup) -> NovoGradRule:
        beta1, beta2 = group["betas"]
        return NovoGradRule(
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            bias_correction=bool(group["bias_correction"]),
            inside=self.moment_mode == 0,
            grad_averaging=bool(group["grad_averaging"]),
            largest=_IS_MAX_NORM[group["norm_type"]],
            from_zero=bool(group["init_zero"]),
        )

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state of this optimizer or of apex's, whose groups have the norms in two lists (``exp_avg_sq``)."""
        groups = []
        state = dict(state_dict["state"])
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group = dict(saved)
            lists = group.pop("exp_avg_sq", None)
            pairs = zip(saved["params"], own["params"], strict=False)
            with_state = {key: parameter for key, parameter in pairs if state.get(key)}
            # A state of this class has each norm beside its average too, where it stays if parameters change their order.
            if lists is not None and any("exp_avg_norm" not in state[key] for key in with_state):
                norms = _in_order(lists, list(with_state.values()))
                for key, norm in zip(with_state, norms, strict=True):
                    state[key] = {**state[key], "exp_avg_norm": norm}
            groups.append(group)
        groups += state_dict["param_groups"][len(groups) :]  # too many groups: torch raises its own error
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})


def _in_order(lists: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """Returns the norms of apex's two lists (of fp16 and of the other parameters), in the order of ``parameters``."""
    halves, others = ([*norms.flatten().unbind()] for norms in lists)
    if len(halves) + len(others) != len(parameters):
        raise CheckpointError(
            f"a group's exp_avg_sq has {len(halves) + len(others)} norms for {len(parameters)} parameters with state; "
            "the file is not complete, or belongs to another model"
        )
    if not halves or not others:
        return halves + others
    if len(halves) != sum(parameter.dtype == torch.float16 for parameter in parameters):
        raise CheckpointError(
            f"a group's exp_avg_sq has norms of {len(halves)} fp16 parameters; cast the model as it was when the state was saved"
        )
    next_half = iter(halves)
    next_other = iter(others)
    return [next(next_half if parameter.dtype == torch.float16 else next_other) for parameter in parameters]
