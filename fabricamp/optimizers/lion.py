"""Lion in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from fabricamp.ops import LionRule, Rule
from fabricamp.optimizers.base import KEEPING, FusedOptimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import ParamGroup


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023): steps along the sign of an interpolation of momentum and gradient, with decoupled weight decay.

    Its state is one momentum (``exp_avg``) per parameter.  Each element moves by ``lr``, so ``lr`` is usually 3 to 10 times smaller
    than Adam's, and ``weight_decay`` larger by the same factor.

    ``masters`` and ``state``: as of :class:`FusedAdam`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedLion([weight], lr=0.1)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data
    tensor([0.9000, 0.9000])
    """

    rule: ClassVar[type[Rule]] = LionRule
    options: ClassVar[tuple[str, ...]] = (*FusedOptimizer.options, *KEEPING)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        masters: Literal["fp32", "remainder"] = "fp32",
        state: Literal["fp32", "bf16", "8bit"] = "fp32",
    ) -> None:
        self._keep(masters, state)
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _rule(self, group: ParamGroup) -> LionRule:
        beta1, beta2 = group["betas"]
        return LionRule(group["lr"], beta1, beta2, group["weight_decay"])
