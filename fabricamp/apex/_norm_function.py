"""Norms as apex's autograd functions, with the ``forward`` and ``backward`` that libraries inspect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class NormFunction(torch.autograd.Function):
    """Base class for one norm: a subclass sets ``apply`` to the norm's function; ``forward`` and ``backward`` are its passes.

    The function's parameters before ``normalized_shape`` or ``epsilon`` are tensors.
    """

    def __init_subclass__(cls) -> None:
        cls.forward = staticmethod(_pass_of(cls.apply))  # type: ignore[method-assign]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Returns the gradients of the tensors, and None for each option."""
        leaves, output, options = ctx.passes
        return (*torch.autograd.grad(output, leaves, grad_outputs), *[None] * options)


def _pass_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns ``function`` as the ``forward`` of an autograd function, with ``ctx`` before its own parameters."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    tensors = next(index for index, name in enumerate(names) if name in ("normalized_shape", "epsilon"))

    @functools.wraps(function)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in bound.args[:tensors]]
            output = function(*leaves, *bound.args[tensors:])
        ctx.passes = leaves, output, len(names) - tensors
        return output.detach()

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward
