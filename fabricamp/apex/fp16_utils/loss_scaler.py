"""Loss scalers with Python numbers, for scripts that call and update them by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.apex.amp.scaler import by_device
from fabricamp.precision.param_grads import values_of


class LossScaler:
    """A constant loss scale."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns False: a constant scale is not checked for overflow."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """A backward hook: returns ``grad_in`` times the scale."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs backward on the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that halves at an overflow, not below 1, and doubles after ``scale_window`` passes without one.

    >>> scaler = DynamicLossScaler(init_scale=4.0, scale_window=2)
    >>> for overflow in (True, False, False):
    ...     scaler.update_scale(overflow)
    >>> scaler.loss_scale
    4.0
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns whether a gradient of ``params`` is not finite; the host waits once per device."""
        gradients = [values_of(parameter.grad) for parameter in params if parameter.grad is not None]
        return any(self._has_inf_or_nan(*own) for _, (own,) in by_device(gradients))

    @staticmethod
    def _has_inf_or_nan(*tensors: Tensor) -> bool:
        scale = torch.ones((), dtype=torch.float32, device=tensors[0].device)
        return not bool(torch.isfinite(ops.gradient_statistics(tensors, scale).sum()))

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale after a pass."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
