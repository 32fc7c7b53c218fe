"""Adagrad in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fabricamp.errors import ConfigError
from fabricamp.ops import AdagradRule, Rule
from fabricamp.optimizers.base import FusedOptimizer
from fabricamp.optimizers.refusals import at_least_0

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import ParamGroup, StateDict


class FusedAdagrad(FusedOptimizer):
    """Adagrad with L2 regularisation, or with decoupled weight decay if ``adagrad_w_mode`` is True.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdagrad([weight], lr=0.1)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data
    tensor([0.9000, 0.9000])
    """

    rule: ClassVar[type[Rule]] = AdagradRule
    options: ClassVar[tuple[str, ...]] = (*FusedOptimizer.options, "adagrad_w_mode")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        lr_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if not at_least_0(lr_decay):
            raise ConfigError(f"FusedAdagrad got lr_decay={lr_decay!r}; it has to be a number, 0 or more")
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "lr_decay": lr_decay, "maximize": maximize}
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state of this optimizer, of torch's, or of apex's; apex's has no step counts, so they start at 0."""
        counted = any("step" in group for group in state_dict["param_groups"])
        if not counted:
            entries = {key: {"step": 0.0, **entry} for key, entry in state_dict["state"].items()}
            state_dict = {**state_dict, "state": entries}
        super().load_state_dict(state_dict)

    def _rule(self, group: ParamGroup) -> AdagradRule:
        return AdagradRule(
            group["lr"],
            group["eps"],
            group["weight_decay"],
            group["lr_decay"],
            decoupled=bool(self.adagrad_w_mode),
            maximize=group["maximize"],
        )
