"""SGD with momentum in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import required

from fabricamp.errors import ConfigError
from fabricamp.ops import Rule, SgdRule
from fabricamp.optimizers.base import KEEPING, FusedOptimizer
from fabricamp.optimizers.refusals import at_least_0
from fabricamp.optimizers.rows import DeviceParams

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import ParamGroup


class FusedSGD(FusedOptimizer):
    """SGD with momentum, dampening, Nesterov's momentum, and weight decay before or after momentum.

    ``lr`` has no default, but each group may set its own.  ``materialize_master_grads`` is accepted without effect: the step reads
    half gradients directly.  A parameter has a ``momentum_buffer`` if its group has momentum.  The first gradient added to the
    buffer is not dampened, in whichever step that happens.  ``masters`` and ``state``: as of :class:`FusedAdam`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedSGD([weight], lr=0.1, momentum=0.9)
    >>> weight.sum().backward(); optimizer.step(); optimizer.step()
    >>> weight.data
    tensor([0.7100, 0.7100])
    """

    rule: ClassVar[type[Rule]] = SgdRule
    options: ClassVar[tuple[str, ...]] = (
        *FusedOptimizer.options,
        *KEEPING,
        "wd_after_momentum",
        "materialize_master_grads",
        "most_recent_scale",
        "scale_set_by_backward",
    )
    _moves: tuple[bool, ...] = ()  # which groups have momentum
    _moving: frozenset[int] = frozenset()  # the ids of their parameters

    def __init__(
        self,
        params: ParamsT,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        maximize: bool = False,
        masters: Literal["fp32", "remainder"] = "fp32",
        state: Literal["fp32", "bf16", "8bit"] = "fp32",
    ) -> None:
        self._keep(masters, state)
        if not at_least_0(momentum):
            raise ConfigError(f"FusedSGD got momentum={momentum!r}; it has to be a number, 0 or more")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ConfigError(
                f"FusedSGD(nesterov=True) needs momentum and no dampening, got momentum={momentum!r}, dampening={dampening!r}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        super().__init__(params, defaults)

    def _before_rows(self) -> None:
        """Rebuilds the rows if a group's momentum has changed to or from 0 since the last step."""
        moves = tuple([group["momentum"] != 0 for group in self.param_groups])
        if moves != self._moves:
            self._rows_key = None
            self._moves = moves

    def _build(self, *arguments: Any) -> list[DeviceParams]:
        groups = [group["params"] for group in self.param_groups if group["momentum"] != 0]
        self._moving = frozenset([id(parameter) for parameters in groups for parameter in parameters])
        return super()._build(*arguments)

    def _fill_state(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if state.get("momentum_buffer") is not None:
            # Loaded from torch or apex: there a buffer exists only after its first gradient.
            state.setdefault("buffer_filled", torch.ones((), dtype=torch.float32, device=parameter.device))
        elif id(parameter) in self._moving:
            state.pop("momentum_buffer", None)
        else:
            state["momentum_buffer"] = None
        super()._fill_state(parameter)

    def _rule(self, group: ParamGroup) -> SgdRule:
        return SgdRule(
            group["lr"],
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            nesterov=group["nesterov"],
            decay_after_momentum=self.wd_after_momentum,
            maximize=group["maximize"],
        )
