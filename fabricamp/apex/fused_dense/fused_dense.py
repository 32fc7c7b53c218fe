"""Dense layers through torch's linear, in which cuBLAS adds the bias in the same pass."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fabricamp.errors import ConfigError


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: A002  # apex's name
    """Returns ``input @ weight.T + bias``."""
    return F.linear(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002  # apex's name
    """Returns ``input @ weight.T``."""
    return F.linear(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor,  # noqa: A002  # apex's name
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
) -> Tensor:
    """Returns dense(gelu(dense(input))), with the tanh form of GELU, as in cuBLAS."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


class FusedDense(nn.Linear):
    """A linear layer.

    >>> import torch
    >>> FusedDense(4, 2)(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):
    """Linear, GELU (tanh form), linear; the parameters are ``weight1, bias1, weight2, bias2``.

    >>> import torch
    >>> FusedDenseGeluDense(4, 8, 2)(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise ConfigError(
                "FusedDenseGeluDense(bias=False) does not exist; use nn.Sequential of Linear, GELU, Linear"
            )
        first = nn.Linear(in_features, intermediate_features)
        second = nn.Linear(intermediate_features, out_features)
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # apex's name
        """Returns the output of the second layer for ``input`` of shape (..., in_features)."""
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)
