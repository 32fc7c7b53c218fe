"""Norms as apex's autograd functions, whose ``forward`` and ``backward`` libraries look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


class NormFunction(torch.autograd.Function):
    """A norm that a subclass names: ``apply`` is the function itself, ``forward`` and ``backward`` are its passes one by one."""

    @staticmethod
    def run(ctx: Any, function: Callable[..., Tensor], tensors: tuple[Tensor, ...], *options: Any) -> Tensor:
        """Returns ``function(*tensors, *options)`` and keeps what :meth:`backward` needs of it."""
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in tensors]
            output = function(*leaves, *options)
        ctx.passes = leaves, output, len(options)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Returns the gradients of the tensors, and None for each option."""
        leaves, output, options = ctx.passes
        return (*torch.autograd.grad(output, leaves, grad_outputs), *[None] * options)
