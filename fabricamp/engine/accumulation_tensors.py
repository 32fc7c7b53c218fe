"""Saves and restores an accumulation's tensors beside ``.grad``: sums of gradients, scalers of several losses, loss weights."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.engine.loss_weights import LossWeights
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.base import Precision


class AccumulationTensors:
    """The tensors of the accumulation in progress; ``accumulate`` is the number of micro-batches per step."""

    def __init__(
        self, precision: Precision, optimizers: Sequence[Optimizer], accumulate: int, weights: LossWeights | None = None
    ) -> None:
        self._weights = weights
        self._precision = precision
        self._optimizers = optimizers
        self._accumulate = accumulate

    def taken(self, loss: Tensor) -> dict[str, Any]:
        """Returns the tensors, not copied, followed by the last micro-batch's ``loss``, with precision and ``accumulate``."""
        sums = [tensor for memory in self._memories() for tensor in memory.tensors]
        tensors = [*sums, *self._beside(), loss]
        window = {"level": self._precision.name, "accumulate": self._accumulate, "tensors": tensors}
        return window if self._weights is None else {**window, "weighted": True}

    def give_back(self, window: dict[str, Any]) -> str:
        """Restores the result of :meth:`taken`; returns why that is impossible, or an empty string."""
        for name, here in (("level", self._precision.name), ("accumulate", self._accumulate)):
            if window[name] != here:
                return f"{name} was {window[name]!r} there and is {here!r} here"
        memories, beside, values = self._memories(), self._beside(), iter(window["tensors"][:-1])
        sums = [list(islice(values, len(memory.tensors))) for memory in memories]
        rest = list(values)
        fit = all(memory.fits(one) for memory, one in zip(memories, sums, strict=True))
        if not fit or [tensor.shape for tensor in beside] != [tensor.shape for tensor in rest]:
            return "gradients are summed in other tensors"
        for memory, one in zip(memories, sums, strict=True):
            memory.take(one)
        for tensor, value in zip(beside, rest, strict=True):
            tensor.copy_(value)
        return ""

    def _memories(self) -> list[GradientMemory]:
        return [self._precision.gradients(one) for one in self._optimizers]

    def _beside(self) -> list[Tensor]:
        verdicts = self._precision.verdicts
        words = [] if verdicts is None else verdicts.window_tensors
        return words if self._weights is None else [*words, self._weights.total]
