"""``mlp_cuda``: separate forward and backward passes of :class:`fabricamp.apex.mlp.MLP`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fabricamp.apex.mlp.mlp import MlpFunction


@torch.no_grad()
def forward(bias: int, activation: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns a list with the output; ``inputs`` are the input, the weights, and the biases if there are any."""
    return [MlpFunction.apply(bias, activation, *inputs)]


def backward(
    bias: int, activation: int, grad_o: Tensor, fprop_outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients of ``inputs``; computes the forward again."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        output = MlpFunction.apply(bias, activation, *leaves)
    return list(torch.autograd.grad(output, leaves, grad_o))
