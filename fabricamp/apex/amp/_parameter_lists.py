"""apex's lists of an optimizer's parameters: half weights, masters, and fp32 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fabricamp.ops.tensors import HALF_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.precision.stepper import ParamGradMap


class GroupLists:
    """The parameters of an optimizer, by group.

    ``fp16`` are half weights, ``fp32_from_fp16`` their masters, ``fp32_from_fp32`` weights that stay fp32.
    """

    optimizer: Any
    binding: ParamGradMap

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns (parameter that backward fills, parameter that is updated), in the order of ``param_groups``."""
        self.binding.refresh()
        return list(zip(self.binding.model_params, self.binding.master_params, strict=True))

    def _groups(self, chosen: Callable[[Tensor, Tensor], Tensor | None]) -> list[list[Tensor]]:
        holders = {id(target): holder for holder, target in self.pairs()}
        return [
            [found for one in group["params"] if (found := chosen(holders[id(one)], one)) is not None]
            for group in self.optimizer.param_groups
        ]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half weights of each group."""
        return self._groups(lambda holder, _: holder if holder.dtype in HALF_DTYPES else None)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of each group."""
        return self._groups(lambda holder, target: target if holder is not target else None)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The weights of each group that were not converted."""
        return self._groups(
            lambda holder, target: holder if holder is target and holder.dtype not in HALF_DTYPES else None
        )


class ParameterLists(GroupLists):
    """The attributes of ``optimizer._amp_stash`` that scripts read."""

    kept: list[Tensor | None]
    """The gradients of the passes before the running one, in the order of the parameters."""

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates masters, not only the parameters that backward fills."""
        self.binding.refresh()
        return bool(self.binding.master_pairs)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The half weights."""
        return [holder for holder, _ in self.pairs() if holder.dtype in HALF_DTYPES]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of half weights."""
        return [target for holder, target in self.pairs() if holder is not target]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The weights that were not converted."""
        return [holder for holder, target in self.pairs() if holder is target and holder.dtype not in HALF_DTYPES]

    all_fp32_params = all_fp32_from_fp32_params

    def _stashed(self, chosen: list[Tensor]) -> list[Tensor | None]:
        kept = dict(zip(map(id, self.binding.master_params), self.kept, strict=False))
        return [kept.get(id(one)) for one in chosen]

    @property
    def all_fp16_grad_stash(self) -> list[Tensor | None]:
        """The gradients of half weights before the running backward."""
        return self._stashed(self.all_fp16_params)

    @property
    def all_fp32_from_fp32_grad_stash(self) -> list[Tensor | None]:
        """The gradients of fp32 weights before the running backward."""
        return self._stashed(self.all_fp32_from_fp32_params)

    all_fp32_grad_stash = all_fp32_from_fp32_grad_stash
