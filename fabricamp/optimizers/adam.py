"""Adam and AdamW in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from fabricamp.ops import AdamRule, Rule
from fabricamp.optimizers.base import KEEPING, FusedOptimizer
from fabricamp.optimizers.refusals import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import ParamGroup


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay (AdamW), or with L2 regularisation if ``adam_w_mode`` is False.

    ``capturable`` has no effect: a step is always capturable, because step and lr are read from device memory.  With
    ``master_weights`` the optimizer keeps fp32 master weights of half parameters in its state; a Precision with master weights
    does not need this.

    ``masters="remainder"``: precision "O5" keeps, in place of fp32 masters, the 16 bits that each bf16 weight lacks.  That is two
    bytes a parameter less, for the same values.  Refused before the first batch where weights are not bf16 copies of masters.

    ``state="bf16"``: both averages are bf16, four bytes a parameter less.  They are rounded stochastically, so that each has the
    expectation of its exact value, by bits that are a function of the run's seed, the parameter's name, its step and the element.

    ``state="8bit"``: both averages are codes of 8 bits with a scale for each 256 elements, 5.94 bytes a parameter less.  Those of
    parameters with less than 4,096 elements or two dimensions, and in a Trainer of embeddings and norms, stay fp32.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([weight], lr=0.1)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data
    tensor([0.9000, 0.9000])
    """

    rule: ClassVar[type[Rule]] = AdamRule
    options: ClassVar[tuple[str, ...]] = (*FusedOptimizer.options, "adam_w_mode", *KEEPING)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        maximize: bool = False,
        masters: Literal["fp32", "remainder"] = "fp32",
        state: Literal["fp32", "bf16", "8bit"] = "fp32",
    ) -> None:
        self._keep(masters, state, own_masters=master_weights)
        if amsgrad:
            raise UnsupportedError("FusedAdam has no amsgrad; use torch.optim.AdamW(amsgrad=True, fused=True)")
        if master_weights and not capturable:
            raise UnsupportedError("FusedAdam(master_weights=True) needs capturable=True, as in apex")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights
        super().__init__(params, defaults)

    def _rule(self, group: ParamGroup) -> AdamRule:
        beta1, beta2 = group["betas"]
        return AdamRule(
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            bias_correction=bool(group["bias_correction"]),
            decoupled=bool(self.adam_w_mode),
            maximize=group["maximize"],
        )
