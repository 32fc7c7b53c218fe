"""LayerNorm and RMSNorm as modules."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from fabricamp.errors import ConfigError
from fabricamp.ops.norm.normalization import layer_norm, rms_norm

# Makes torch.fx trace a norm as one operation, like torch's own norms.
torch.fx.wrap("layer_norm")
torch.fx.wrap("rms_norm")


class NoParametersError(ConfigError, RuntimeError):
    """Raised for a Mixed norm without parameters; also a ``RuntimeError``, as apex's users expect."""


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, run by kernels where they are faster; parameters, state dict and attributes are the same.

    The output has the input's dtype, independent of the parameters' dtype; under autocast it has autocast's dtype (torch's has
    fp32).  ``memory_efficient`` saves the output for backward instead of the input.

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
    """torch's RMSNorm, run by kernels where they are faster; otherwise like :class:`FusedLayerNorm`.

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
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            dtype=self.weight.dtype,
            memory_efficient=self.memory_efficient,
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
    """Removes ``elementwise_affine`` from the arguments of a Mixed module, which always has parameters; raises if it is False."""
    if "elementwise_affine" not in given:
        return True
    if not given.pop("elementwise_affine"):
        raise NoParametersError(
            f"{name}(elementwise_affine=False): its output takes the dtype of its parameters; use "
            f"{name.removeprefix('Mixed')} for a norm without any"
        )
    warnings.warn(f"{name} always has parameters: leave elementwise_affine out", stacklevel=4)
    return True
