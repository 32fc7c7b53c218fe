"""Linear layers with an activation after each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fabricamp.apex._autocast_utils import _cast_if_autocast_enabled
from fabricamp.arguments.checks import check_choice

_ACTIVATIONS: Final = ("none", "relu", "sigmoid")


class MlpFunction:
    """``MlpFunction.apply(bias, activation, input, *weights, *biases)``; autograd runs through torch's operations.

    ``bias`` says whether there are biases; ``activation`` is 0 (none), 1 (relu) or 2 (sigmoid).
    """

    @staticmethod
    def apply(bias: int | bool, activation: int, *args: Tensor) -> Tensor:
        """Returns the output of the last layer."""
        value, rest = args[0], args[1:]
        layers = len(rest) // 2 if bias else len(rest)
        biases: Sequence[Tensor | None] = rest[layers:] if bias else [None] * layers
        for weight, shift in zip(rest[:layers], biases, strict=True):
            value = F.linear(value, weight, shift)
            if activation:
                value = value.relu() if activation == 1 else value.sigmoid()
        return value


def mlp_function(bias: int | bool, activation: int, *args: Tensor) -> Tensor:
    """Returns the output of :class:`MlpFunction`, in autocast's dtype if autocast is on."""
    result: Tensor = MlpFunction.apply(bias, activation, *_cast_if_autocast_enabled(*args))
    return result


class MLP(nn.Module):
    """Linear layers with the sizes ``mlp_sizes`` (input first); each, also the last, is followed by ``activation``.

    >>> MLP([4, 8, 2])(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        check_choice("MLP activation", activation, _ACTIVATIONS)
        self.mlp_sizes = mlp_sizes
        self.num_layers = len(mlp_sizes) - 1
        self.bias = 1 if bias else 0
        self.activation = _ACTIVATIONS.index(activation)
        for layer, (before, after) in enumerate(itertools.pairwise(mlp_sizes)):
            setattr(self, f"weight_{layer}", nn.Parameter(torch.empty(after, before)))
            if bias:
                setattr(self, f"bias_{layer}", nn.Parameter(torch.empty(after)))
        self.reset_parameters()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights, one per layer, named ``weight_0`` and so on."""
        return [getattr(self, f"weight_{layer}") for layer in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The biases, one per layer, named ``bias_0`` and so on; empty without ``bias``."""
        return [getattr(self, f"bias_{layer}") for layer in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Initialises the parameters at random."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / len(bias)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # apex's name
        """Returns the output of the last layer for ``input`` of shape (N, sizes[0])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Returns the description that ``print`` shows."""
        return f"MLP sizes: {list(self.mlp_sizes)}, Bias={self.bias}, activation={_ACTIVATIONS[self.activation]}"
