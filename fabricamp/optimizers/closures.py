"""What an optimizer's ``step`` does with a closure: forward and backward, which returns the loss."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from fabricamp.errors import ConfigError
from fabricamp.optimizers.refusals import owned_parameters


def demands_closure(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` takes a closure and may do more with it than ask for the loss.

    torch's optimizers and the package's call a closure once, before they read anything (LBFGS demands one).
    """
    within = getattr(optimizer, "optim", None)
    if isinstance(within, Optimizer) and calls_once(optimizer):  # LARC hands on what it gets
        return takes_closure(within)
    if calls_once(optimizer):
        return False
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def calls_once(optimizer: Optimizer) -> bool:
    """Returns whether the ``step`` of the optimizer's class is torch's or the package's, and not LBFGS's."""
    package = getattr(type(optimizer).step, "__module__", "").partition(".")[0]
    return package in ("torch", "fabricamp") and not demands_closure(optimizer)


class FreeClosure:
    """A closure that returns the ``loss`` that is there, as long as neither weights nor gradients of ``optimizer`` are written.

    After a write it raises :class:`ConfigError` with ``reason``, which says why there is no other forward and backward.
    """

    def __init__(self, optimizer: Optimizer, loss: Any, reason: str) -> None:
        self._optimizer = optimizer
        self._loss = loss
        self._reason = reason
        self._parameters = owned_parameters(optimizer)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._versions = self._current_versions()

    def __call__(self) -> Any:
        """Returns the loss."""
        same = all(one.grad is gradient for one, gradient in zip(self._parameters, self._gradients, strict=True))
        if same and self._current_versions() == self._versions:
            return self._loss
        raise ConfigError(
            f"{type(self._optimizer).__name__}.step calls its closure after it has changed weights or gradients, and {self._reason}"
        )

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in (*self._parameters, *self._gradients) if tensor is not None]
