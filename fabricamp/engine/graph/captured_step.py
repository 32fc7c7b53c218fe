"""A captured micro-batch of training: the captured call with its gradients and the optimizer's hyper-parameters."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

from fabricamp.engine.graph.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp.engine.graph.logs import LogReplay
    from fabricamp.engine.graph.window import Role, WindowGradients
    from fabricamp.gradients.memory import GradientMemory

_grad: Final = operator.attrgetter("grad")
_NUMBERS: Final = (bool, int, float, str, tuple)


def unchanged(optimizer: Optimizer) -> Callable[[], bool]:
    """Returns a check that the hyper-parameters of ``optimizer``, constants in a graph, are unchanged since this call."""
    groups = optimizer.param_groups

    def numbers() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if isinstance(value, _NUMBERS)} for group in groups]

    captured = numbers()
    return lambda: numbers() == captured


class CapturedStep(Captured):
    """A captured micro-batch of one shape and one ``role`` in its accumulation.

    ``memory`` is the memory in which gradients are summed; None if they are summed in ``.grad``.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, role: Role, tape: LogReplay, memory: GradientMemory | None
    ) -> None:
        super().__init__(module, inputs, tape)
        self.loss: Tensor | None = None
        """The loss, if the micro-batch does not finish its accumulation."""
        self.note: Callable[[], None] | None = None
        """Callback after a replay; it records which parameters the gradient statistics belong to."""
        self.upload: Callable[[], bool] = lambda: True
        """Uploads the optimizer's hyper-parameters; returns whether the optimizer still uses the tensors of the capture."""
        self._role = role
        self._memory = memory
        self._flat = None if memory is None else memory.flat
        self._parameters = list(module.parameters())
        self._before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._presence = [] if memory is None else [memory.presence]

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run`` and records the gradients before and after it."""
        self._before = list(map(_grad, self._parameters))
        super().capture(run, stream, pool)
        # These references keep the graph's memory for the gradients from being reused.
        self._gradients = list(map(_grad, self._parameters))
        if self._memory is not None:
            self._presence.append(self._memory.presence)

    def withdraw(self) -> None:
        """Also restores the gradients."""
        super().withdraw()
        self.ready()

    def fits(self) -> bool:
        """Also checks the gradient memory and the optimizer's tensors, and uploads its hyper-parameters."""
        return (self._memory is None or self._memory.flat is self._flat) and super().fits() and self.upload()

    def takes_over(self, window: WindowGradients) -> bool:
        """Prepares the accumulation in progress for the graph; False if other parameters have gradients than in the capture."""
        if self._memory is not None and self._memory.presence != self._presence[0]:
            return False
        return self._role.opens or window.bring(self._before)

    def ready(self) -> None:
        """Restores the host's gradients from before the step: a capture has already put the graph's own into ``.grad``."""
        self._put(self._before)
        if self._memory is not None:
            self._memory.presence = self._presence[0]

    def launch(self, batch: Any) -> None:
        """Runs the step on the device; ``.grad`` has the graph's gradients afterwards."""
        super().launch(batch)
        self.show_gradients()
        if self._memory is not None:
            self._memory.presence = self._presence[1]

    def show_gradients(self) -> None:
        """Puts the graph's gradients into ``.grad``, unless they are there; an eager step or a validation may have put others."""
        if not all(map(operator.is_, map(_grad, self._parameters), self._gradients)):
            self._put(self._gradients)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def follow(self, *, first: bool) -> Any:
        """Also records which parameters the gradient statistics belong to."""
        if not first and self.note is not None:
            self.note()
        return super().follow(first=first)
