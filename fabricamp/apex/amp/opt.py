"""The optimizer wrapper of apex's old interface: ``handle.wrap_optimizer(optimizer, num_loss)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fabricamp.apex.amp._amp_state import AmpError
from fabricamp.apex.amp._process_optimizer import process_optimizer
from fabricamp.apex.amp.handle import AmpHandle, NoOpHandle, backward_pass
from fabricamp.apex.amp.scaler import LossScaler


class OptimWrapper:
    """An optimizer with one scale for each of ``num_loss`` losses; each step has to scale them in the same order."""

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._handle = amp_handle
        self._scalers = [LossScaler("dynamic") for _ in range(num_loss)]
        self._next = 0

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yields the scaled loss; the exit of the context unscales the gradients."""
        if isinstance(self._handle, NoOpHandle):
            yield loss
            return
        if self._next == len(self._scalers):
            raise AmpError(
                f"scale_loss was called more often than num_loss={len(self._scalers)} since the last step; give "
                "wrap_optimizer the number of losses"
            )
        number, self._next = self._next, self._next + 1
        scaler = self._scalers[number]
        scaler.place(loss.device)
        with backward_pass([process_optimizer(self._optimizer)], scaler, loss, number) as scaled:
            yield scaled

    def step(self, closure: Any = None) -> Any:
        """Steps the optimizer; skips the step after an overflow."""
        if closure is not None:
            raise AmpError("Currently, Amp does not support closure use with optimizers. Call step without it")
        self._next = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
