"""A captured micro-batch of training: beside the call itself its gradients, and the optimizer's numbers."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

from fabricamp.engine.graph.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp.engine.graph.logs import LogTape
    from fabricamp.engine.graph.window import Role, WindowGradients
    from fabricamp.gradients.memory import GradientMemory

_grad: Final = operator.attrgetter("grad")
_NUMBERS: Final = (bool, int, float, str, tuple)


def unchanged(optimizer: Optimizer) -> Callable[[], bool]:
    """Returns what tells whether the numbers of ``optimizer``, which a graph has as constants, are still the same."""
    groups = optimizer.param_groups

    def numbers() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if isinstance(value, _NUMBERS)} for group in groups]

    captured = numbers()
    return lambda: numbers() == captured


class CapturedStep(Captured):
    """A micro-batch of one shape and one ``role`` in its window.

    ``memory`` is where gradients are summed, None where ``.grad`` is.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, role: Role, tape: LogTape, memory: GradientMemory | None
    ) -> None:
        super().__init__(module, inputs, tape)
        self.loss: Tensor | None = None
        """That of a window that stays open."""
        self.note: Callable[[], None] | None = None
        """What the host notes of the gradients behind a replay."""
        self.upload: Callable[[], bool] = lambda: True
        """Brings the optimizer's numbers to the device; returns whether its tensors are those of the capture."""
        self._role = role
        self._memory = memory
        self._flat = None if memory is None else memory.flat
        self._parameters = list(module.parameters())
        self._before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._presence = [] if memory is None else [memory.presence]

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``."""
        self._before = list(map(_grad, self._parameters))
        super().capture(run, stream, pool)
        # Held, the graph's memory for them is nobody else's.
        self._gradients = list(map(_grad, self._parameters))
        if self._memory is not None:
            self._presence.append(self._memory.presence)

    def withdraw(self) -> None:
        """Leaves the gradients too as they were."""
        super().withdraw()
        self.ready()

    def fits(self) -> bool:
        """Whether that is so of the optimizer, too."""
        return (self._memory is None or self._memory.flat is self._flat) and super().fits() and self.upload()

    def takes_over(self, window: WindowGradients) -> bool:
        """Readies the open window for the graph; returns False where it has gradients of other parameters than in the capture."""
        if self._memory is not None and self._memory.presence != self._presence[0]:
            return False
        return self._role.opens or window.bring(self._before)

    def ready(self) -> None:
        """Leaves the host as the graph begins: a capture has made its gradients those of ``.grad`` already."""
        self._put(self._before)
        if self._memory is not None:
            self._memory.presence = self._presence[0]

    def launch(self, batch: Any) -> None:
        """Runs the step on the device, with the graph's gradients in ``.grad`` behind it."""
        super().launch(batch)
        self.show_gradients()
        if self._memory is not None:
            self._memory.presence = self._presence[1]

    def show_gradients(self) -> None:
        """Puts the graph's gradients into ``.grad``, where an eager step or a validation has put others."""
        if not all(map(operator.is_, map(_grad, self._parameters), self._gradients)):
            self._put(self._gradients)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def follow(self, *, first: bool) -> Any:
        """Notes the gradients' statistics, too."""
        if not first and self.note is not None:
            self.note()
        return super().follow(first=first)
