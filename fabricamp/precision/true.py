"""Lightning's "true" precisions: one dtype for the complete step, with its inputs, its outputs and torch's default dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fabricamp.precision.casting import cast_floating
from fabricamp.precision.level import OptLevel


class TruePrecision(OptLevel):
    """O3 without the fp32 boundary: batches are cast to ``dtype``, and module outputs keep their dtype.

    >>> TruePrecision(torch.bfloat16).convert_input(torch.ones(2)).dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("O3", cast_model_type=dtype)
        self.level = dataclasses.replace(self.level, whole_step=True)
        self.dtype = dtype
        self._default = _DefaultDtype(dtype)

    def convert_input(self, batch: Any) -> Any:
        """Casts the floating tensors of a batch to the module's dtype."""
        return cast_floating(batch, self.dtype)

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs the user's step with ``dtype`` as torch's default dtype."""
        with self._default:
            return step(*args)

    def _bound(self, module: nn.Module, converted: set[int]) -> None:
        """Adds no boundaries, so no call is cast."""


class _DefaultDtype:
    """A context that sets torch's default dtype; it can be nested."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before.pop())
