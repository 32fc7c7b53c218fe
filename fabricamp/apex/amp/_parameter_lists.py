"""apex's lists of an optimizer's parameters: half weights, masters, and fp32 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fabricamp.ops.tensors import HALF_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.precision.param_grads import ParamGradMap


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
        parameter_of = {id(updated): parameter for parameter, updated in self.pairs()}
        groups = []
        for group in self.optimizer.param_groups:
            tensors = [chosen(parameter_of[id(updated)], updated) for updated in group["params"]]
            groups.append([tensor for tensor in tensors if tensor is not None])
        return groups

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half weights of each group."""
        return self._groups(lambda parameter, _: parameter if parameter.dtype in HALF_DTYPES else None)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of each group."""
        return self._groups(lambda parameter, updated: updated if parameter is not updated else None)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The weights of each group that were not converted."""
        return self._groups(lambda parameter, updated: parameter if _is_fp32(parameter, updated) else None)


class ParameterLists(GroupLists):
    """The attributes of ``optimizer._amp_stash`` that scripts read."""

    earlier: list[Tensor | None]
    """The gradients of the passes before the running one, in the order of the parameters."""

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates masters, not only the parameters that backward fills."""
        self.binding.refresh()
        return bool(self.binding.master_pairs)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The half weights."""
        return [parameter for parameter, _ in self.pairs() if parameter.dtype in HALF_DTYPES]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of half weights."""
        return [updated for parameter, updated in self.pairs() if parameter is not updated]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The weights that were not converted."""
        return [parameter for parameter, updated in self.pairs() if _is_fp32(parameter, updated)]

    all_fp32_params = all_fp32_from_fp32_params

    def _stashed(self, tensors: list[Tensor]) -> list[Tensor | None]:
        earlier = dict(zip(map(id, self.binding.master_params), self.earlier, strict=False))
        return [earlier.get(id(tensor)) for tensor in tensors]

    @property
    def all_fp16_grad_stash(self) -> list[Tensor | None]:
        """The gradients of half weights before the running backward."""
        return self._stashed(self.all_fp16_params)

    @property
    def all_fp32_from_fp32_grad_stash(self) -> list[Tensor | None]:
        """The gradients of fp32 weights before the running backward."""
        return self._stashed(self.all_fp32_from_fp32_params)

    all_fp32_grad_stash = all_fp32_from_fp32_grad_stash


def _is_fp32(parameter: Tensor, updated: Tensor) -> bool:
    """Whether a weight was not converted: it is updated itself, and is not half."""
    return parameter is updated and parameter.dtype not in HALF_DTYPES
