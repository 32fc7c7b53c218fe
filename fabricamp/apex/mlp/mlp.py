"""Stands in for apex's fused MLP: linear layers with an activation after each of them, by torch's own operations."""

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
from fabricamp.errors import ConfigError

_ACTIVATIONS: Final = ("none", "relu", "sigmoid")
"""The activations by apex's codes: the index of each is its code."""


class MlpFunction:
    """Has the call of apex's autograd function, ``MlpFunction.apply(bias, activation, input, *weights, *biases)``.

    It is no ``torch.autograd.Function`` and has no custom backward: autograd differentiates torch's operations.  ``bias`` is a
    flag, 1 if biases follow the weights; ``activation`` is a code, 0 (none), 1 (relu) or 2 (sigmoid).
    """

    @staticmethod
    def apply(bias: int | bool, activation: int, *args: Tensor) -> Tensor:
        """Returns the output of the last layer; raises :class:`ConfigError` for another code of an activation."""
        if activation not in range(len(_ACTIVATIONS)):
            known = ", ".join(f"{code} ({name})" for code, name in enumerate(_ACTIVATIONS))
            raise ConfigError(f"activation={activation!r} is no code of an MLP's activation (known: {known})")
        value, rest = args[0], args[1:]
        layers = len(rest) // 2 if bias else len(rest)
        bias_tensors: Sequence[Tensor | None] = rest[layers:] if bias else [None] * layers
        for weight, bias_tensor in zip(rest[:layers], bias_tensors, strict=True):
            value = F.linear(value, weight, bias_tensor)
            if activation == 1:
                value = value.relu()
            elif activation == 2:
                value = value.sigmoid()
        return value


def mlp_function(bias: int | bool, activation: int, *args: Tensor) -> Tensor:
    """Returns the output of :class:`MlpFunction`, in autocast's dtype if autocast is on."""
    # Cast by each call, as in apex: autocast's cache would share one cast among calls, and sum their gradients in half.
    return MlpFunction.apply(bias, activation, *_cast_if_autocast_enabled(*args))


class MLP(nn.Module):
    """Linear layers with the sizes ``mlp_sizes`` (input first); each, also the last, is followed by ``activation``.

    ``bias`` says whether the layers have biases.  The attributes ``bias`` and ``activation`` are apex's: 0 or 1, and the
    activation's code.

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
        """Initialises the parameters as apex does: from normal distributions with mean 0.

        The variance of a weight is 2 / (inputs + outputs) of its layer, that of a bias 1 / outputs.
        """
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias_parameter in self.biases:
            nn.init.normal_(bias_parameter, 0.0, math.sqrt(1.0 / len(bias_parameter)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # apex's name
        """Returns the output of the last layer for ``input`` of shape (N, mlp_sizes[0])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Returns the description that ``print`` shows."""
        return f"MLP sizes: {list(self.mlp_sizes)}, Bias={self.bias}, activation={_ACTIVATIONS[self.activation]}"
