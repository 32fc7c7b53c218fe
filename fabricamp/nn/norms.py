"""LayerNorm and RMSNorm as modules, and apex's functions of them."""

from __future__ import annotations

import warnings
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from fabricamp.errors import ConfigError
from fabricamp.ops.normalization import layer_norm, rms_norm, rms_norm_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


# torch.fx sees a norm as one operation, as it sees torch's.
torch.fx.wrap("layer_norm")
torch.fx.wrap("rms_norm")


class NoParametersError(ConfigError, RuntimeError):
    """A Mixed norm that was to have no parameters; a ``RuntimeError`` too, as apex's users expect."""


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm by kernels where they are faster; parameters, state dict and attributes are the same.

    The output has the input's dtype, whatever the parameters', and under autocast autocast's (torch's gives fp32 there).
    ``memory_efficient`` keeps the output for backward in place of the input.

    >>> import torch
    >>> FusedLayerNorm(2)(torch.tensor([[1.0, 3.0]])).tolist()
    [[-0.9999949932098389, 0.9999949932098389]]
    """

    memory_efficient = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = [index(normalized_shape)] if isinstance(normalized_shape, (int, Integral)) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Returns ``input``, normalised."""
        if is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        efficient = self.memory_efficient
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, memory_efficient=efficient)


class FusedRMSNorm(nn.RMSNorm):
    """torch's RMSNorm by kernels where they are faster; the rest as in :class:`FusedLayerNorm`.

    >>> import torch
    >>> FusedRMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).tolist()
    [[1.0, 1.0]]
    """

    memory_efficient = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = [index(normalized_shape)] if isinstance(normalized_shape, (int, Integral)) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``, normalised."""
        if is_scripting():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, memory_efficient=self.memory_efficient)


class MixedFusedLayerNorm(FusedLayerNorm):
    """A :class:`FusedLayerNorm` whose output has the dtype of its parameters, outside of autocast.

    >>> import torch
    >>> MixedFusedLayerNorm(2)(torch.tensor([[1.0, 3.0]], dtype=torch.float16)).dtype
    torch.float32
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, _affine(type(self).__name__, kwargs), memory_efficient, **kwargs)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Returns ``input``, normalised, in the dtype of the parameters."""
        if is_scripting():
            x = input.to(self.weight.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """A :class:`FusedRMSNorm` whose output has the dtype of its weight, outside of autocast.

    >>> import torch
    >>> MixedFusedRMSNorm(2)(torch.tensor([[3.0, 3.0]], dtype=torch.float16)).dtype
    torch.float32
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, _affine(type(self).__name__, kwargs), memory_efficient, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``, normalised, in the dtype of the weight."""
        if is_scripting():
            return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            dtype=self.weight.dtype,
            memory_efficient=self.memory_efficient,
        )


def _affine(name: str, given: dict[str, Any]) -> bool:
    """Takes ``elementwise_affine`` out of the arguments of a Mixed module, which has parameters always."""
    if "elementwise_affine" not in given:
        return True
    if not given.pop("elementwise_affine"):
        raise NoParametersError(
            f"{name}(elementwise_affine=False): its output takes the dtype of its parameters; use "
            f"{name.removeprefix('Mixed')} for a norm without any"
        )
    warnings.warn(f"{name} always has parameters: leave elementwise_affine out", stacklevel=4)
    return True


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002  # apex's names and order
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in its own dtype."""
    return layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient)


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in its own dtype, without parameters."""
    return layer_norm(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the LayerNorm of ``input`` in the dtype of ``weight``."""
    dtype = weight.dtype
    return layer_norm(input, normalized_shape, weight, bias, eps, dtype=dtype, memory_efficient=memory_efficient)


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` in its own dtype."""
    return rms_norm(input, normalized_shape, weight, eps, memory_efficient=memory_efficient)


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` in its own dtype, without parameters."""
    return rms_norm(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMSNorm of ``input`` in the dtype of ``weight``."""
    dtype = weight.dtype
    return rms_norm(input, normalized_shape, weight, eps, dtype=dtype, memory_efficient=memory_efficient)


def manual_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Returns the RMSNorm of ``input`` by torch's own operations; half weights give an output of their dtype."""
    dtype = input.dtype if weight is None else weight.dtype
    return rms_norm_reference(input, normalized_shape, weight, eps, dtype=dtype)
