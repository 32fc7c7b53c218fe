"""One captured step: a CUDA graph, the memory that it reads and writes, and what the host does beside a replay."""

from __future__ import annotations

import contextlib
import operator
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.engine.graph.batches import NotCapturableError, copied, tensors_of
from fabricamp.engine.graph.effects import Constants
from fabricamp.torch_private import end_failed_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fabricamp.engine.graph.logs import LogTape
    from fabricamp.engine.graph.window import Role, WindowGradients
    from fabricamp.gradients.memory import GradientMemory

_grad: Final = operator.attrgetter("grad")
_OWN_FOLDER = str(Path(__file__).parents[2])
_TORCHS_FOLDER = str(Path(torch.__file__).parent)


class CapturedStep:
    """A micro-batch of one shape and one ``role`` in its window.

    ``inputs`` are read by the graph, ``outputs`` and the gradients written; all live as long as this does.  ``memory`` is where
    gradients are summed, None where ``.grad`` is.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, role: Role, tape: LogTape, memory: GradientMemory | None
    ) -> None:
        self.outputs: Any = None
        self.loss: Tensor | None = None
        """That of a window that stays open."""
        self.note: Callable[[], None] | None = None
        """What the host notes of the gradients behind a replay."""
        self.upload: Callable[[], bool] = lambda: True
        """Brings the optimizer's numbers to the device; returns whether its tensors are those of the capture."""
        self.replays = 0
        self._inputs = tensors_of(inputs)
        self._role = role
        self._tape = tape
        self._memory = memory
        self._flat = None if memory is None else memory.flat
        self._graph = torch.cuda.CUDAGraph()
        self._parameters = list(module.parameters())
        self._before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._presence = [] if memory is None else [memory.presence]
        self.constants = Constants(module, getattr(module, "hparams", {}))

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which launches a step on ``stream``; nothing of it has run on the device then.

        Graphs of one ``pool`` write over each other's memory.  Raises what ``run`` does, with the gradients as they were.
        """
        captured = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        self._before = list(map(_grad, self._parameters))
        try:
            with _put_back_on_failure(stream.device, pool), captured:
                self.outputs = run()
        except BaseException:
            self.withdraw()
            raise
        self._tape.take()
        # Held, the graph's memory for them is nobody else's.
        self._gradients = list(map(_grad, self._parameters))
        if self._memory is not None:
            self._presence.append(self._memory.presence)

    def withdraw(self) -> None:
        """Leaves the host as it was before the capture, whose first replay does not come."""
        self._tape.undo()
        self._put(self._before)
        if self._memory is not None:
            self._memory.presence = self._presence[0]

    def fits(self) -> bool:
        """Whether everything that the graph reads and writes is still where it was, and every number what it was."""
        same_sums = self._memory is None or self._memory.flat is self._flat
        return same_sums and self.constants.hold() and self._tape.holds() and self.upload()

    def takes_over(self, window: WindowGradients) -> bool:
        """Readies the open window for the graph; returns False where it has gradients of other parameters than in the capture."""
        if self._memory is not None and self._memory.presence != self._presence[0]:
            return False
        return self._role.opens or window.bring(self._before)

    def launch(self, batch: Any) -> None:
        """Runs the step on the device, with the graph's gradients in ``.grad`` behind it."""
        torch._foreach_copy_(self._inputs, tensors_of(batch), non_blocking=True)
        self._graph.replay()
        self.replays += 1
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
        """Does what the host does behind a replay, which the capture has done for the first; returns copies of the outputs."""
        if not first:
            self._tape.play()
            if self.note is not None:
                self.note()
        return None if self.outputs is None else copied(self.outputs)


@contextlib.contextmanager
def _put_back_on_failure(device: torch.device, pool: Any) -> Iterator[None]:
    """A capture that fails leaves torch's generator and allocator as if it went on: both are brought out of it."""
    generator = torch.cuda.default_generators[device.index or 0]
    spare = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(spare)
        with contextlib.suppress(RuntimeError):  # the capture had not begun, or torch has ended it
            end_failed_capture(device, pool)
        raise


def place_of(error: BaseException) -> str:
    """Returns the line of the user's code at which the first of a chain of exceptions was raised; empty where there is none."""
    seen: set[int] = set()
    while (earlier := error.__cause__ or error.__context__) is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        error = earlier
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OWN_FOLDER, _TORCHS_FOLDER, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def reason_of(error: BaseException) -> str:
    """Returns why a capture failed, in a line, with the user's line."""
    if isinstance(error, NotCapturableError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the graph's memory does not fit beside what is allocated; give a smaller batch"
    place = place_of(error)
    first = str(error).partition("\n")[0]
    where = f" at {place}" if place else ""
    return f"the step does what a capture cannot hold{where} ({type(error).__name__}: {first})"
